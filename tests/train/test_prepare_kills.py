"""prepare killed at random moments, and stopped by what it meets: nothing is lost, doubled or half written.

The engine is a fake one (`fake_engine`), so that hundreds of moments can be tried; `test_prepare` has the real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import torch
from fake_engine import answer_of, features_of
from training_data import TESTS

from sglang_dflash.train import disk, prepare, spool
from sglang_dflash.train.answers import ANSWERS, read_answers
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.prepare import Prepare
from sglang_dflash.train.shards import MANIFEST, Dataset, read_manifest

COUNT = 60
PROMPTS = [{"id": f"p{i}", "prompt": "abc" * (1 + i % 5) + str(i), "raw": True} for i in range(COUNT)]


def job(target: Path, prompts: Path, out: Path, **changes: Any) -> Prepare:
    settings = {"layer_ids": (1, 2), "max_length": 200, "max_new_tokens": 20} | changes
    return Prepare(str(target), str(prompts), out, **settings)


def check_whole(out: Path, count: int = COUNT) -> None:
    """Every prompt is answered once and captured once, with its own features."""
    lines = (out / ANSWERS).read_text().splitlines()
    assert len(lines) == len({json.loads(line)["id"] for line in lines}) == count
    answers, data = read_answers(out), Dataset(out)
    assert sorted(s.id for s in data) == sorted(answers)
    assert len(data) == count
    for sample in data:
        prompt, answer = answers[sample.id]["prompt"], answers[sample.id]["answer"]
        assert answer == answer_of(prompt)
        assert sample.token_ids.tolist() == prompt + answer
        assert torch.equal(sample.features, features_of(prompt + answer))
        assert int(sample.loss_mask.sum()) == len(answer)
    assert {p.name for p in out.glob("shard-*")} == {e["shard"] for e in read_manifest(out)}
    assert not list(out.glob("*.part"))


# One process imports everything and forks runs to be killed: a kill then costs no imports.
KILLER = """
import os, random, signal, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
import fake_engine, tempfile
from rich.console import Console
from sglang_dflash.train import prepare, prompts, spool
from test_prepare_kills import job

out, target, file = Path({out!r}), Path({target!r}), Path({prompts!r})
spool.MEMORY = Path({memory!r})
fake_engine.install(setattr, shard_bytes=4000, sync_s=0.02, delay=0.01, at_once=2)
prompts.Template(target, thinking=False)  # imports the tokenizers
rng, phases = random.Random({seed}), []
for attempt in range(100):
    pid = os.fork()
    if not pid:
        try:
            print("done", prepare.prepare(job(target, file, out), Console(file=open(os.devnull, "w"))), flush=True)
        except BaseException as e:
            print(type(e), e, flush=True)
        os._exit(0)
    marker = out / ("answers.jsonl" if attempt < 6 else "fingerprint.json")
    began = time.monotonic()
    if attempt < {kills}:
        while time.monotonic() < began + 2 and not marker.exists() and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
    if os.waitpid(pid, 0)[1] == 0:
        break
    phases.append("capture" if (out / "fingerprint.json").exists() else "answer")
print(phases.count("answer"), phases.count("capture"))
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_at_random_moments_of_prepare_loses_and_doubles_nothing(
    target: Path, prompts: Path, tmp_path: Path, seed: int
) -> None:
    out, memory = tmp_path / "data", tmp_path / "memory"
    memory.mkdir()
    code = KILLER.format(
        path=TESTS, out=str(out), target=str(target), prompts=str(prompts),
        memory=str(memory), seed=seed, kills=16,
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-2] == f"done {COUNT}", done.stdout
    while_answering, while_capturing = map(int, lines[-1].split())
    assert while_answering >= 1, done.stdout
    assert while_capturing >= 3, done.stdout
    check_whole(out)
    assert not list(memory.iterdir()), "spools of killed runs stayed"


def run(monkeypatch: pytest.MonkeyPatch, what: Prepare, **fake: Any) -> int:
    fake_engine.install(monkeypatch.setattr, **fake)
    return prepare.prepare(what)


