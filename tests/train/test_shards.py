"""Data on disk: whole or absent, resumable after a kill, and refused in one line when it is not what it says."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_data import fingerprint, write_data

from sglang_dflash.train import shards
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
sys.path[:0] = [{tests!r}]
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
    folder, count, kills = tmp_path / "data", 400, 0
    code = WRITE.format(tests=str(Path(__file__).parent), folder=str(folder), count=count)
    rng = random.Random(0)
    while True:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        if kills < 5:
            time.sleep(rng.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
    assert kills >= 3
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
    with pytest.raises(TrainError, match=rf"{file.name}: found SHA-256 .* damaged or truncated"):
        Dataset(tmp_path)[0]
    file.unlink()
    with pytest.raises(TrainError, match=rf"{file.name}: found no such file"):
        Dataset(tmp_path)[0]


def test_empty_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="run prepare first"):
        Dataset(tmp_path)
    ShardWriter(tmp_path, fingerprint()).close()
    with pytest.raises(TrainError, match="found no samples"):
        Dataset(tmp_path)
    (tmp_path / shards.MANIFEST).write_text("nonsense\n")
    with pytest.raises(TrainError, match=rf"{shards.MANIFEST}:1: found no JSON"):
        Dataset(tmp_path)


def test_a_full_disk_stops_clearly_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: writes fail in the middle of a shard."""
    code = (
        "import resource, signal, sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_shards import sample\nfrom training_data import fingerprint\n"
        "from sglang_dflash.train.shards import ShardWriter\n"
        f"writer = ShardWriter({str(tmp_path)!r}, fingerprint())\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "writer.add(sample('big', 5000))\nwriter.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TrainError" in done.stderr.splitlines()[-1], done.stderr
    assert "free some" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("shard-*"))


def test_disk_space_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: _usage(1 << 20))
    with pytest.raises(TrainError, match="found 1 MiB free, want 4 MiB"):
        shards.check_space(tmp_path, 4 << 20)


def _usage(free: int) -> object:
    import collections

    return collections.namedtuple("usage", "total used free")(free, 0, free)


def test_the_manifest_is_json_a_line(tmp_path: Path) -> None:
    write_data(tmp_path, samples=5)
    for line in (tmp_path / shards.MANIFEST).read_text().splitlines():
        assert {"shard", "sha256", "samples"} == set(json.loads(line))
