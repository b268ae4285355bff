"""Fingerprint: what the numbers of a server depend on, and whether a drafter was trained on the same.

Stored in captured data, in checkpoints and beside an exported drafter (``provenance.json``). At start-up a server
compares the drafter's with its own:

- **refused**: another target (its config or weights), tokenizer, chat template or other layer ids. Such a drafter
  loads, and then drafts for a text that this server never sees.
- **warned about**: SGLang's version, kernels, dtypes, quantisation. They move hidden states by rounding (cosine above
  0.9999 was measured between fla and torch), which costs acceptance only where much else is wrong. Weights of another
  quantisation are other bytes, so then they too only warn.

``SGLANG_DFLASH_PROVENANCE=warn`` turns refusals into warnings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_dflash.drafter_config import DrafterError, read_json, refuse

logger = logging.getLogger(__name__)

FILE = "provenance.json"
SWITCH = "SGLANG_DFLASH_PROVENANCE"
_IDENTITY = ("layer_ids", "target_config", "target_weights", "tokenizer", "chat_template")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class Fingerprint:
    """What a server's hidden states depend on. Hashes are hex, "none" where there is no such file."""

    sglang: str
    attention: str  # class of the backend that runs prefill
    linear_attention: str  # function that really runs in prefill; "none" for a dense target
    conv: str
    dtype: str
    state_dtype: str
    quantization: str
    layer_ids: tuple[int, ...]
    target_config: str
    target_weights: str  # of the headers and of samples of every file: 54 GB are not read twice
    tokenizer: str
    chat_template: str
    thinking: str = "unknown"  # on | off | unknown: a request's choice, so a server cannot know

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str | Path) -> Fingerprint:
        """Raises DrafterError, naming ``where``, for keys too many or too few."""
        known = {f.name for f in fields(cls)}
        wrong = sorted((known - {"thinking"}) - set(value)) + sorted(set(value) - known)
        if wrong:
            raise refuse(
                where, wrong[0], "it missing or unknown", f"the keys {', '.join(sorted(known))}", "export again"
            )
        return cls(**value | {"layer_ids": tuple(value["layer_ids"])})

    def digest(self) -> str:
        """16 hex digits that name this fingerprint."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Fingerprint) -> list[str]:
        """One line a field in which ``other`` (the server here) differs from this (trained with)."""
        mine, theirs = self.to_json(), other.to_json()
        return [
            f"{name}: trained with {mine[name]}, served with {theirs[name]}"
            for name in mine
            if mine[name] != theirs[name] and name != "thinking"
        ]


def read_provenance(drafter: str | Path) -> Fingerprint | None:
    """The fingerprint beside a drafter's weights, or None (z-lab's have none). Raises DrafterError if unreadable."""
    file = Path(drafter) / FILE
    return Fingerprint.from_json(read_json(file, "export the drafter again"), file) if file.exists() else None


def check_provenance(drafter: str | Path, server: Fingerprint) -> None:
    """Compare at start-up; raise DrafterError unless told to warn. Says one line for a drafter without provenance."""
    trained = read_provenance(drafter)
    if trained is None:
        logger.info("Drafter provenance: unknown (no %s in %s).", FILE, drafter)
        return
    same_quantization = trained.quantization == server.quantization
    for line in trained.differences(server):
        field = line.partition(":")[0]
        identity = field in _IDENTITY and not (field == "target_weights" and not same_quantization)
        if identity and os.environ.get(SWITCH) != "warn":
            trained_with, _, served_with = line.partition(": ")[2].partition(", ")
            raise refuse(
                Path(drafter) / FILE,
                field,
                trained_with,
                served_with,
                f"serve what it was trained for, or {SWITCH}=warn",
            )
        logger.warning("Drafter provenance: %s.", line)


def of_server(model_runner: Any, layer_ids: list[int]) -> Fingerprint:
    """The fingerprint of the running server, from the objects that run and not from what is installed.

    ``model_runner``: the target's, with its attention backend made.
    """
    import sglang

    config, backend = model_runner.model_config, model_runner.attn_backend
    linear, conv, state_dtype = _linear_attention(backend)
    folder = target_folder(config.model_path, getattr(config, "revision", None))
    quantization = config.quantization or getattr(config.hf_config, "quantization_config", None)
    return Fingerprint(
        sglang=sglang.__version__,
        attention=_name(getattr(backend, "full_attn_backend", backend)),
        linear_attention=linear,
        conv=conv,
        dtype=str(model_runner.dtype).removeprefix("torch."),
        state_dtype=state_dtype,
        quantization=_quantization(quantization),
        layer_ids=tuple(layer_ids),
        target_config=_hash_config(folder),
        target_weights=hash_weights(folder),
        tokenizer=hash_files(folder, "tokenizer.json", "tokenizer.model"),
        chat_template=_hash_template(folder),
    )


def target_folder(path: str, revision: str | None = None) -> Path:
    """Where the target's files lie: ``path`` itself or the hub cache's snapshot of it (already downloaded)."""
    if Path(path).is_dir():
        return Path(path)
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(path, revision=revision, local_files_only=True))


def _name(thing: Any) -> str:
    kind = thing if callable(thing) and hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _linear_attention(backend: Any) -> tuple[str, str, str]:
    """The functions that a hybrid target's prefill calls, as bound in the modules that call them."""
    linear = getattr(backend, "linear_attn_backend", None)
    if linear is None:
        return "none", "none", "none"
    kernel = linear.kernel_dispatcher.extend_kernel
    chunk = getattr(sys.modules[type(kernel).__module__], "chunk_gated_delta_rule", type(kernel))
    conv = getattr(sys.modules[type(linear).__module__], "causal_conv1d_fn", None)
    cache = linear.req_to_token_pool.mamba_pool.mamba_cache
    states = (cache.temporal.dtype, cache.conv[0].dtype)
    return _name(chunk), _name(conv), ", ".join(str(d).removeprefix("torch.") for d in states)


def _quantization(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("quant_method") or value.get("quant_algo")
    return str(value) if value else "none"


def _hash_config(folder: Path) -> str:
    """Of what the numbers depend on: paths and library versions come and go."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("_name_or_path", "transformers_version", "use_cache", "architectures", "quantization_config"):
        config.pop(key, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def hash_weights(folder: Path) -> str:
    """Of every safetensors header and 64 samples of each file: another training differs in all of them."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return "none"
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
            digest.update(opened.read(header))
            start = 8 + header
            for i in range(_SAMPLES):
                opened.seek(start + (size - start) * i // _SAMPLES)
                digest.update(opened.read(_SAMPLE_BYTES))
        digest.update(str(size).encode())
    return digest.hexdigest()[:16]


def hash_files(folder: Path, *names: str) -> str:
    """Of the first of ``names`` that exists."""
    for name in names:
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
    return "none"


def _hash_template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return hash_files(folder, "chat_template.jinja")
    file = folder / "tokenizer_config.json"
    template = json.loads(file.read_text()).get("chat_template") if file.is_file() else None
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16] if template else "none"


__all__ = ["FILE", "SWITCH", "DrafterError", "Fingerprint", "check_provenance", "of_server", "read_provenance"]