def test_more_prompts_and_a_higher_limit_go_into_the_same_folder(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"
    assert run(monkeypatch, job(target, prompts, out, limit=7)) == 7
    check_whole(out, 7)
    assert run(monkeypatch, job(target, prompts, out)) == COUNT
    check_whole(out)
    before = (out / MANIFEST).read_bytes()
    assert run(monkeypatch, job(target, prompts, out)) == COUNT
    assert (out / MANIFEST).read_bytes() == before


def error(request: Any, file: Path, tensors: Any, about: Any) -> None:
    file.with_suffix(".error").write_text("capture of 'x' failed: OSError: No space left on device\n")


def nan(request: Any, file: Path, tensors: Any, about: Any) -> None:
    tensors["features"][2, 3] = float("nan")


def other_tokens(request: Any, file: Path, tensors: Any, about: Any) -> None:
    tensors["token_ids"][0] += 1


def other_layers(request: Any, file: Path, tensors: Any, about: Any) -> None:
    about["layer_ids"] = [0, 2]


def other_server(request: Any, file: Path, tensors: Any, about: Any) -> None:
    """It is started anew between two texts."""
    if request.rid.endswith(":p59"):
        about["attention"] = "other"


def garbage(request: Any, file: Path, tensors: Any, about: Any) -> None:
    file.write_bytes(b"12345678 nonsense")
    file.with_suffix(".error").touch()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (error, "sample '.*': found capture of 'x' failed: OSError: No space left on device; want it captured"),
        (nan, "sample 'p.*': features: found NaN or infinity at token 2"),
        (other_tokens, "sample 'p.*': found other tokens than were sent"),
        (other_layers, r"server: layer_ids: found \[0, 2\], want \[1, 2\]"),
        (other_server, "server: attention: found other, want a as before"),
        (garbage, "safetensors: found SafetensorError, want a captured text"),
    ],
)
def test_a_bad_capture_is_one_line_and_the_folder_stays_whole(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Callable[..., None], words: str
) -> None:
    out = tmp_path / "data"
    with pytest.raises(TrainError, match=words) as caught:
        run(monkeypatch, job(target, prompts, out), bad=bad, shard_bytes=4000)
    assert "\n" not in str(caught.value)
    if (out / MANIFEST).exists():
        assert len(list(Dataset(out))) < COUNT
    assert not list(out.glob("*.part"))
    assert run(monkeypatch, job(target, prompts, out)) == COUNT
    check_whole(out)


