"""The target as the trainer's data source: an SGLang engine in this process, or a running server with a shared folder.

Either answers prompts, and captures finished texts through the serving worker's own tee (`sglang_dflash.capture`).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash import capture
from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import DrafterSpec

from .drafter_model import Drafter
from .errors import TrainError
from .export import write_drafter

_WAIT_S = 120.0


class Engine(Protocol):
    """What both sources can do."""

    def generate(self, prompts: Sequence[list[int]], sampling: dict[str, Any], rids: list[str]) -> list[list[int]]:
        """The continuation of each prompt, in order."""


class Captured:
    """What one capture brought: tensors as `sglang_dflash.capture` writes them, and the server's fingerprint."""

    def __init__(self, file: Path):
        self.tensors: dict[str, Tensor] = load_file(file)
        with safe_open(str(file), framework="pt") as opened:
            self.fingerprint: dict[str, Any] = json.loads(opened.metadata()["fingerprint"])


def capture_texts(engine: Engine, folder: Path, texts: Mapping[str, list[int]]) -> dict[str, Captured]:
    """Prefill whole texts (token ids by id) and read what the server captured; its files are removed.

    Raises TrainError with the server's own reason, or when nothing arrives.
    """
    rids = [f"{capture.PREFIX}{name}" for name in texts]
    for rid in rids:
        for suffix in (".safetensors", ".error"):
            (folder / f"{capture.file_stem(rid)}{suffix}").unlink(missing_ok=True)
    engine.generate(list(texts.values()), {"temperature": 0, "max_new_tokens": 1}, rids)
    out = {}
    for name, rid in zip(texts, rids, strict=True):
        file = folder / f"{capture.file_stem(rid)}.safetensors"
        _wait_for(file, name)
        out[name] = Captured(file)
        file.unlink()
        if out[name].tensors["token_ids"].tolist() != list(texts[name]):
            raise TrainError(f"capture of {name!r}: found other tokens than those sent, want the same; report this.")
    return out


def _wait_for(file: Path, name: str) -> None:
    error, deadline = file.with_suffix(".error"), time.monotonic() + _WAIT_S
    while not file.exists():
        if error.exists() and (reason := error.read_text().strip()):
            raise TrainError(f"{reason}.")
        if time.monotonic() > deadline:
            raise TrainError(
                f"capture of {name!r}: found nothing in {file.parent} after {_WAIT_S:.0f} s, want {file.name}; is "
                f"that the server's {capture.FOLDER}?"
            )
        time.sleep(0.01)


class RemoteEngine:
    """A server's URL."""

    def __init__(self, url: str, at_once: int = 16):
        self._http = httpx.Client(base_url=url, timeout=1800, limits=httpx.Limits(max_connections=at_once))
        self._pool = ThreadPoolExecutor(at_once)

    def generate(self, prompts: Sequence[list[int]], sampling: dict[str, Any], rids: list[str]) -> list[list[int]]:
        return list(self._pool.map(lambda job: self._one(job[0], sampling, job[1]), zip(prompts, rids, strict=True)))

    def _one(self, ids: list[int], sampling: dict[str, Any], rid: str) -> list[int]:
        body = {"input_ids": ids, "sampling_params": sampling, "rid": rid}
        try:
            response = self._http.post("/generate", json=body)
        except httpx.TransportError as e:
            raise TrainError(
                f"{self._http.base_url}: found no answer ({type(e).__name__}), want a server there."
            ) from e
        if response.status_code != 200:
            said = " ".join(response.text.split())[:300]
            raise TrainError(f"{self._http.base_url}/generate: found status {response.status_code}, want 200: {said}")
        return list(response.json()["output_ids"])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()


