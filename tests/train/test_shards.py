"""Data on disk: whole or absent, resumable after a kill, and refused in one line when it is not what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killing import run_through_kills
from training_data import TESTS, fingerprint, write_data

from sglang_dflash.train import disk, shards
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.shards import Dataset, Sample, ShardWriter


def sample(name: str = "a", length: int = 6, *, final: bool = False) -> Sample:
    generator = torch.Generator().manual_seed(length)
    return Sample(
        name,
        torch.arange(length, dtype=torch.int32),
        torch.arange(length) >= 2,
        torch.randn(length, 8, generator=generator),
        torch.randn(length, 4, generator=generator) if final else None,
    )


def test_samples_come_back_as_they_went(tmp_path: Path) -> None:
    wanted = [sample(f"s{i}", 3 + i, final=True) for i in range(9)]
    with ShardWriter(tmp_path, fingerprint(), shard_bytes=500) as writer:
        for s in wanted:
            writer.add(s)
    data = Dataset(tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) > 2
    assert data.lengths == [3 + i for i in range(9)]
    assert data.layer_ids == (1, 3, 5)
    assert data.feature_width == 8
    for got, want in zip(data, wanted, strict=True):
        assert got.id == want.id
        for name in ("token_ids", "loss_mask", "features", "final"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert not list(tmp_path.glob("*.part"))


def test_a_second_writer_continues_and_refuses_doubles(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, fingerprint()) as writer:
        writer.add(sample("a"))
    with ShardWriter(tmp_path, fingerprint()) as writer:
        assert writer.done == {"a"}
        with pytest.raises(TrainError, match="sample 'a': found it already captured"):
            writer.add(sample("a"))
        writer.add(sample("b"))
        with pytest.raises(TrainError, match="sample 'b': found it already captured"):
            writer.add(sample("b"))
    assert [s.id for s in Dataset(tmp_path)] == ["a", "b"]


WRITE = """
import sys
sys.path[:0] = {tests!r}
from test_shards import sample
from training_data import fingerprint
from sglang_dflash.train.shards import ShardWriter
writer = ShardWriter({folder!r}, fingerprint(), shard_bytes=2000)
print("begun", flush=True)
for i in range({count}):
    if f"s{{i}}" not in writer.done:
        writer.add(sample(f"s{{i}}", 3 + i % 7))
writer.close()
"""


def test_kill_9_at_random_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    folder, count = tmp_path / "data", 400
    code = WRITE.format(tests=TESTS, folder=str(folder), count=count)
    assert run_through_kills(code, kills=5, pauses=(0.0, 0.15), seed=0) >= 3
    data = Dataset(folder)
    assert sorted(s.id for s in data) == sorted(f"s{i}" for i in range(count))
    for got in data:
        assert torch.equal(got.features, sample(got.id, len(got.token_ids)).features)
    assert {p.name for p in folder.glob("shard-*")} == {e["shard"] for e in shards.read_manifest(folder)}


def test_what_a_kill_leaves_is_removed_and_captured_again(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, fingerprint()) as writer:
        writer.add(sample("a"))
    whole = next(tmp_path.glob("shard-*.safetensors"))
    (tmp_path / "shard-00001.safetensors").write_bytes(whole.read_bytes())  # renamed, its line not yet written
    (tmp_path / "shard-00002.safetensors.part").write_bytes(b"half")
    with (tmp_path / shards.MANIFEST).open("a") as manifest:
        manifest.write('{"shard": "shard-00001.safete')
    assert [s.id for s in Dataset(tmp_path)] == ["a"]
    with ShardWriter(tmp_path, fingerprint()) as writer:
        writer.add(sample("b"))
    assert [s.id for s in Dataset(tmp_path)] == ["a", "b"]
    assert len(list(tmp_path.glob("shard-*"))) == 2


def test_invariant_29_mixed_fingerprints_are_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "a", samples=2)
    write_data(tmp_path / "b", samples=2, attention="other")
    with pytest.raises(TrainError, match="attention: found other, want a as in"):
        Dataset(tmp_path / "a", tmp_path / "b")
    with pytest.raises(TrainError, match="attention: found a, want other as of the server that captures now"):
        ShardWriter(tmp_path / "a", fingerprint(attention="other"))
    assert len(Dataset(tmp_path / "a", tmp_path / "a")) == 4


def test_invariant_31_features_must_be_finite_and_as_many_as_tokens(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, fingerprint())
    broken = sample()
    broken.features[4, 1] = float("nan")
    with pytest.raises(TrainError, match="features: found NaN or infinity at token 4"):
        writer.add(broken)
    short = sample()
    with pytest.raises(TrainError, match="features: found 5 rows, want 6, one a token"):
        writer.add(Sample(short.id, short.token_ids, short.loss_mask, short.features[:5]))
    with pytest.raises(TrainError, match="found no assistant token"):
        writer.add(Sample(short.id, short.token_ids, torch.zeros(6, dtype=torch.bool), short.features))
    writer.close()
    assert not list(tmp_path.glob("shard-*"))


def test_a_truncated_or_absent_shard_is_named(tmp_path: Path) -> None:
    write_data(tmp_path, samples=3)
    file = next(tmp_path.glob("shard-*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    for use in (lambda: Dataset(tmp_path)[0], lambda: ShardWriter(tmp_path, fingerprint())):
        with pytest.raises(
            TrainError, match=rf"{file.name}: found {len(whole) - 100} bytes, want {len(whole)} .*trunc"
        ):
            use()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TrainError, match=rf"{file.name}: found SHA-256 .* the file is damaged"):
        Dataset(tmp_path)[0]
    file.unlink()
    with pytest.raises(TrainError, match=rf"{file.name}: found no such file"):
        Dataset(tmp_path)[0]


def test_a_deleted_shard_is_captured_again(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, fingerprint(), shard_bytes=1) as writer:
        for name in "abc":
            writer.add(sample(name))
    (tmp_path / "shard-00001.safetensors").unlink()
    with ShardWriter(tmp_path, fingerprint()) as writer:
        assert writer.done == {"a", "c"}
        writer.add(sample("b"))
    assert sorted(s.id for s in Dataset(tmp_path)) == ["a", "b", "c"]
    assert sorted(p.name for p in tmp_path.glob("shard-*")) == [f"shard-0000{i}.safetensors" for i in (0, 2, 3)]


def test_invariant_31_token_ids_of_shard_and_manifest_agree(tmp_path: Path) -> None:
    write_data(tmp_path, samples=2)
    manifest = tmp_path / shards.MANIFEST
    entry = json.loads(manifest.read_text())
    entry["samples"][1]["token_ids"][3] += 1
    manifest.write_text(json.dumps(entry) + "\n")
    assert Dataset(tmp_path)[0].id == "s0"
    with pytest.raises(TrainError, match="sample 's1': found other token ids than in manifest"):
        Dataset(tmp_path)[1]
    entry["samples"].pop()
    manifest.write_text(json.dumps(entry) + "\n")
    with pytest.raises(TrainError, match="features: found 80 rows, want 40 as in manifest"):
        Dataset(tmp_path)[0]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, fingerprint())
    with pytest.raises(TrainError, match="found another writer at work"):
        ShardWriter(tmp_path, fingerprint())
    writer.close()
    ShardWriter(tmp_path, fingerprint()).close()


def test_samples_of_a_shard_have_one_layout(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, fingerprint()) as writer:
        writer.add(sample("a", final=True))
        with pytest.raises(TrainError, match="sample 'b': found features float32 8 wide and no final, want features"):
            writer.add(sample("b"))
    assert [s.id for s in Dataset(tmp_path)] == ["a"]


def test_empty_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="run prepare first"):
        Dataset(tmp_path)
    ShardWriter(tmp_path, fingerprint()).close()
    with pytest.raises(TrainError, match="found no samples"):
        Dataset(tmp_path)
    (tmp_path / shards.MANIFEST).write_text("nonsense\n")
    with pytest.raises(TrainError, match=rf"{shards.MANIFEST}:1: found no JSON"):
        Dataset(tmp_path)


FULL = """
import resource, signal, sys
sys.path[:0] = {tests!r}
from test_shards import sample
from training_data import fingerprint
from sglang_dflash.train.shards import ShardWriter
with ShardWriter({folder!r}, fingerprint(), shard_bytes=2000) as writer:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for i in range(40):
        if i == 20:  # from here on the disk takes files of this size only
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        if f"s{{i}}" not in writer.done:
            writer.add(sample(f"s{{i}}", 30))
