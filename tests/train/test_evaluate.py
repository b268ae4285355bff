"""tau on a real server, of a drafter that this trainer made: served, replayed and reported by `eval`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_pair
import torch
from rich.console import Console
from trained_pair import NEW_TOKENS, Pair, make_pair, write_prompts

from sglang_dflash.drafter_config import DrafterError
from sglang_dflash.train import cli
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.evaluate import default_budgets, evaluate, lookup_report, offline_figures, replay_texts
from sglang_dflash.train.replay import CHAIN
from sglang_dflash.train.served import Answer, Counts, Mode, Prompt, parse_modes
from sglang_dflash.train.tables import show_evaluation
from sglang_dflash.train.target_weights import TargetWeights, load_target_weights

BUDGET = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def weights(pair: Pair) -> TargetWeights:
    return load_target_weights(pair.target)


@pytest.fixture(scope="module")
def report(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`eval` as a user runs it; three servers, one after another."""
    folder = tmp_path_factory.mktemp("report")
    prompts = write_prompts(folder / "prompts.jsonl")
    options = ["--target", str(pair.target), "--drafter", str(pair.drafter), "--prompts", str(prompts)]
    options += ["--budgets", f"ar,chain,{BUDGET}", "--max-tokens", str(NEW_TOKENS), "--concurrency", "4"]
    assert cli.main(["eval", *options, "--out", str(folder / "report.json")]) == 0
    value: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return value


def test_invariant_26_random_features_drop_tau(pair: Pair, weights: TargetWeights) -> None:
    def tau(texts: list[Any]) -> float:
        figures = offline_figures(replay_texts(pair.drafter, weights, texts, [BUDGET]), [BUDGET])
        return float(figures["decode_tau"][CHAIN])

    learnt = [t for i, t in enumerate(pair.texts) if i % 4]  # what the drafter was trained on
    generator = torch.Generator().manual_seed(0)
    spread = torch.cat([t.features for t in learnt]).std(dim=0)
    noise = [replace(t, features=torch.randn(t.features.shape, generator=generator) * spread) for t in learnt]
    of_another = [replace(t, features=learnt[i - 1].features[: len(t.features)]) for i, t in enumerate(learnt)]
    of_another = [t for t in of_another if len(t.features) == len(t.token_ids)]
    assert tau(learnt) > 4
    assert len(of_another) > 3
    assert tau(noise) < 1.5
    assert tau(of_another) < 1.5


def test_invariant_28_a_published_checkpoint_is_served_with_the_tau_that_the_trainer_replays(
    pair: Pair, weights: TargetWeights, report: dict[str, Any]
) -> None:
    """Verify for verify: the server counts the last one past the answer's end, the replay up to it."""
    replays = replay_texts(pair.drafter, weights, pair.texts, [BUDGET])
    served = {run["mode"]: run for run in report["runs"]}
    for mode in (CHAIN, str(BUDGET)):
        for one, prompt in zip(replays, served[mode]["prompts"], strict=True):
            walk = one.walk(mode)
            assert prompt["verifies"] == len(walk), (mode, prompt["id"])
            assert 0 <= prompt["accepted"] - sum(walk) <= 7 - walk[-1], (mode, prompt["id"])
        tau, replayed = served[mode]["tau"], report["offline"][0]["decode_tau"][mode]
        assert 2 < replayed <= tau < replayed + 7 * len(replays) / served[mode]["verifies"]
        assert replayed == pytest.approx(offline_figures(replays, [BUDGET])["decode_tau"][mode])
    # Another checkpoint's replay is not this one's.
    other = offline_figures(replay_texts(pair.untrained, weights, pair.texts, []), [])["decode_tau"][CHAIN]
    assert other < 1.2


