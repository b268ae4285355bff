"""Captured data on disk: safetensors shards, a manifest that says what is in them, the fingerprint of their server.

    DATA/fingerprint.json       what the features depend on (`sglang_dflash.provenance`)
    DATA/shard-00000.safetensors  token_ids [T] int32, loss_mask [T] bool, features [T, K*H], final [T, H] (optional)
    DATA/manifest.jsonl         a line a shard: its SHA-256 and size, layer ids, dtype, and its samples (id, start,
                                length, token ids)

A shard appears under its name only when it is whole, and counts only once its manifest line is on disk: whatever a kill
leaves beside that is removed by the next writer and captured again. So nothing is lost, and nothing is there twice. A
shard that was deleted is captured again, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .disk import Lock, append, check_space, drop_half_line, sha256, sync, sync_folder, unwritable, write_atomically
from .errors import TrainError

MANIFEST, FINGERPRINT = "manifest.jsonl", "fingerprint.json"
SHARD_BYTES = 256 << 20
_HASHERS = 8


@dataclass(frozen=True)
class Sample:
    """One text with the target's hidden states."""

    id: str
    token_ids: Tensor  # [S] int32
    loss_mask: Tensor  # [S] bool: the target's own tokens
    features: Tensor  # [S, K*H]
    final: Tensor | None = None  # [S, H], the last layer's output before the final norm

    @property
    def feature_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.features, self.final) if t is not None)


