"""Captured data on disk: safetensors shards, a manifest that says what is in them, the fingerprint of their server.

    DATA/fingerprint.json       what the features depend on (`sglang_dflash.provenance`)
    DATA/shard-00000.safetensors  token_ids [T] int32, loss_mask [T] bool, features [T, K*H], final [T, H] (optional)
    DATA/manifest.jsonl         a line a shard: its samples (id, start, length), sizes and SHA-256

A shard appears under its name only when it is whole, and counts only once its manifest line is on disk: whatever a kill
leaves beside that is removed by the next writer and captured again. So nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import TrainError

MANIFEST, FINGERPRINT = "manifest.jsonl", "fingerprint.json"
SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class Sample:
    """One text with the target's hidden states."""

    id: str
    token_ids: Tensor  # [S] int32
    loss_mask: Tensor  # [S] bool: the target's own tokens
    features: Tensor  # [S, K*H]
    final: Tensor | None = None  # [S, H], the last layer's output before the final norm


class ShardWriter:
    """Adds samples to a data folder. Use as a context manager, or call `close`; `done` holds the ids that are safe."""

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any], shard_bytes: int = SHARD_BYTES):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_fingerprint(fingerprint)
        entries = read_manifest(self.folder)
        self.done = {s["id"] for entry in entries for s in entry["samples"]}
        self._next = 1 + max((int(entry["shard"][6:11]) for entry in entries), default=-1)
        self._remove_strays({entry["shard"] for entry in entries})
        self._held: list[Sample] = []
        self._held_bytes = 0

    def _check_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        file = self.folder / FINGERPRINT
        if file.exists():
            have = json.loads(file.read_text())
            for key in sorted(set(have) | set(fingerprint)):
                if have.get(key) != fingerprint.get(key):
                    raise TrainError(
                        f"{file}: {key}: found {have.get(key)}, want {fingerprint.get(key)} as of the server that "
                        "captures now; use a new folder: data of two servers must not be mixed."
                    )
        else:
            write_atomically(file, json.dumps(fingerprint, indent=1, sort_keys=True))

    def _remove_strays(self, known: set[str]) -> None:
        """Of a writer that was killed: parts, whole shards without a manifest line, and half a last line."""
        for file in [*self.folder.glob("shard-*.safetensors"), *self.folder.glob("*.part")]:
            if file.name not in known:
                file.unlink()
        manifest = self.folder / MANIFEST
        if manifest.exists() and not (text := manifest.read_bytes()).endswith(b"\n") and text:
            write_atomically(manifest, text[: text.rfind(b"\n") + 1].decode())

    def add(self, sample: Sample) -> None:
        """Hold a sample until a shard is full. Raises TrainError for one that must not be trained on."""
        check_sample(sample)
        if sample.id in self.done or any(sample.id == held.id for held in self._held):
            raise TrainError(f"sample {sample.id!r}: found it already captured, want each id once; rename it.")
        self._held.append(sample)
        self._held_bytes += sum(t.numel() * t.element_size() for t in (sample.features, sample.final) if t is not None)
        if self._held_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is held as one shard. Raises TrainError when the disk is full; nothing half written stays."""
        if not self._held:
            return
        name = f"shard-{self._next:05d}.safetensors"
        tensors = {
            "token_ids": torch.cat([s.token_ids for s in self._held]),
            "loss_mask": torch.cat([s.loss_mask for s in self._held]),
            "features": torch.cat([s.features for s in self._held]),
        }
        if self._held[0].final is not None:
            tensors["final"] = torch.cat([s.final for s in self._held if s.final is not None])
        lengths = [len(s.token_ids) for s in self._held]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        check_space(self.folder, 2 * self._held_bytes)
        part = self.folder / f"{name}.part"
        try:
            save_file(tensors, part)
            checksum = sha256(part)
            _sync(part)
            os.replace(part, self.folder / name)
            entry = {
                "shard": name,
                "sha256": checksum,
                "samples": [
                    {"id": s.id, "start": start, "length": length}
                    for s, start, length in zip(self._held, starts, lengths, strict=True)
                ],
            }
            with (self.folder / MANIFEST).open("a") as manifest:
                manifest.write(json.dumps(entry) + "\n")
                manifest.flush()
                os.fsync(manifest.fileno())
        except (OSError, SafetensorError) as e:
            part.unlink(missing_ok=True)
            raise TrainError(
                f"{part}: found {e}, want room for {self._held_bytes} bytes; free some and run again."
            ) from e
        self.done |= {s.id for s in self._held}
        self._next += 1
        self._held, self._held_bytes = [], 0

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()


class Dataset:
    """Captured samples of one or several folders of one fingerprint, by index. Raises TrainError on faulty data."""

    def __init__(self, *folders: str | Path):
        self._samples: list[tuple[Path, dict[str, Any]]] = []
        self._checksums: dict[Path, str] = {}
        self._open: dict[Path, Any] = {}
        fingerprints = [(Path(folder), read_fingerprint(Path(folder))) for folder in folders]
        self.fingerprint = fingerprints[0][1]
        for folder, fingerprint in fingerprints[1:]:
            for key in sorted(set(fingerprint) | set(self.fingerprint)):
                if fingerprint.get(key) != self.fingerprint.get(key):
                    raise TrainError(
                        f"{folder / FINGERPRINT}: {key}: found {fingerprint.get(key)}, want "
                        f"{self.fingerprint.get(key)} "
                        f"as in {folders[0]}; capture both with one server."
                    )
        for folder, _ in fingerprints:
            for entry in read_manifest(folder):
                file = folder / entry["shard"]
                self._checksums[file] = entry["sha256"]
                self._samples += [(file, s) for s in entry["samples"]]
        if not self._samples:
            raise TrainError(f"{folders[0]}: found no samples, want at least one; run prepare first.")
        self.lengths = [int(s["length"]) for _, s in self._samples]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.fingerprint["layer_ids"])

    @property
    def feature_width(self) -> int:
        """K * H."""
        return int(self._opened(self._samples[0][0]).get_slice("features").get_shape()[1])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        file, where = self._samples[index]
        opened = self._opened(file)
        rows = slice(where["start"], where["start"] + where["length"])
        names = set(opened.keys())
        parts = {name: opened.get_slice(name)[rows] for name in names}
        return Sample(where["id"], parts["token_ids"], parts["loss_mask"], parts["features"], parts.get("final"))

    def fetch(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples, in order."""
        return [self[i] for i in indices]

    @property
    def has_final(self) -> bool:
        """Whether the final hidden state was captured too."""
        return "final" in set(self._opened(self._samples[0][0]).keys())

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def _opened(self, file: Path) -> Any:
        """The shard, mapped; the first time its checksum is compared."""
        if file not in self._open:
            if not file.exists():
                raise TrainError(f"{file}: found no such file, want the shard of the manifest; capture again.")
            if (found := sha256(file)) != self._checksums[file]:
                raise TrainError(
                    f"{file}: found SHA-256 {found[:16]}..., want {self._checksums[file][:16]}... as captured; the "
                    "file is damaged or truncated: capture again."
                )
            self._open[file] = safe_open(str(file), framework="pt").__enter__()
        return self._open[file]


