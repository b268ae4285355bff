"""Hashes of a target's files: its config, weights, tokenizer and chat template, 16 hex digits each.

``NONE`` where there is no such file, ``UNKNOWN`` where the target is not a folder of files at all (a GGUF file, a
remote store): nothing is claimed about those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NONE, UNKNOWN = "none", "unknown"
_SAMPLE_BYTES, _SAMPLES = 4096, 2048
#: Names, versions and what a fingerprint holds in fields of its own.
_INCIDENTAL = ("_name_or_path", "transformers_version", "use_cache", "architectures", "quantization_config", "dtype",
               "torch_dtype")  # fmt: skip


def target_folder(path: str, revision: str | None = None) -> Path:
    """Where the target's files lie: ``path`` itself or the hub cache's snapshot of it (already downloaded).

    Raises whatever the hub raises for a path that is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(path, revision=revision, local_files_only=True))


def find_folder(path: str, revision: str | None = None) -> Path | None:
    """``target_folder``, or None for a target that does not lie in a folder."""
    try:
        return target_folder(path, revision)
    except Exception:  # the hub's errors have no common base: validation, offline, not cached
        return None


def hash_config(folder: Path | None, overrides: Mapping[str, Any]) -> str:
    """Of what the numbers depend on in config.json, with ``--json-model-override-args`` applied."""
    if folder is None:
        return UNKNOWN
    file = folder / "config.json"
    if not file.is_file():
        return NONE
    return _digest(json.dumps(_essential(json.loads(file.read_text()) | dict(overrides)), sort_keys=True).encode())


def _essential(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return {key: _essential(value) if isinstance(value, dict) else value for key, value in kept.items()}


def hash_weights(folder: Path | None) -> str:
    """Of every tensor's name, dtype and shape, and of 4 KiB from the middle of each (of 2,048 where there are more).

    Training moves all of a tensor, so a sample shows it, and 54 GB need not be read. How the tensors are shared out
    among files does not matter.
    """
    if folder is None:
        return UNKNOWN
    tensors: dict[str, tuple[str, Path, int, int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in about["data_offsets"])
                tensors[name] = (f"{name} {about['dtype']} {about['shape']}", file, begin, end)
    if not tensors:
        return NONE
    digest = hashlib.sha256()
    step = -(-len(tensors) // _SAMPLES)
    for i, name in enumerate(sorted(tensors)):
        said, file, begin, end = tensors[name]
        digest.update(said.encode())
        if i % step == 0:
            with file.open("rb") as opened:
                opened.seek(max(begin, (begin + end - _SAMPLE_BYTES) // 2))
                digest.update(opened.read(min(_SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()[:16]


def hash_tokenizer(folder: Path | None) -> str:
    """Of tokenizer.json, or of a sentencepiece model."""
    if folder is None:
        return UNKNOWN
    return next((_digest(f.read_bytes()) for n in ("tokenizer.json", "tokenizer.model") if (f := folder / n).is_file()),
                NONE)  # fmt: skip


def hash_template(folder: Path | None, given: str | None = None) -> str:
    """Of the chat template: the one of ``--chat-template`` (a file, or a name that SGLang knows) or the tokenizer's."""
    if given is not None:
        return _digest(Path(given).read_bytes() if Path(given).is_file() else given.encode())
    if folder is None:
        return UNKNOWN
    if (file := folder / "chat_template.jinja").is_file():
        return _digest(file.read_bytes())
    file = folder / "tokenizer_config.json"
    template = json.loads(file.read_text()).get("chat_template") if file.is_file() else None
    if template is None:
        return NONE
    # As text, so that a template moved into a file of its own stays the same.
    return _digest(template.encode() if isinstance(template, str) else json.dumps(template, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
