"""Fingerprint: what the numbers of a server depend on, and whether a drafter was trained on the same.

Stored in captured data, in checkpoints and beside an exported drafter (``provenance.json``). At start-up a server
compares the drafter's with its own:

- **refused**: other layer ids, or another target (its config or weights), tokenizer or chat template. Such a drafter
  loads, and then drafts for features or a text that this server never sees: tau falls towards 1, nothing says why.
- **warned about**: SGLang's version, kernels, dtypes, quantisation. They move hidden states by rounding (how far, says
  `python -m sglang_dflash.train parity`), which costs a little acceptance and never correctness: the target verifies
  every token. Quantised files hold other bytes, so under another quantisation the weights, too, only warn; so does a
  field that either side does not know.
- **not compared**: the thinking flag. Every request chooses it, so a server has none; the drafter's is logged.

``SGLANG_DFLASH_PROVENANCE=warn`` turns refusals into warnings.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sglang_dflash.config import SettingError
from sglang_dflash.contract import installed_version
from sglang_dflash.drafter_config import DrafterError, read_json, refuse
from sglang_dflash.target_files import (
    NONE,
    UNKNOWN,
    find_folder,
    hash_config,
    hash_template,
    hash_tokenizer,
    hash_weights,
    target_folder,
)

logger = logging.getLogger(__name__)

FILE = "provenance.json"
SWITCH = "SGLANG_DFLASH_PROVENANCE"
#: Fields that must match. All others only warn.
IDENTITY = ("layer_ids", "target_config", "target_weights", "tokenizer", "chat_template")


@dataclass(frozen=True)
class Fingerprint:
    """What a server's hidden states depend on. Hashes are those of ``target_files``."""

    sglang: str
    attention: str  # class of the backend that runs prefill
    linear_attention: str  # function that really runs in prefill; "none" for a dense target
    conv: str
    dtype: str
    state_dtype: str
    quantization: str
    layer_ids: tuple[int, ...]
    target_config: str
    target_weights: str
    tokenizer: str
    chat_template: str
    thinking: str = UNKNOWN  # on | off | unknown: written by whoever made the prompts

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str | Path) -> Fingerprint:
        """Raises DrafterError, naming ``where``, for a key missing, unknown or of another type."""
        for key in fields(cls):
            if key.name not in value and key.name != "thinking":
                raise refuse(where, key.name, "none", "one, as every fingerprint has", "export the drafter again")
        for name, found in value.items():
            if name == "layer_ids":
                fine = isinstance(found, list) and all(type(i) is int for i in found)
            else:
                fine = name in cls.__dataclass_fields__ and isinstance(found, str)
            if not fine:
                wanted = "a list of integers" if name == "layer_ids" else "a text under a key of this version"
                raise refuse(where, name, found, wanted, "export the drafter again")
        return cls(**value | {"layer_ids": tuple(value["layer_ids"])})

    def differing(self, other: Fingerprint) -> list[str]:
        """Names of the fields in which ``other`` differs, the thinking flag left out."""
        mine, theirs = self.to_json(), other.to_json()
        return [name for name in mine if mine[name] != theirs[name] and name != "thinking"]

    def differences(self, other: Fingerprint) -> list[str]:
        """One line a field in which ``other`` (the server here) differs from this (trained with)."""
        return [
            f"{name}: trained with {getattr(self, name)}, served with {getattr(other, name)}"
            for name in self.differing(other)
        ]

    def refusable(self, server: Fingerprint) -> list[str]:
        """Names of the differing fields for which ``server`` must not serve a drafter of this fingerprint."""
        must = set(IDENTITY)
        if self.quantization != server.quantization:
            must.discard("target_weights")
        return [
            name
            for name in self.differing(server)
            if name in must and UNKNOWN not in (getattr(self, name), getattr(server, name))
        ]


def read_provenance(drafter: str | Path) -> Fingerprint | None:
    """The fingerprint beside a drafter's weights, or None (z-lab's have none). Raises DrafterError if unreadable."""
    file = Path(drafter) / FILE
    return Fingerprint.from_json(read_json(file, "export the drafter again"), file) if file.exists() else None


def only_warns() -> bool:
    """Whether SGLANG_DFLASH_PROVENANCE asks for warnings. Raises SettingError on a value that says neither."""
    value = os.environ.get(SWITCH) or "refuse"
    if value not in ("warn", "refuse"):
        raise SettingError(f"{SWITCH}: found {value!r}, want warn or refuse (the default); correct it.")
    return value == "warn"


