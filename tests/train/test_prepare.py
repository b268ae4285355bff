"""prepare on a real engine: answers are the target's, captures are whole, and a kill loses and doubles nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import random_pair
import torch
from training_data import TESTS

from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.prepare import ANSWERS, SETTINGS, Prepare, prepare, read_answers
from sglang_dflash.train.prompts import Template, read_prompts
from sglang_dflash.train.shards import Dataset

COUNT, NEW = 20, 12
PROMPTS = [{"id": f"p{i}", "prompt": "word " * (1 + i % 5) + str(i), "raw": i % 2 == 0} for i in range(COUNT)]
PROGRAM = """
import sys
from pathlib import Path
from sglang_dflash.train import spool
from sglang_dflash.train.prepare import Prepare, prepare
spool.MEMORY = Path({memory!r})
if __name__ == "__main__":
    job = Prepare({target!r}, {prompts!r}, Path({out!r}), layer_ids=(1, 2), max_length=160, final=True,
                  max_new_tokens={new})
    print(prepare(job))
"""


def start(target: Path, prompts: Path, out: Path, work: Path) -> subprocess.Popen[str]:
    """A prepare in a process group of its own; its spool is in ``work / "memory"``."""
    file, memory = work / f"{out.name}.py", work / "memory"
    memory.mkdir(exist_ok=True)
    values = {"target": str(target), "prompts": str(prompts), "out": str(out), "memory": str(memory)}
    file.write_text(PROGRAM.format(**values, new=NEW))
    return run(file, (work / f"{out.name}.log"))


def run(file: Path, log: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    with log.open("a") as out:
        return subprocess.Popen(
            [sys.executable, str(file), *arguments],
            stdout=out, stderr=out, text=True, env=environment, start_new_session=True,
        )  # fmt: skip


def wait_until(what: Callable[[], object], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 400
    while not what():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)


def engines(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def check_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 90  # one that is just starting looks for its parent when it has its imports
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, "an engine outlived its trainer"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def prepared(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("prepared")
    process = start(target, prompts, work / "data", work)
    assert process.wait(500) == 0, (work / "data.log").read_text()[-3000:]
    return work / "data"


def test_samples_are_prompt_and_answer_with_the_answer_to_learn(prepared: Path, target: Path, prompts: Path) -> None:
    data, answers = Dataset(prepared), read_answers(prepared)
    assert len(data) == len(answers) == COUNT
    template = Template(target, thinking=False)
    texts = {p.id: p for p in read_prompts(prompts)}
    for sample in data:
        answer = answers[sample.id]
        assert answer["prompt"] == template.tokens(texts[sample.id])
        assert sample.token_ids.tolist() == answer["prompt"] + answer["answer"]
        assert sample.loss_mask.tolist() == [False] * len(answer["prompt"]) + [True] * len(answer["answer"])
        assert sample.features.shape == (len(sample.token_ids), 2 * random_pair.HIDDEN)
        assert sample.final is not None
    assert data.layer_ids == (1, 2)
    assert data.fingerprint["thinking"] == "off"


def test_answers_are_the_targets_greedy_text(prepared: Path, target: Path) -> None:
    from sglang_dflash.cpu.stand_in import declare_torchvision_ops

    declare_torchvision_ops()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for answer in list(read_answers(prepared).values())[:6]:
        ids = torch.tensor([answer["prompt"] + answer["answer"]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        at = len(answer["prompt"]) - 1
        best = logits[at:-1].topk(2)
        firm = best.values[:, 0] - best.values[:, 1] > 1e-3
        wanted = torch.tensor(answer["answer"])
        assert torch.equal(best.indices[:, 0][firm], wanted[firm])
        assert firm.sum() > NEW // 2


def test_invariant_31_features_are_finite_and_belong_to_their_tokens(prepared: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    sample = Dataset(prepared)[3]
    with torch.no_grad():
        hidden = model(sample.token_ids[None].long(), output_hidden_states=True).hidden_states
    wanted = torch.cat([hidden[2][0], hidden[3][0]], dim=-1)
    assert sample.features.isfinite().all()
    assert (sample.features - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_a_kill_at_any_moment_and_a_resume_lose_nothing(
    target: Path, prompts: Path, prepared: Path, tmp_path: Path
) -> None:
    """Killed once while answering or starting, once while capturing; its engines must be gone each time."""
    out = tmp_path / "data"
    for marker in (ANSWERS, "fingerprint.json"):
        process = start(target, prompts, out, tmp_path)
        wait_until((out / marker).exists, process, tmp_path / "data.log")
        running = engines(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        check_gone(running)
    process = start(target, prompts, out, tmp_path)
    assert process.wait(500) == 0, (tmp_path / "data.log").read_text()[-3000:]
    assert not list((tmp_path / "memory").iterdir()), "the spool of a killed run stayed"
    assert (out / ANSWERS).read_text().count("\n") == COUNT
    got, wanted = ({s.id: s for s in Dataset(folder)} for folder in (out, prepared))
    assert sorted(got) == sorted(wanted)
    for name, sample in got.items():
        assert torch.equal(sample.token_ids, wanted[name].token_ids)
        assert torch.allclose(sample.features, wanted[name].features, rtol=1e-4, atol=3e-3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_capture_leaves_no_engine(
    target: Path, prompts: Path, prepared: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C as a terminal sends it, to the whole group; SIGTERM to the one process, as its default action."""
    out, log, memory = tmp_path / "data", tmp_path / "data.log", tmp_path / "memory"
    out.mkdir()
    for name in (ANSWERS, SETTINGS):
        shutil.copy(prepared / name, out / name)
    process = start(target, prompts, out, tmp_path)
    wait_until(lambda: list(memory.glob("*/captured")) and len(engines(process)) > 2, process, log)
    time.sleep(3 if number == signal.SIGINT else 0)
    running = engines(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
        assert process.wait(90) != 0
        assert not list(memory.iterdir()), "the spool stayed"
    else:
        process.send_signal(number)
        assert process.wait(90) == -number
    check_gone(running)
    assert not list(out.glob("shard-*"))


ENGINE = """
import signal, sys
import psutil
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.server import Request, answering
def scheduler():
    return next(p for p in psutil.Process().children(recursive=True) if "sglang::schedul" in p.name())
def alive():
    children = psutil.Process().children(recursive=True)
    return [p.name() for p in children if p.status() != "zombie" and "resource_tracker" not in " ".join(p.cmdline())]
if __name__ == "__main__":
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT)
    try:
        with answering(sys.argv[1], 1500, None, {}) as engine:
            assert signal.getsignal(signal.SIGTERM) == before[0]
            jobs = [Request(f"r{n}", [1, 2, 3], {"max_new_tokens": n, "ignore_eos": True}) for n in (2, 1400)]
            answers = engine.stream(jobs, 10)
            assert len(next(answers)[1]) == 2
            scheduler().kill()
            next(answers)
    except TrainError as e:
        print("A", e)
    print("B", alive())
    try:
        with answering(sys.argv[1], 1500, None, {"max_total_tokens": 1}):
            pass
    except TrainError as e:
        print("C", e)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT)) == before
    print("D", alive())
"""


def test_an_engine_that_dies_or_never_starts_is_an_error_and_leaves_nothing(target: Path, tmp_path: Path) -> None:
    """SGLang's own answer to a failed child would be to kill this process, without a word."""
    (tmp_path / "engine.py").write_text(ENGINE)
    process = run(tmp_path / "engine.py", tmp_path / "log", str(target))
    status = process.wait(500)
    text = (tmp_path / "log").read_text()
    assert status == 0, text[-3000:]
    said = dict(line.split(" ", 1) for line in text.splitlines() if line[:2] in ("A ", "B ", "C ", "D "))
    assert "found its process" in said["A"]
    assert "dead, want it to answer" in said["A"]
    assert "found RuntimeError at its start (Rank 0 scheduler died" in said["C"]
    assert said["B"] == said["D"] == "[]"


ONLINE = """
import json, sys
from pathlib import Path
sys.path[:0] = {tests!r}
import torch
from sglang_dflash.train.fit import Fit
from sglang_dflash.train.online import online
from sglang_dflash.train.shards import Dataset
from training_data import recipe
if __name__ == "__main__":
    data, out = Path({data!r}), Path({out!r})
    shape = dict(layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32, block_size=4, mask_token_id={mask})
    settings = recipe(drafter=shape, max_length=160, rows=1, epochs=1, save_every=1000)
    with online({target!r}, data, (1, 2)) as source:
        stored = {{s.id: s for s in Dataset(data)}}
        worst = 0.0
        for got in source.fetch(list(range(len(source)))):
            want = stored[got.id]
            assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.loss_mask, want.loss_mask)
            worst = max(worst, float((got.features - want.features).abs().max()))
        Fit({target!r}, source, out / "online", settings).run()
        left = [p.name for p in source._spool.folder.iterdir()]
    print(json.dumps([len(source), worst, left]))
"""


def test_online_capture_feeds_the_trainer_and_leaves_nothing(prepared: Path, target: Path, tmp_path: Path) -> None:
    mask = random_pair.byte_vocabulary()["<|mask|>"]
    file = tmp_path / "online.py"
    file.write_text(ONLINE.format(tests=TESTS, data=str(prepared), out=str(tmp_path), target=str(target), mask=mask))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, worst, left = json.loads(done.stdout.splitlines()[-1])
    assert (count, left) == (COUNT, [])
    assert worst < 1e-3
    curve = [json.loads(line) for line in (tmp_path / "online" / "metrics.jsonl").read_text().splitlines()]
    assert curve
    assert all(point["loss"] > 0 for point in curve)


def test_other_settings_need_another_folder(prepared: Path, target: Path, prompts: Path) -> None:
    with pytest.raises(TrainError, match=r"prepare\.json: thinking: found False, want True"):
        prepare(
            Prepare(
                str(target),
                str(prompts),
                prepared,
                layer_ids=(1, 2),
                max_length=160,
                max_new_tokens=NEW,
                final=True,
                thinking=True,
            )
        )


def test_layer_ids_out_of_range(target: Path, prompts: Path, tmp_path: Path) -> None:
    from sglang_dflash.drafter_config import DrafterError

    with pytest.raises(DrafterError, match="target_layer_ids"):
        prepare(Prepare(str(target), str(prompts), tmp_path / "out", layer_ids=(1, 3)))
    assert not (tmp_path / "out").exists()