class ShardWriter:
    """Adds samples to a data folder. Use as a context manager, or call `close`; `done` holds the ids that are safe."""

    def __init__(self, folder: str | Path, fingerprint: dict[str, Any], shard_bytes: int = SHARD_BYTES):
        """Raises TrainError for another writer, another fingerprint, or a shard that is not as it was written."""
        self.folder, self.fingerprint, self.shard_bytes = Path(folder), fingerprint, shard_bytes
        self._held: list[Sample] = []
        self._held_bytes = 0
        self._failed = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise unwritable(self.folder, e) from e
        self._lock = Lock(self.folder, "writer")
        try:
            self._check_fingerprint()
            entries = self._recover()
        except BaseException:
            self._lock.release()
            raise
        self.done = {s["id"] for entry in entries for s in entry["samples"]}
        self._next = 1 + max((int(entry["shard"][6:11]) for entry in entries), default=-1)

    def _check_fingerprint(self) -> None:
        file = self.folder / FINGERPRINT
        if file.exists() and (self.folder / MANIFEST).exists():  # of a folder without a shard it binds nobody
            check_same(read_fingerprint(self.folder), self.fingerprint, file, "as of the server that captures now")
        else:
            write_atomically(file, json.dumps(self.fingerprint, indent=1, sort_keys=True))

    def _recover(self) -> list[dict[str, Any]]:
        """The entries that hold, after removing what a killed writer left: parts, whole shards without a manifest line,
        half a last line. A shard that somebody deleted loses its line, so that it is captured again."""
        drop_half_line(self.folder / MANIFEST)
        found = list(read_manifest(self.folder))
        entries = [entry for entry in found if (self.folder / entry["shard"]).exists()]
        for entry in entries:
            check_size(self.folder, entry)
        if len(entries) < len(found):
            lines = (json.dumps(e | {"samples": [_plain(s) for s in e["samples"]]}) + "\n" for e in entries)
            write_atomically(self.folder / MANIFEST, "".join(lines))
        known = {entry["shard"] for entry in entries}
        for file in [*self.folder.glob("shard-*.safetensors"), *self.folder.glob("*.part")]:
            if file.name not in known:
                file.unlink()
        return entries

    def add(self, sample: Sample) -> None:
        """Hold a sample until a shard is full. Raises TrainError for one that must not be trained on."""
        check_sample(sample)
        if sample.id in self.done or any(sample.id == held.id for held in self._held):
            raise TrainError(f"sample {sample.id!r}: found it already captured, want each id once; rename it.")
        if self._held and (found := _layout(sample)) != (want := _layout(self._held[0])):
            raise TrainError(
                f"sample {sample.id!r}: found {found}, want {want} as of {self._held[0].id!r}; capture all in one way."
            )
        self._held.append(sample)
        self._held_bytes += sample.feature_bytes
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
        file, part = self.folder / name, self.folder / f"{name}.part"
        self._failed = True  # until it has not
        check_space(self.folder, self._held_bytes + (self._held_bytes >> 4))
        try:
            save_file(tensors, part)
            checksum, size = sha256(part), part.stat().st_size
            sync(part)
            os.replace(part, file)
            sync_folder(self.folder)
            lengths = [len(s.token_ids) for s in self._held]
            entry = {
                "shard": name,
                "sha256": checksum,
                "bytes": size,
                "layer_ids": list(self.fingerprint["layer_ids"]),
                "dtype": _dtype(tensors["features"]),
                "samples": [
                    {"id": s.id, "start": start, "length": length, "token_ids": s.token_ids.tolist()}
                    for s, start, length in zip(self._held, accumulate(lengths, initial=0), lengths, strict=False)
                ],
            }
            append(self.folder / MANIFEST, json.dumps(entry) + "\n")
        except (OSError, SafetensorError) as e:
            part.unlink(missing_ok=True)
            raise unwritable(part, e) from e
        except BaseException:
            part.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            raise
        self._failed = False
        self.done |= {s.id for s in self._held}
        self._next += 1
        self._held, self._held_bytes = [], 0

    def close(self) -> None:
        """Write what is held, unless writing has failed before, and let others write."""
        try:
            if not self._failed:
                self.flush()
        finally:
            self._lock.release()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Dataset:
    """Captured samples of one or several folders of one fingerprint, by index. Raises TrainError on faulty data."""

    def __init__(self, *folders: str | Path):
        self._samples: list[tuple[Path, dict[str, Any]]] = []
        self._entries: dict[Path, dict[str, Any]] = {}
        self._open: dict[Path, Any] = {}
        fingerprints = [(Path(folder), read_fingerprint(Path(folder))) for folder in folders]
        self.fingerprint = fingerprints[0][1]
        for folder, fingerprint in fingerprints[1:]:
            check_same(
                fingerprint, self.fingerprint, folder / FINGERPRINT, f"as in {folders[0]}; capture both with one server"
            )
        for folder, _ in fingerprints:
            for entry in read_manifest(folder):
                file = folder / entry["shard"]
                self._entries[file] = entry
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
        parts = {name: opened.get_slice(name)[rows] for name in set(opened.keys())}
        if not torch.equal(parts["token_ids"], where["token_ids"]):
            raise TrainError(
                f"{file}: sample {where['id']!r}: found other token ids than in {MANIFEST}, want the same; delete the "
                "shard and run prepare again."
            )
        return Sample(where["id"], parts["token_ids"], parts["loss_mask"], parts["features"], parts.get("final"))

    def fetch(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples, in order."""
        new = {file for file, _ in (self._samples[i] for i in indices)} - set(self._open)
        if len(new) > 1:  # checksums of gigabytes: an epoch's first batches touch every shard
            with ThreadPoolExecutor(_HASHERS) as pool:
                list(pool.map(self._opened, sorted(new)))
        return [self[i] for i in indices]

    @property
    def has_final(self) -> bool:
        """Whether the final hidden state was captured too."""
        return "final" in set(self._opened(self._samples[0][0]).keys())

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def _opened(self, file: Path) -> Any:
        """The shard, mapped; the first time, it is compared with what the manifest says of it."""
        if file not in self._open:
            entry = self._entries[file]
            if not file.exists():
                raise TrainError(f"{file}: found no such file, want the shard of the manifest; run prepare again.")
            check_size(file.parent, entry)
            if (found := sha256(file)) != entry["sha256"]:
                raise TrainError(
                    f"{file}: found SHA-256 {found[:16]}..., want {entry['sha256'][:16]}... as written; the file is "
                    "damaged: delete it and run prepare again, which captures its samples again."
                )
            opened = safe_open(str(file), framework="pt").__enter__()
            _check_shapes(file, opened, entry)
            self._open[file] = opened
        return self._open[file]


def check_same(have: dict[str, Any], want: dict[str, Any], where: str | Path, whose: str) -> None:
    """Raise TrainError naming the first field in which two fingerprints differ: their data must not be mixed."""
    for key in sorted(set(have) | set(want)):
        if have.get(key) != want.get(key):
            raise TrainError(
                f"{where}: {key}: found {have.get(key)}, want {want.get(key)} {whose}; use a folder for each server."
            )


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


def check_size(folder: Path, entry: dict[str, Any]) -> None:
    """Raise TrainError for a shard that is shorter or longer than it was written."""
    file = folder / entry["shard"]
    if (found := file.stat().st_size) != entry["bytes"]:
        raise TrainError(
            f"{file}: found {found} bytes, want {entry['bytes']} as written; the file is truncated or damaged: delete "
            "it and run prepare again, which captures its samples again."
        )


def _check_shapes(file: Path, opened: Any, entry: dict[str, Any]) -> None:
    """As many rows in every tensor as the manifest's samples have tokens."""
    want, names = sum(s["length"] for s in entry["samples"]), set(opened.keys())
    for name in sorted(names | {"token_ids", "loss_mask", "features"}):
        found = opened.get_slice(name).get_shape()[0] if name in names else None
        if found != want:
            raise TrainError(
                f"{file}: {name}: found {found} rows, want {want} as in {MANIFEST}; delete the shard and run prepare "
                "again."
            )


def _layout(sample: Sample) -> str:
    final = "no final" if sample.final is None else f"final {_dtype(sample.final)} {sample.final.shape[1]} wide"
    return f"features {_dtype(sample.features)} {sample.features.shape[1]} wide and {final}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"token_ids": sample["token_ids"].tolist()}


def read_manifest(folder: Path) -> Iterator[dict[str, Any]]:
    """The shards that count, token ids as tensors [S] int32. A last line without its end was being written when the
    writer died. Raises TrainError naming the line."""
    file = folder / MANIFEST
    if not file.exists():
        return
    with file.open() as opened:
        for number, line in enumerate(opened, 1):
            if not line.endswith("\n"):
                return
            try:
                entry = json.loads(line)
                good = isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
                good = good and Path(entry["shard"]).name == entry["shard"]
                for sample in entry["samples"]:
                    sample["token_ids"] = torch.tensor(sample["token_ids"], dtype=torch.int32)
                    good = good and len(sample["token_ids"]) == sample["length"] and sample["start"] >= 0
            except (ValueError, TypeError, KeyError) as e:
                why = "no JSON" if isinstance(e, json.JSONDecodeError) else f"{type(e).__name__} {e}"
                raise TrainError(
                    f"{file}:{number}: found {why}, want a shard's line; delete it and capture again."
                ) from e
            if not good:
                raise TrainError(f"{file}:{number}: found fields that disagree, want a shard's line; capture again.")
            yield entry


def read_fingerprint(folder: Path) -> dict[str, Any]:
    """Raises TrainError unless ``folder`` has one."""
    file = folder / FINGERPRINT
    try:
        value: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise TrainError(f"{file}: found {type(e).__name__}, want captured data; run prepare first.") from e
    if not isinstance(value, dict) or not isinstance(value.get("layer_ids"), list):
        raise TrainError(f"{file}: found no layer_ids in it, want a server's fingerprint; capture again.")
    return value
