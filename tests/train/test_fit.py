"""A run: it learns, it resumes to the same curve, two ranks equal one, and what it exports is what it trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import run_through_kills
from training_data import LAYER_IDS, TESTS, fingerprint, recipe, write_data, write_target

from sglang_dflash.drafter_config import DrafterError, spec_from_dir
from sglang_dflash.drafter_tensors import expected_shapes, read_headers
from sglang_dflash.train.drafter_model import Drafter
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.export import export
from sglang_dflash.train.fit import CURVE, Fit, load_spec
from sglang_dflash.train.recipe import load_recipe, parse_recipe
from sglang_dflash.train.replay import replay
from sglang_dflash.train.shards import Dataset, Sample, ShardWriter, read_fingerprint
from sglang_dflash.train.target_weights import load_target_weights

PROGRAM = """
import json, sys, time
sys.path[:0] = {tests!r}
import torch
torch.set_num_threads(1)
from training_data import recipe
from sglang_dflash.train.fit import Fit
fit = Fit({target!r}, [{data!r}], {out!r}, recipe(**json.loads({changes!r})))
print("begun", flush=True)
if {slow}:
    train = fit._train
    fit._train = lambda *a, **k: (time.sleep(0.03), train(*a, **k))[1]
fit.run()
"""


def program(target: Path, data: Path, out: Path, *, slow: bool = False, **changes: Any) -> str:
    return PROGRAM.format(
        tests=TESTS, target=str(target), data=str(data), out=str(out),
        changes=json.dumps(changes), slow=slow,
    )  # fmt: skip


def run(code: str, ranks: int = 1) -> None:
    """In processes of its own: a process group is for life."""
    line = [sys.executable, "-c", code]
    if ranks > 1:
        file = Path(os.environ.get("TMPDIR", "/tmp")) / f"fit-{os.getpid()}.py"
        file.write_text(code)
        line = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            str(file),
        ]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


def curve(out: Path) -> list[dict[str, float]]:
    points = [json.loads(line) for line in (out / CURVE).read_text().splitlines()]
    for point in points:
        del point["seconds"]
    return points


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_invariant_35_a_killed_and_resumed_run_draws_the_same_curve(target: Path, tmp_path: Path) -> None:
    """Of texts of many lengths, so that epochs differ in their number of batches; figures are averages of 3 steps, and
    checkpoints fall between them."""
    data = write_data(tmp_path / "data", samples=23, uneven=True)
    how = {"epochs": 6, "rows": 1, "max_length": 44, "accumulation": 2, "log_every": 3, "save_every": 4}
    run(program(target, data, tmp_path / "whole", **how))
    assert len(set(Fit(target, [data], tmp_path / "look", recipe(**how)).per_epoch)) > 1
    code = program(target, data, tmp_path / "killed", slow=True, **how)
    assert run_through_kills(code, kills=3, pauses=(0.3, 1.2), seed=1) == 3
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    for name in ("whole", "killed"):
        export(tmp_path / name, tmp_path / f"{name}-drafter", dtype=torch.float32)
    a, b = (Drafter.from_dir(tmp_path / f"{name}-drafter").state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_invariant_22_two_ranks_equal_one(target: Path, data: Path, tmp_path: Path) -> None:
    """Each rank's rows hold other documents, so the batches differ; the sums over a step are compared."""
    all_anchors = {"anchors": 80, "epochs": 3, "max_length": 40}
    run(program(target, data, tmp_path / "one", rows=4, **all_anchors))
    run(program(target, data, tmp_path / "two", rows=2, **all_anchors), ranks=2)
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) > 5
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert a["tau/chain"] == pytest.approx(b["tau/chain"], rel=1e-3)