def accepted_provenance(drafter: str | Path, server: Callable[[], Fingerprint]) -> Fingerprint | None:
    """``read_provenance``, refused with a DrafterError if ``server`` must not serve it. What the server does not know
    yet may be UNKNOWN: at the command line that is what it will run, but not its target. ``server`` is called only
    where there is something to compare: it hashes the target's files."""
    file, warn = Path(drafter) / FILE, only_warns()
    try:
        trained = read_provenance(drafter)
    except DrafterError as error:
        if not warn:
            raise
        logger.warning("Drafter provenance: %s", error)
        return None
    if trained is None:
        return None
    here = server()
    must = trained.refusable(here)
    if must and not warn:
        name = must[0]
        others = f" ({', '.join(must[1:])} differ too)" if must[1:] else ""
        raise refuse(
            file,
            name,
            f"trained with {getattr(trained, name)}",
            f"{getattr(here, name)} as served here{others}",
            f"serve what it was trained for, or {SWITCH}=warn",
        )
    return trained


def check_provenance(drafter: str | Path, server: Callable[[], Fingerprint]) -> None:
    """Compare at start-up: log what differs, raise DrafterError for what must not. One line for no provenance."""
    if not (Path(drafter) / FILE).exists():
        logger.info("Drafter provenance: unknown (no %s in %s).", FILE, drafter)
    elif (trained := accepted_provenance(drafter, server)) is not None:
        for line in trained.differences(server()):
            logger.warning("Drafter provenance: %s.", line)
        logger.info("Drafter provenance: read; trained with thinking %s.", trained.thinking)


def of_files(config: Any, cfg: Any, layer_ids: Sequence[int]) -> Fingerprint:
    """What is known before a server runs: its target, and the layers that the drafter wants; the rest is UNKNOWN.

    ``config``: SGLang's ModelConfig of the target; ``cfg``: the resolved arguments.
    """
    folder = find_folder(config.model_path, config.revision)
    words = folder if cfg.tokenizer_path in (None, config.model_path) else find_folder(cfg.tokenizer_path)
    return Fingerprint(
        sglang=installed_version() or UNKNOWN,
        attention=UNKNOWN,
        linear_attention=UNKNOWN,
        conv=UNKNOWN,
        dtype=UNKNOWN,
        state_dtype=UNKNOWN,
        quantization=_quantization(config.quantization or getattr(config.hf_config, "quantization_config", None)),
        layer_ids=tuple(layer_ids),
        target_config=hash_config(folder, config.model_override_args),
        target_weights=hash_weights(folder),
        tokenizer=hash_tokenizer(words),
        chat_template=hash_template(words, cfg.chat_template),
    )


def of_server(model_runner: Any, cfg: Any, layer_ids: Sequence[int]) -> Fingerprint:
    """The fingerprint of the running server, from the objects that run and not from what is installed.

    ``model_runner``: the target's, with its attention backend made; ``cfg``: the resolved arguments.
    """
    backend = model_runner.attn_backend
    linear, conv, state_dtype = _linear_attention(backend)
    attention = getattr(backend, "full_attn_backend", backend)
    return replace(
        of_files(model_runner.model_config, cfg, layer_ids),
        attention=_name(getattr(attention, "prefill_backend", attention)),
        linear_attention=linear,
        conv=conv,
        dtype=str(model_runner.dtype).removeprefix("torch."),
        state_dtype=state_dtype,
    )


def _name(thing: Any) -> str:
    kind = thing if callable(thing) and hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _linear_attention(backend: Any) -> tuple[str, str, str]:
    """The functions that a hybrid target's prefill calls, as bound in the modules that call them, and the dtypes of
    the states they keep. Where a kernel is a class of its own (FlashInfer's), that class."""
    linear = getattr(backend, "linear_attn_backend", None)
    if linear is None:
        return NONE, NONE, NONE
    kernel = getattr(getattr(linear, "kernel_dispatcher", None), "extend_kernel", linear)
    rule = getattr(sys.modules[type(kernel).__module__], "chunk_gated_delta_rule", kernel)
    conv = getattr(sys.modules[type(linear).__module__], "causal_conv1d_fn", None)
    cache = linear.req_to_token_pool.mamba_pool.mamba_cache
    states = (cache.temporal.dtype, cache.conv[0].dtype)
    return (
        _name(rule),
        NONE if conv is None else _name(conv),
        ", ".join(str(d).removeprefix("torch.") for d in states),
    )


def _quantization(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("quant_method") or value.get("quant_algo")
    return str(value) if value else NONE


__all__ = [
    "FILE",
    "SWITCH",
    "Fingerprint",
    "accepted_provenance",
    "check_provenance",
    "hash_weights",
    "of_files",
    "of_server",
    "only_warns",
    "read_provenance",
    "target_folder",
]