class InProcessEngine:
    """``sglang.Engine`` with the settings that capture needs. Its processes end with ours, however that ends."""

    def __init__(self, settings: dict[str, Any], environment: Mapping[str, str]):
        # Read by SGLang's processes and, for the platform, at import.
        os.environ.update(environment)
        import sglang

        self._engine = sglang.Engine(**settings)

    def generate(self, prompts: Sequence[list[int]], sampling: dict[str, Any], rids: list[str]) -> list[list[int]]:
        answers = self._engine.generate(input_ids=[list(p) for p in prompts], sampling_params=sampling, rid=rids)
        return [list(answer["output_ids"]) for answer in answers]

    def close(self) -> None:
        self._engine.shutdown()


def engine_settings(target: str, length: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Settings common to answering and capture; ``extra`` are the user's and win."""
    settings: dict[str, Any] = {"model_path": target, "disable_radix_cache": True, "log_level": "error"}
    if torch.cuda.is_available():
        settings |= {"attention_backend": "triton"}
    else:
        settings |= {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "max_running_requests": 8,
            "max_total_tokens": max(4096, 8 * (length + 64)),
            "max_mamba_cache_size": 40,
        }
    return settings | dict(extra)


def engine_environment() -> dict[str, str]:
    """On a CPU: SGLang's CPU platform, one thread a process, fp32 convolution states."""
    if torch.cuda.is_available():
        return {}
    return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}


@contextmanager
def answering(target: str, length: int, url: str | None, extra: Mapping[str, Any]) -> Iterator[Engine]:
    """An engine that decodes plainly."""
    engine: Any = (
        RemoteEngine(url) if url else InProcessEngine(engine_settings(target, length, extra), engine_environment())
    )
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def capturing(
    target: str,
    layer_ids: tuple[int, ...],
    length: int,
    *,
    url: str | None = None,
    folder: Path | None = None,
    final: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Engine, Path]]:
    """An engine that captures, and the folder it writes to: memory where the system has a tmpfs.

    With ``url`` the server is somebody else's and ``folder`` is its ``SGLANG_DFLASH_CAPTURE``.
    """
    if url:
        if folder is None or not folder.is_dir():
            raise TrainError(
                f"--capture-folder: found {folder}, want the folder that {url} was given as {capture.FOLDER}."
            )
        remote = RemoteEngine(url)
        try:
            yield remote, folder
        finally:
            remote.close()
        return
    memory = Path("/dev/shm")
    spool = Path(tempfile.mkdtemp(prefix="sglang-dflash-capture-", dir=memory if os.access(memory, os.W_OK) else None))
    engine: InProcessEngine | None = None
    try:
        drafter = write_bootstrap_drafter(spool / "drafter", target, layer_ids)
        (spool / "captured").mkdir()
        environment = engine_environment() | {capture.FOLDER: str(spool / "captured")}
        settings: dict[str, Any] = {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(drafter),
        }
        if final:
            environment[capture.FINAL] = "1"
            settings["disable_prefill_cuda_graph"] = True
        engine = InProcessEngine(engine_settings(target, length, settings | dict(extra or {})), environment)
        yield engine, spool / "captured"
    finally:
        if engine is not None:
            engine.close()
        for name in (capture.FOLDER, capture.FINAL):
            os.environ.pop(name, None)
        shutil.rmtree(spool, ignore_errors=True)


def write_bootstrap_drafter(out: Path, target: str, layer_ids: tuple[int, ...]) -> Path:
    """A one-layer random drafter that conditions on ``layer_ids``: it makes a server capture before one is trained."""
    facts = target_facts(target)
    spec = DrafterSpec(
        path=str(out),
        block_size=2,
        mask_token_id=facts.vocab_size - 1,
        target_layer_ids=layer_ids,
        num_layers=1,
        hidden_size=facts.hidden_size,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        attention_bias=False,
        attention_sink_bias=False,
        num_target_layers=facts.num_hidden_layers,
        max_position_embeddings=facts.context_len or 32768,
        rope_theta=10000.0,
        layer_types=None,
        sliding_window=None,
    )
    weights = dict(Drafter(spec).initialise(0).state_dict())
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return write_drafter(out, spec, weights, facts.vocab_size, dtype=dtype)