def test_invariant_22_accumulation_equals_a_larger_batch(target: Path, data: Path, tmp_path: Path) -> None:
    common = {"anchors": 80, "epochs": 2, "max_length": 40}
    run(program(target, data, tmp_path / "large", rows=4, **common))
    run(program(target, data, tmp_path / "small", rows=2, accumulation=2, **common))
    for a, b in zip(curve(tmp_path / "large"), curve(tmp_path / "small"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_invariant_23_a_rank_without_data_takes_part(target: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "few", samples=3)
    run(program(target, tmp_path / "few", tmp_path / "out", rows=1, max_length=40, epochs=2), ranks=2)
    assert [point["step"] for point in curve(tmp_path / "out")] == [1, 2, 3, 4]


def test_invariant_27_one_batch_overfits_to_tau_of_the_block(target: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "one", samples=2)
    run(
        program(
            target, tmp_path / "one", tmp_path / "out", epochs=500, anchors=40, log_every=50, save_every=1000, lr=1e-2
        )
    )
    last = curve(tmp_path / "out")[-1]
    assert last["tau/chain"] > 3.7  # of at most 4, less where the ends of texts cut blocks short
    assert last["tau/chain"] <= last["tau/ddtree8_7"] + 0.2


def test_invariant_26_shuffled_labels_give_chance(target: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "noise", samples=200, shuffled=True)
    run(program(target, tmp_path / "noise", tmp_path / "out", epochs=1, log_every=1000, save_every=1000))
    (last,) = curve(tmp_path / "out")
    assert last["accuracy/all"] < 0.06  # chance is 1 in 63


def test_invariant_27_leak_alarm(target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dflash.train import fit as module

    monkeypatch.setattr(module, "_LEAK", 0.0)
    run_ = Fit(target, [data], tmp_path / "out", recipe(epochs=40))
    assert run_.run(until=3)["leak_alarm"] == 1.0
    monkeypatch.setattr(module, "_LEAK", 0.9)
    assert Fit(target, [data], tmp_path / "out2", recipe(epochs=40)).run(until=3)["leak_alarm"] == 0.0


def test_invariant_02_and_03_an_export_is_the_published_format(target: Path, data: Path, tmp_path: Path) -> None:
    Fit(target, [data], tmp_path / "run", recipe()).run(until=4)
    out = export(tmp_path / "run", tmp_path / "drafter")
    assert set(read_headers(out)) == set(expected_shapes(spec_from_dir(out)))
    assert len(read_headers(out)) == 11 * 2 + 3
    config = json.loads((out / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == LAYER_IDS
    assert not {"rope_parameters", "partial_rotary_factor", "mrope_section", "auto_map"} & set(config)
    assert json.loads((out / "provenance.json").read_text()) == read_fingerprint(data)
    spec, _ = load_spec(tmp_path / "run")
    assert Drafter.from_dir(out).spec.target_layer_ids == spec.target_layer_ids
    with pytest.raises(TrainError, match="found it there already"):
        export(tmp_path / "run", out)
    with pytest.raises(TrainError, match="want a run of fit"):
        export(tmp_path / "absent", tmp_path / "drafter2")
    assert not (tmp_path / "drafter2").exists()


def test_invariant_28_an_export_drafts_what_was_trained(target: Path, tmp_path: Path) -> None:
    """The published format loads back into the trainer; its offline tau is the trained module's, in fp32 to the bit."""
    data = write_data(tmp_path / "data", samples=4)
    how = recipe(epochs=200, lr=1e-2, anchors=40, log_every=1000, save_every=1000)
    Fit(target, [data], tmp_path / "run", how).run()
    fit = Fit(target, [data], tmp_path / "run", how)  # from its checkpoint
    weights = {name: tensor.full_tensor() for name, tensor in fit.drafter.state_dict().items()}
    trained = Drafter(fit.spec).eval()
    trained.load_state_dict(weights)
    sample, head = Dataset(data)[0], load_target_weights(target)

    def accepted(drafter: Drafter) -> torch.Tensor:
        return replay(drafter.eval(), head, sample.token_ids, sample.features, 5, [7]).lengths["chain"]

    exact = Drafter.from_dir(export(tmp_path / "run", tmp_path / "fp32", dtype=torch.float32))
    assert torch.equal(accepted(exact), accepted(trained))
    tau = float(accepted(trained).float().mean())
    assert tau > 1  # or the figure would say nothing
    rounded = Drafter.from_dir(export(tmp_path / "run", tmp_path / "bf16"))
    assert float(accepted(rounded).float().mean()) == pytest.approx(tau, abs=0.3)
    assert float(accepted(Drafter(fit.spec).initialise(0)).float().mean()) < 0.3


def test_fit_starts_from_a_published_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    Fit(target, [data], tmp_path / "run", recipe()).run(until=4)
    out = export(tmp_path / "run", tmp_path / "drafter", dtype=torch.float32)
    again = Fit(target, [data], tmp_path / "again", recipe(), init=out)
    assert torch.equal(again.drafter.fc.weight.full_tensor(), Drafter.from_dir(out).fc.weight)
    other = recipe().drafter.model_dump() | {"rope_theta": 5.0}
    with pytest.raises(TrainError, match=r"rope_theta: found .* want 5\.0"):
        Fit(target, [data], tmp_path / "other", recipe(drafter=other), init=out)
    assert not (tmp_path / "other").exists()


def test_bf16_computes_and_fp32_remembers(target: Path, data: Path, tmp_path: Path) -> None:
    """Products in bf16; masters, moments and rotary tables in fp32."""
    fit = Fit(target, [data], tmp_path / "run", recipe(dtype="bfloat16"))
    seen = []
    attention = fit.drafter.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, args: seen.append([module.q_proj.weight.dtype, *(x.dtype for x in args[:4])])
    )
    fit.run(until=2)
    assert all(dtypes == [torch.bfloat16] * 3 + [torch.float32] * 2 for dtypes in seen)
    assert len(seen) == 2
    state = [value for values in fit.optimiser.state.values() for value in values.values()]
    assert {tensor.dtype for tensor in [*fit.model.parameters(), *state]} == {torch.float32}


def test_tensorboard_gets_the_figures(target: Path, data: Path, tmp_path: Path) -> None:
    Fit(target, [data], tmp_path / "run", recipe(tensorboard=True)).run(until=2)
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    raw = events.read_bytes()
    for name in (b"loss", b"tau/chain", b"tau/ddtree8_7", b"streak/top8", b"accuracy/slot_03"):
        assert name in raw


def refused(words: str, target: Path, data: Path, out: Path, **changes: Any) -> None:
    with pytest.raises(TrainError, match=words) as error:
        Fit(target, [data], out, recipe(**changes))
    assert "\n" not in str(error.value)
    assert not out.exists()


def test_bad_input_is_one_line_and_leaves_nothing(target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused("found 40 tokens, want at most max_length 16", target, data, out, max_length=16)
    refused("loss argmax: found data without the final hidden state", target, data, out, loss="argmax")
    wide = recipe().drafter.model_dump() | {"mask_token_id": 64}
    refused("mask_token_id: found 64, want below 64", target, data, out, drafter=wide)
    write_data(tmp_path / "four", samples=2, layer_ids=[1, 2, 3, 4])
    refused(r"found 96 wide, want 128 \(4 layer ids x hidden size 32", target, tmp_path / "four", out)
    refused("run prepare first", target, tmp_path / "absent", out)
    ids = recipe().drafter.model_dump() | {"target_layer_ids": [1, 3, 6]}
    refused(r"data: layer ids: found \[1, 3, 5\], want \[1, 3, 6\]", target, data, out, drafter=ids)
    heads = recipe().drafter.model_dump() | {"kv_heads": 3}
    refused("kv_heads: found 3, want a divisor of heads, 4", target, data, out, drafter=heads)
    write_data(tmp_path / "other", samples=2, target_weights="0123456789abcdef")
    refused("weights: found hash .*, want 0123456789abcdef", target, tmp_path / "other", out)
    write_data(tmp_path / "last", samples=2, layer_ids=[1, 3, 7])
    with pytest.raises(DrafterError, match=r"target_layer_ids: found 7 in \[1, 3, 7\]"):
        Fit(target, [tmp_path / "last"], out, recipe())
    assert not out.exists()


def test_invariant_25_the_mask_token_is_in_no_text(target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inside = recipe().drafter.model_dump() | {"mask_token_id": 7}
    refused("found the mask token 7 in its text", target, data, out, drafter=inside)
    beyond = recipe().drafter.model_dump() | {"mask_token_id": 64}
    refused("mask_token_id: found 64, want below 64", target, data, out, drafter=beyond)
    Fit(target, [data], out, recipe()).run(until=2)
    drafter = export(out, tmp_path / "drafter")
    assert spec_from_dir(drafter).mask_token_id == recipe().drafter.mask_token_id  # what the server will draft with


def test_a_sample_with_a_nan_is_named(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ShardWriter` refuses such a sample; a shard written by something else gets as far as the loss."""
    monkeypatch.setattr("sglang_dflash.train.shards.check_sample", lambda sample: None)
    with ShardWriter(tmp_path / "data", fingerprint()) as writer:
        for i in range(8):
            features = torch.randn(20, 3 * 32)
            features[5, 3] = float("nan") if i == 6 else 0.0
            writer.add(Sample(f"s{i}", torch.arange(20).int(), torch.arange(20) >= 5, features))
    run_ = Fit(target, [tmp_path / "data"], tmp_path / "out", recipe(rows=1, max_length=20, log_every=4, save_every=8))
    with pytest.raises(TrainError, match=r"sample 's6': features: found NaN or infinity at token 5"):
        run_.run()
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_run_is_not_continued_with_other_settings(target: Path, data: Path, tmp_path: Path) -> None:
    Fit(target, [data], tmp_path / "run", recipe()).run(until=2)
    with pytest.raises(
        TrainError, match=r"recipe: lr: found 0\.003 in the run, want 0\.1 as given now; use a new --out"
    ):
        Fit(target, [data], tmp_path / "run", recipe(lr=0.1))


def test_a_nan_stops_the_run_before_it_is_saved(target: Path, data: Path, tmp_path: Path) -> None:
    run_ = Fit(target, [data], tmp_path / "run", recipe(lr=1e30, epochs=20, log_every=1000, save_every=5))
    with pytest.raises(TrainError, match="want finite numbers"):
        run_.run()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_recipes(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("drafter: {mask_token_id: 5}\nlearning_rate: 1\n")
    with pytest.raises(TrainError, match=r"recipe\.yaml: learning_rate: found 1, want Extra inputs"):
        load_recipe(file)
    file.write_text("drafter: {mask_token_id: 5, block_size: 99}\n")
    with pytest.raises(TrainError, match=r"drafter\.block_size: found 99, want Input should be less than"):
        load_recipe(file)
    file.write_text("a: [")
    with pytest.raises(TrainError, match="want a YAML recipe"):
        load_recipe(file)
    published = parse_recipe({"drafter": {"mask_token_id": 5}}, "x")
    assert (published.decay, published.lr, published.warmup, published.clip, published.epochs) == (7, 6e-4, 0.04, 1, 6)