def test_invariant_32_teacher_forced_decode_loop_and_served_tau_agree(
    pair: Pair, weights: TargetWeights, report: dict[str, Any]
) -> None:
    """Within a tenth, pooled: they differ by the cut last verifies, and by positions that decoding skips. In every text
    served and decode loop differ by the cut alone (above), and teacher forcing by at most a quarter in nine of ten."""
    served = {run["mode"]: run for run in report["runs"]}
    (offline,) = report["offline"]
    for mode in (CHAIN, str(BUDGET)):
        taus = served[mode]["tau"], offline["decode_tau"][mode], offline["teacher_forced_tau"][mode]
        assert min(taus) > 2
        assert max(taus) / min(taus) < 1.1, (mode, taus)
        close = []
        for one in replay_texts(pair.drafter, weights, pair.texts, [BUDGET]):
            forced, decoded = 1 + float(one.lengths[mode][one.complete].float().mean()), Counts.of(one.walk(mode)).tau
            assert decoded is not None
            close.append(abs(forced / decoded - 1) < 0.25)
        assert sum(close) >= 0.9 * len(close)


def test_invariant_33_greedy_speculation_writes_the_plain_text(pair: Pair, report: dict[str, Any]) -> None:
    assert [run["mode"] for run in report["runs"]] == ["ar", CHAIN, str(BUDGET)]
    assert report["runs"][0]["tau"] is None
    for run in report["runs"]:
        assert run["identical"] == len(pair.prompts)
        assert all(p["same_text"] for p in run["prompts"])
        assert run["tokens"] == sum(len(a.token_ids) for a in pair.answers)


def test_the_report_is_pooled_and_shown(report: dict[str, Any]) -> None:
    for run in report["runs"][1:]:
        prompts = run["prompts"]
        verifies, accepted = (sum(p[k] for p in prompts) for k in ("verifies", "accepted"))
        assert run["tau"] == pytest.approx(1 + accepted / verifies)
        assert len(run["acceptance"]) == 7
        assert run["acceptance"] == sorted(run["acceptance"], reverse=True)
        assert sum(run["acceptance"]) == pytest.approx(accepted / verifies)
    tree, chain = report["runs"][2], report["runs"][1]
    assert tree["topk"] == 8
    assert tree["tau"] > chain["tau"]  # twice the nodes
    out = io.StringIO()
    show_evaluation(report, Console(file=out, width=160))
    text = out.getvalue()
    for words in (f"DDTree-8, N={BUDGET}", f"{tree['tau']:.3f}", "prompt lookup, 7", "top-8 streak", "p15", "16/16"):
        assert words in text, words


def test_drafters_of_one_name_are_told_apart(report: dict[str, Any]) -> None:
    other = json.loads(json.dumps(report).replace("/drafter", "/other/drafter"))
    both = report | {"runs": report["runs"] + other["runs"][1:], "offline": report["offline"] + other["offline"]}
    out = io.StringIO()
    show_evaluation(both, Console(file=out, width=400))
    for value in (report, other):
        assert value["offline"][0]["drafter"] in out.getvalue()


def test_lookup_is_reported_with_loops_apart() -> None:
    loop, plain = (7, 8) * 20, tuple(range(100, 140))
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3, 4))]
    figures = lookup_report(prompts, [Answer(loop, Counts()), Answer(plain, Counts())], 7)
    assert figures["looping"] == 1
    assert figures["tau_off_loop"] == 1.0
    assert figures["tau_looping"] > 4
    assert 1.0 < figures["tau"] < figures["tau_looping"]


def test_a_drafter_that_does_not_fit_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    target, drafter = random_pair.write(tmp_path)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"num_target_layers": 9}))
    with pytest.raises(DrafterError, match="num_target_layers: found 9, wanted 4"):
        evaluate(str(target), [drafter], [Prompt("a", (1, 2))])
    with pytest.raises(TrainError, match="found 0 prompts and 1 drafters"):
        evaluate(str(target), [drafter], [])


def test_budgets_are_checked() -> None:
    assert [m.key for m in parse_modes("chain, 15,AR,15,032", 16)] == ["chain", "15", "ar", "32"]
    assert default_budgets(16) == "chain,15,32"
    assert default_budgets(32) == "chain,31,32"
    assert Mode("15").title == "DDTree-8, N=15"
    for wrong in ("14", "129", "tree", "", "-1"):
        with pytest.raises(TrainError, match=r"--budgets: found '.*', want ar, chain or a number in 15"):
            parse_modes(wrong, 16)