def test_a_disk_too_small_for_all_is_said_before_the_engine_starts(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.install(monkeypatch.setattr)
    monkeypatch.setattr(prepare, "capturing", None)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(TrainError, match="found 0 MiB free, want"):
        prepare.prepare(job(target, prompts, tmp_path / "data"))
    assert not (tmp_path / "data" / MANIFEST).exists()


FULL = """
import resource, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
import fake_engine
from sglang_dflash.train import prepare
from test_prepare_kills import job
fake_engine.install(setattr, sync_s=0.0, delay=0.001, at_once=2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
prepare.prepare(job(Path({target!r}), Path({prompts!r}), Path({out!r})))
"""


def test_a_full_disk_while_answering_leaves_whole_lines(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on a file's size stands for it: it is met in the middle of an answer's line."""
    out = tmp_path / "data"
    code = FULL.format(path=TESTS, target=str(target), prompts=str(prompts), out=str(out))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "TrainError" in done.stderr.splitlines()[-1], done.stderr
    assert "answers.jsonl: found [Errno 27] File too large" in done.stderr.splitlines()[-1]
    text = (out / ANSWERS).read_bytes()
    assert 0 < len(text) <= 2500
    assert text.endswith(b"\n")
    assert run(monkeypatch, job(target, prompts, out)) == COUNT
    check_whole(out)


def test_two_runs_do_not_share_a_folder(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"
    run(monkeypatch, job(target, prompts, out, limit=2))
    lock = disk.Lock(out / ANSWERS, "prepare")
    with pytest.raises(TrainError, match=r"answers\.jsonl: found another prepare at work in it"):
        run(monkeypatch, job(target, prompts, out))
    lock.release()
    assert run(monkeypatch, job(target, prompts, out)) == COUNT


def test_answers_are_kept_when_the_run_is_interrupted(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"
    fake_engine.install(monkeypatch.setattr, delay=0.01, at_once=2)

    async def interrupted(engine: Any, request: Any, original: Any = fake_engine.FakeEngine._one) -> list[int]:
        if request.rid.endswith(":p30"):
            raise KeyboardInterrupt
        return await original(engine, request)

    with monkeypatch.context() as patch:
        patch.setattr(fake_engine.FakeEngine, "_one", interrupted)
        patch.setattr(prepare, "_AT_ONCE", 4)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(job(target, prompts, out))
    assert 20 <= len(read_answers(out)) < 60
    assert prepare.prepare(job(target, prompts, out)) == COUNT
    check_whole(out)


def test_prepare_json_and_answers_that_are_damaged_are_named(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"
    run(monkeypatch, job(target, prompts, out, limit=2))
    settings = (out / prepare.SETTINGS).read_text()
    (out / prepare.SETTINGS).write_text("{")
    with pytest.raises(TrainError, match=r"prepare\.json: found JSONDecodeError"):
        run(monkeypatch, job(target, prompts, out))
    (out / prepare.SETTINGS).write_text(settings)
    with (out / ANSWERS).open("a") as file:
        file.write('{"id": "p5"}\n')
    with pytest.raises(TrainError, match=r"answers\.jsonl:3: found no answer, want id, prompt and answer"):
        run(monkeypatch, job(target, prompts, out))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_length": 1}, r"--max-length: found 1, want 2\.\.2041 "),
        ({"max_length": 2042}, r"--max-length: found 2042, want 2\.\.2041 "),
        ({"max_new_tokens": 0}, "--max-new-tokens: found 0, want at least 1"),
    ],
)
def test_lengths_out_of_range(target: Path, prompts: Path, tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(TrainError, match=words):
        prepare.prepare(job(target, prompts, tmp_path / "data", **changes))
    assert not (tmp_path / "data").exists()


def test_spools_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MEMORY", tmp_path)
    dead = tmp_path / "sglang-dflash-capture-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "big").write_bytes(b"x" * 1000)
    foreign = tmp_path / "something-else"
    foreign.mkdir()
    with spool.spool_folder(1, memory_only=True) as first:
        assert not dead.exists()
        with spool.spool_folder(1, memory_only=True) as second:
            assert first.exists()
            assert second.parent == tmp_path
        assert first.exists()
    assert sorted(tmp_path.iterdir()) == [foreign]


def test_memory_that_is_too_small_is_refused_online_and_passed_by_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, temporary = tmp_path / "memory", tmp_path / "tmp"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(spool, "MEMORY", memory)
    monkeypatch.setattr(spool.tempfile, "gettempdir", lambda: str(temporary))
    free = {memory: 64 << 20, temporary: 1 << 30}
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda place: type("Usage", (), {"free": free[place]}))
    with (
        pytest.raises(TrainError, match=r"found 64 MiB free in .*memory, want 100 MiB; free some \(docker: --shm-size"),
        spool.spool_folder(100 << 20, memory_only=True),
    ):
        pass
    with spool.spool_folder(100 << 20, memory_only=False) as folder:
        assert folder.parent == temporary


def test_no_more_than_the_limit_is_under_way(tmp_path: Path) -> None:
    """Back-pressure: a slow reader holds the engine back, and one text larger than the limit still passes."""
    from sglang_dflash.train.server import Request

    engine = fake_engine.FakeEngine()
    requests = [Request(f"r{i}", [i], {"max_new_tokens": 9}, weight=3) for i in range(20)]
    seen = []
    for request, answer in engine.stream(iter(requests), 10):
        assert answer == answer_of(request.tokens)[:9]
        seen.append(request.rid)
        engine.running.discard(request.rid)
        assert engine.most <= 4  # three under way, and one given out after its answer
    assert sorted(seen) == sorted(r.rid for r in requests)
    engine.most = 0
    huge = [Request(f"h{i}", [i], {"max_new_tokens": 1}, weight=99) for i in range(3)]
    for request, _ in engine.stream(huge, 10):
        engine.running.discard(request.rid)
        assert engine.most == 1
    engine.close()
