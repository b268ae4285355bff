"""prepare on a real engine: answers are the target's, captures are whole, and a kill loses and doubles nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from sglang_dflash import demo_models
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.prepare import ANSWERS, Prepare, prepare, read_answers
from sglang_dflash.train.prompts import Template, read_prompts
from sglang_dflash.train.shards import Dataset

COUNT, NEW = 20, 12
PROGRAM = """
import sys
from pathlib import Path
from sglang_dflash.train.prepare import Prepare, prepare
if __name__ == "__main__":
    job = Prepare({target!r}, {prompts!r}, Path({out!r}), layer_ids=(1, 2), max_length=160, final=True,
                  max_new_tokens={new})
    print(prepare(job))
"""


def start(target: Path, prompts: Path, out: Path, work: Path) -> subprocess.Popen[str]:
    file = work / f"{out.name}.py"
    file.write_text(PROGRAM.format(target=str(target), prompts=str(prompts), out=str(out), new=NEW))
    log = (work / f"{out.name}.log").open("a")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    return subprocess.Popen([sys.executable, str(file)], stdout=log, stderr=log, text=True, env=environment)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_models.write(tmp_path_factory.mktemp("models"))[0]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [{"id": f"p{i}", "prompt": "word " * (1 + i % 5) + str(i), "raw": i % 2 == 0} for i in range(COUNT)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def prepared(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("prepared")
    process = start(target, prompts, work / "data", work)
    assert process.wait(300) == 0, (work / "data.log").read_text()[-3000:]
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
        assert sample.features.shape == (len(sample.token_ids), 2 * demo_models.HIDDEN)
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
        deadline = time.monotonic() + 200
        while not (out / marker).exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "data.log").read_text()[-3000:]
            time.sleep(0.05)
        engines = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 20
        while any(e.is_running() and e.status() != psutil.STATUS_ZOMBIE for e in engines):
            assert time.monotonic() < deadline, "an engine outlived its trainer"
            time.sleep(0.1)
    process = start(target, prompts, out, tmp_path)
    assert process.wait(300) == 0, (tmp_path / "data.log").read_text()[-3000:]
    assert (out / ANSWERS).read_text().count("\n") == COUNT
    got, wanted = ({s.id: s for s in Dataset(folder)} for folder in (out, prepared))
    assert sorted(got) == sorted(wanted)
    for name, sample in got.items():
        assert torch.equal(sample.token_ids, wanted[name].token_ids)
        assert torch.allclose(sample.features, wanted[name].features, atol=1e-4)


ONLINE = """
import json, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
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
    mask = demo_models.byte_vocabulary()["<|mask|>"]
    file = tmp_path / "online.py"
    file.write_text(
        ONLINE.format(
            tests=str(Path(__file__).parent), data=str(prepared), out=str(tmp_path), target=str(target), mask=mask
        )
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env=environment, timeout=300, check=False
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
