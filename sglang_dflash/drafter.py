"""Refuse a drafter that would load and then draft badly, before a server spends minutes on it.

Only config.json and the safetensors headers are read. NaN or untrained weights are not looked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.drafter_config import (
    DrafterError,
    DrafterSpec,
    TargetFacts,
    check_against_target,
    context_warning,
    read_json,
    refuse,
    spec_from_dir,
)
from sglang_dflash.drafter_tensors import check_tensors

__all__ = [
    "DrafterError",
    "DrafterSpec",
    "TargetFacts",
    "check_drafter",
    "read_drafter_spec",
    "resolve_drafter_path",
    "target_facts",
]


def resolve_drafter_path(path: str | Path, revision: str | None = None, *, cache_dir: str | None = None) -> Path:
    """The local directory of a drafter: ``path`` itself, or the snapshot of a hub id (``owner/name``).

    Fetches json and safetensors files only, into ``cache_dir`` (default: the hub's own cache); HF_HUB_OFFLINE makes
    it look in the cache alone. Raises DrafterError.
    """
    return _resolve(path, revision, ["*.json", "*.safetensors"], cache_dir)


def read_drafter_spec(path: str | Path, revision: str | None = None) -> DrafterSpec:
    """The drafter's config.json, checked as far as that goes without a target. Raises DrafterError."""
    return spec_from_dir(resolve_drafter_path(path, revision))


def check_drafter(
    path: str | Path, target: TargetFacts, revision: str | None = None, *, tensors: bool = True
) -> DrafterSpec:
    """Check a drafter against ``target``: config.json, then every tensor's name, shape and dtype.

    Returns the spec; its ``warnings`` are one-line texts to log. Raises DrafterError at the first fault.
    """
    spec = read_drafter_spec(path, revision)
    check_against_target(spec, target)
    if tensors:
        check_tensors(spec)
    if warning := context_warning(spec, target):
        spec = dataclasses.replace(spec, warnings=(*spec.warnings, warning))
    return spec


def target_facts(
    model: str | Path | Mapping[str, Any] | Any,
    *,
    context_len: int | None = None,
    revision: str | None = None,
) -> TargetFacts:
    """The facts of a target, from its path or hub id, its config.json as a dict, or its Hugging Face config.

    Text sizes of a multimodal config come from its nested text config (the order is upstream's
    ``hf_transformers.common.get_hf_text_config``). ``context_len`` is the length served; left out, the
    model's own max_position_embeddings. Raises DrafterError.
    """
    path = ""
    if isinstance(model, str | Path):
        path = str(model)
        file = _resolve(model, revision, ["config.json"]) / "config.json"
        model = read_json(file, "give the directory of the target model")
    path = path or str(_get(model, "_name_or_path") or "the target")
    text = model
    if (thinker := _get(model, "thinker_config")) is not None:
        text = _get(thinker, "text_config") or thinker
    else:
        subs = (_get(model, key) for key in ("llm_config", "language_config", "text_config"))
        text = next((sub for sub in subs if sub is not None), model)
    sizes = {}
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        value = _get(text, key)
        if not isinstance(value, int) or value < 1:
            remedy = "this target's config has another layout, which DFLASH cannot capture from either"
            raise refuse(f"{path} config.json", key, value, "a positive integer", remedy)
        sizes[key] = value
    # Looped targets run their layers again, and layer ids count every run.
    sizes["num_hidden_layers"] *= int(_get(text, "num_loops") or 1)
    return TargetFacts(**sizes, context_len=context_len or _get(text, "max_position_embeddings"), path=path)


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _resolve(path: str | Path, revision: str | None, patterns: list[str], cache_dir: str | None = None) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    name = str(path)
    if local.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        found = "a file" if local.exists() else "no such directory"
        raise refuse(name, "path", found, "a local directory or a hub id owner/name", "correct the path")
    import huggingface_hub  # costs a second, and local paths do not need it

    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, cache_dir=cache_dir)
        )
    except Exception as e:  # the hub's errors have no common base: validation, HTTP, offline, disk
        found = f"no such directory, and the hub answered {type(e).__name__} ({e})"
        raise refuse(name, "path", found, "a local directory or a hub id", "correct or download it first") from e
