"""parity tells equal paths from unequal ones, and names what ran and what is missing."""

from __future__ import annotations

import functools
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import random_pair
import torch
from rich.console import Console

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import DrafterError, spec_from_dir
from sglang_dflash.drafter_tensors import check_tensors
from sglang_dflash.train import cli, hf_states
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.parity import (
    TORCH,
    WITH_FLA,
    compare,
    missing_lines,
    parity,
    pick_layers,
    reason_not_run,
    run_transformers,
)
from sglang_dflash.train.probe import write_probe
from sglang_dflash.train.served import Prompt
from sglang_dflash.train.tables import show_parity

LAYERS, HIDDEN = random_pair.LAYERS, random_pair.HIDDEN


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return random_pair.write(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def report(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`parity` as a user runs it: a server, and transformers in a process of its own."""
    target, drafter = models
    out = tmp_path_factory.mktemp("report") / "report.json"
    options = ["--target", str(target), "--drafter", str(drafter), "--max-tokens", "24", "--out", str(out)]
    assert cli.main(["parity", *options]) == 0
    value: dict[str, Any] = json.loads(out.read_text())
    return value


def test_server_and_torch_agree_on_every_layer(report: dict[str, Any]) -> None:
    torch_path = next(s for s in report["sources"] if s["name"] == TORCH)
    assert report["layers"] == [0, 1, 2, "final"]
    assert len(torch_path["layers"]) == LAYERS
    for row in torch_path["layers"]:
        assert row["cosine"] > 0.99999
        assert 0 < row["mean"] < 1e-4 < 1  # two programs, one arithmetic: near, and not the same bits
        assert row["max"] < 1e-2
    assert report["tokens"] > 4 * 24
    assert any("torch_chunk_gated_delta_rule" in line for line in torch_path["kernels"])
    assert torch_path["missing"] == []  # it was asked to be slow


def test_the_fast_path_is_a_row_or_missing_by_name(report: dict[str, Any]) -> None:
    fast = next(s for s in report["sources"] if s["name"] == WITH_FLA)
    missing = hf_states.missing_packages()
    reason = reason_not_run(WITH_FLA, True, missing, torch.cuda.is_available())
    assert len(fast["layers"]) == (0 if reason else LAYERS)
    assert (fast["missing"] == [reason]) == (reason is not None)
    for package in missing:
        assert any(package in line for line in fast["missing"])
    server = report["sources"][0]
    assert any(line.startswith("linear attention: sglang") for line in server["kernels"])


def test_a_drafters_tau_is_the_same_under_equal_features(report: dict[str, Any]) -> None:
    assert set(report["tau"]) == {"server", TORCH}
    ours, theirs = report["tau"]["server"], report["tau"][TORCH]
    assert {"chain", "DDTree-8, N=7", "DDTree-8, N=32"} < set(ours)
    for key, value in ours.items():
        assert value >= 1
        assert theirs[key] == pytest.approx(value, abs=0.02)


def test_the_table_names_layers_kernels_and_tau(report: dict[str, Any]) -> None:
    out = io.StringIO()
    show_parity(report, Console(file=out, width=160))
    text = out.getvalue()
    for words in ("final", "cosine", "torch_chunk_gated_delta_rule", "chain"):
        assert words in text, words


def test_states_of_another_layer_do_not_pass(models: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    texts = [list(range(40, 90)), list(range(20, 50))]
    job = {"target": str(models[0]), "dtype": "float32", "device": "cpu", "hide": True, "texts": texts}
    about, states = run_transformers(job | {"out": str(tmp_path / "states")}, tmp_path)
    assert [tuple(s.shape) for s in states] == [(LAYERS, 50, HIDDEN), (LAYERS, 30, HIDDEN)]
    assert all(row == {"cosine": pytest.approx(1.0), "mean": 0.0, "max": 0.0} for row in compare(states, states))
    shifted = [torch.roll(s, 1, dims=0) for s in states]
    assert max(row["cosine"] for row in compare(states, shifted)) < 0.9
    moved = [s.clone() for s in states]
    moved[1][2, 7, 3] += 0.5  # one number of one token of one layer
    rows = compare(states, moved)
    assert [row["max"] > 0 for row in rows] == [False, False, True, False]
    assert rows[2]["max"] == pytest.approx(0.5)
    assert rows[2]["mean"] == pytest.approx(0.5 / (80 * HIDDEN))
    # The last is the state before the final norm: the norm of a random target is not the identity.
    assert states[0][-1].pow(2).mean().sqrt() > 1.5
    assert any("causal conv1d: transformers." in line for line in about["kernels"])
    with pytest.raises(TrainError, match="want \\[4, 80, 128\\] as the server's"):
        compare(states, [s[1:] for s in states])


def test_a_failing_transformers_is_one_line_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    job = {"target": str(tmp_path / "no"), "dtype": "float32", "device": "cpu", "hide": True, "texts": [[1]]}
    with pytest.raises(
        TrainError, match=r"transformers: found exit status 1 \(.*\), want 0; log .*transformers.log\.$"
    ):
        run_transformers(job | {"out": str(tmp_path / "states")}, tmp_path)


def test_pick_layers_is_the_servers_concatenation(models: tuple[Path, Path]) -> None:
    spec = spec_from_dir(models[1])
    states = torch.randn(LAYERS, 5, HIDDEN)
    assert torch.equal(pick_layers(states, spec), torch.cat([states[1], states[2]], dim=1))


def test_the_probe_conditions_on_every_layer_and_is_served(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = write_probe(tmp_path / "probe", target_facts(models[0]), (0, 1, 2))
    spec = spec_from_dir(folder)
    check_tensors(spec)
    assert spec.target_layer_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("name", "linear", "missing", "gpu", "says"),
    [
        (TORCH, True, ["fla (flash-linear-attention)"], False, None),
        (WITH_FLA, False, [], True, "no linear attention"),
        (WITH_FLA, True, ["fla (flash-linear-attention)", "causal-conv1d"], True, "fla .* and causal-conv1d"),
        (WITH_FLA, True, ["causal-conv1d"], True, None),  # it runs, and missing_lines names the convolution
        (WITH_FLA, True, [], False, "need a GPU"),
        (WITH_FLA, True, [], True, None),
    ],
)
def test_why_the_fast_path_is_no_row(name: str, linear: bool, missing: list[str], gpu: bool, says: str | None) -> None:
    found = reason_not_run(name, linear, missing, gpu)
    assert (found is None) == (says is None)
    if says is not None:
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(found)


def test_a_slow_kernel_on_the_fast_path_is_named() -> None:
    about = {
        "kernels": ["gated delta rule: fla.ops.chunk", "causal conv1d: transformers.models.x.causal_conv1d_fn"],
        "fallbacks": ["`causal_conv1d_fn` is falling back to its reference PyTorch implementation"],
    }
    lines = missing_lines(about, hide=False)
    assert [line.startswith("fast path missing: ") for line in lines] == [True, True]
    assert "causal conv1d" in lines[0]
    assert missing_lines(about, hide=True) == []


def test_what_ran_is_read_off_the_closure_not_off_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap(chosen: Any) -> Any:
        implementation = chosen

        @functools.wraps(torch_function)
        def wrapped(x: int) -> int:
            return implementation(x)

        return wrapped

    def torch_function(x: int) -> int:
        return x

    def fast(x: int) -> int:
        return x

    fast.__module__, fast.__qualname__ = "fla.ops", "chunk"
    assert hf_states.implementation(wrap(fast)) == "fla.ops.chunk"
    assert hf_states.implementation(wrap(torch_function)).endswith(".torch_function")
    # An older release binds the choice on the layer; no closure.
    layer = type("Qwen3_5GatedDeltaNet", (torch.nn.Module,), {"__module__": "fake_model"})()
    layer.chunk_gated_delta_rule, layer.causal_conv1d_fn = fast, torch_function
    monkeypatch.setitem(sys.modules, "fake_model", types.ModuleType("fake_model"))
    assert hf_states.kernels_of(layer)[0] == "gated delta rule: fla.ops.chunk"
    assert hf_states.kernels_of(torch.nn.Linear(1, 1)) == []


def test_a_drafter_for_another_target_is_refused_before_a_server_starts(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = json.loads((models[1] / "config.json").read_text()) | {"num_target_layers": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match="num_target_layers"):
        parity(str(models[0]), [Prompt("a", (1, 2))], drafter=tmp_path)
    with pytest.raises(TrainError, match="found no prompts"):
        parity(str(models[0]), [])