def check_sample(sample: Sample) -> None:
    """Raise TrainError unless lengths agree, the target wrote something, and every number is finite."""
    length = len(sample.token_ids)
    for name, tensor in (("loss_mask", sample.loss_mask), ("features", sample.features), ("final", sample.final)):
        if tensor is not None and len(tensor) != length:
            raise TrainError(f"sample {sample.id!r}: {name}: found {len(tensor)} rows, want {length}, one a token.")
    if not bool(sample.loss_mask.any()):
        raise TrainError(f"sample {sample.id!r}: found no assistant token, want some to learn from; drop it.")
    for name, tensor in (("features", sample.features), ("final", sample.final)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            row = int((~torch.isfinite(tensor)).any(dim=1).nonzero()[0])
            raise TrainError(
                f"sample {sample.id!r}: {name}: found NaN or infinity at token {row}, want finite numbers; the "
                "server's dtype overflows on this text: capture in bfloat16 or float32."
            )


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """The shards that count. A last line without its end was being written when the writer died."""
    file = folder / MANIFEST
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError as e:
            raise TrainError(f"{file}:{number}: found no JSON ({e}), want a shard's line; capture again.") from e
    return entries


def read_fingerprint(folder: Path) -> dict[str, Any]:
    file = folder / FINGERPRINT
    try:
        value: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise TrainError(f"{file}: found {type(e).__name__}, want captured data; run prepare first.") from e
    return value


def check_space(folder: Path, wanted: int) -> None:
    """Raise TrainError unless ``wanted`` bytes are free."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise TrainError(f"{folder}: found {free >> 20} MiB free, want {wanted >> 20} MiB; free some and run again.")


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_atomically(file: Path, text: str) -> None:
    """``text`` or the old content, never half of it."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(part, file)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