"""


@pytest.mark.parametrize("limit", [10, 500, 1500, 2500])
def test_a_full_disk_stops_clearly_and_leaves_nothing_half_written(tmp_path: Path, limit: int) -> None:
    """A file-size limit stands for the full disk: writing fails in a shard, or (2500) in the manifest, at any byte."""
    values = {"tests": TESTS, "folder": str(tmp_path)}
    codes = [FULL.format(**values, limit=n) for n in (limit, -1)]
    done = [subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=False) for c in codes]
    assert done[0].returncode == 1
    assert "TrainError" in done[0].stderr.splitlines()[-1], done[0].stderr
    assert "make room, run again" in done[0].stderr.splitlines()[-1]
    assert "During handling" not in done[0].stderr, "a second error hides the first"
    assert done[1].returncode == 0, done[1].stderr
    assert sorted(s.id for s in Dataset(tmp_path)) == sorted(f"s{i}" for i in range(40))
    assert {p.name for p in tmp_path.glob("shard-*")} == {e["shard"] for e in shards.read_manifest(tmp_path)}


def test_after_a_full_disk_only_whole_shards_are_there(tmp_path: Path) -> None:
    values = {"tests": TESTS, "folder": str(tmp_path), "limit": 10}
    subprocess.run([sys.executable, "-c", FULL.format(**values)], capture_output=True, check=False)
    assert not list(tmp_path.glob("*.part"))
    assert {p.name for p in tmp_path.glob("shard-*")} == {e["shard"] for e in shards.read_manifest(tmp_path)}
    assert len(Dataset(tmp_path)) == 18  # three a shard
    assert (tmp_path / shards.MANIFEST).read_bytes().endswith(b"\n")


def test_disk_space_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: _usage(1 << 20))
    with pytest.raises(TrainError, match="found 1 MiB free, want 4 MiB"):
        disk.check_space(tmp_path, 4 << 20)


def _usage(free: int) -> object:
    import collections

    return collections.namedtuple("usage", "total used free")(free, 0, free)


def test_the_manifest_is_json_a_line(tmp_path: Path) -> None:
    write_data(tmp_path, samples=5)
    for line in (tmp_path / shards.MANIFEST).read_text().splitlines():
        entry = json.loads(line)
        assert entry["layer_ids"] == [1, 3, 5]
        assert entry["dtype"] == "float32"
        assert entry["sha256"] == disk.sha256(tmp_path / entry["shard"])
        for s in entry["samples"]:
            assert len(s["token_ids"]) == s["length"] == 40
