"""Replaying a text is decoding it: block by block, each from what was committed before it and nothing else."""

from __future__ import annotations

import pytest
import torch
from shapes import HIDDEN, MASK_ID, VOCAB, make_drafter, run_blocks

from sglang_dflash.train.drafter_model import Drafter
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.evaluate import offline_figures
from sglang_dflash.train.head import top_candidates
from sglang_dflash.train.replay import CHAIN, STREAK, TOP, Replay, replay
from sglang_dflash.train.served import Counts
from sglang_dflash.train.target_weights import TargetWeights
from sglang_dflash.tree import build_draft_tree

PROMPT, ANSWER, BUDGETS = 6, 40, (3, 9)


def target_weights() -> TargetWeights:
    generator = torch.Generator().manual_seed(5)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    return TargetWeights(embedding, head, torch.zeros(HIDDEN), 1e-6, True)


def candidates(
    drafter: Drafter, target: TargetWeights, tokens: torch.Tensor, features: torch.Tensor, anchor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probs ``[B-1, 8]`` of the one block at ``anchor``, from the features before it alone."""
    seen = torch.cat([features[:anchor], torch.zeros_like(features[:1])])  # the anchor's row is never looked at
    hidden = run_blocks(drafter, seen[None], tokens[None, : anchor + 1], target.embedding, torch.tensor([[anchor]]))
    return top_candidates(hidden[0, 0, 1:], target.lm_head, TOP)


@pytest.fixture(scope="module")
def text() -> tuple[Drafter, TargetWeights, torch.Tensor, torch.Tensor]:
    """A text that the drafter gets right often and not always: its own candidates of rank 0, sometimes 1 or 3."""
    drafter, target = make_drafter(block_size=4), target_weights()
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(PROMPT + ANSWER, drafter.fc.in_features, generator=generator)
    tokens = torch.randint(0, MASK_ID, (PROMPT + 1,), generator=generator)
    with torch.no_grad():
        while len(tokens) < PROMPT + ANSWER:
            ids, _ = candidates(drafter, target, tokens, features, len(tokens) - 1)
            for slot in range(3):
                rank = (0, 0, 0, 0, 1, 3)[int(torch.randint(0, 6, (1,), generator=generator))]
                tokens = torch.cat([tokens, ids[slot, rank][None]])
                if rank > 1:
                    break
    return drafter, target, tokens[: PROMPT + ANSWER], features


@torch.no_grad()
def naive(text: tuple[Drafter, TargetWeights, torch.Tensor, torch.Tensor], anchor: int) -> dict[str, int]:
    """Accepted drafts at one anchor, a step at a time."""
    drafter, target, tokens, features = text
    ids, log_probs = candidates(drafter, target, tokens, features, anchor)
    truth = tokens[anchor + 1 : anchor + 4].tolist()
    out = {}
    for name, width in ((CHAIN, 1), (STREAK, TOP)):
        run = 0
        while run < len(truth) and truth[run] in ids[run, :width].tolist():
            run += 1
        out[name] = run
    for budget in BUDGETS:
        tree, row, depth = build_draft_tree(ids[None], log_probs[None], budget), 0, 0
        while depth < len(truth):
            children = [r for r in range(1, budget + 1) if tree.parents[0, r] == row and tree.depths[0, r] > 0]
            row = next((r for r in children if tree.tokens[0, r] == truth[depth]), -1)
            if row < 0:
                break
            depth += 1
        out[str(budget)] = depth
    return out


def run(text: tuple[Drafter, TargetWeights, torch.Tensor, torch.Tensor]) -> Replay:
    drafter, target, tokens, features = text
    return replay(drafter, target, tokens, features, PROMPT, BUDGETS)


def test_every_anchor_counts_what_one_block_alone_would(text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflash.train.replay._QUERIES", 28)  # several forwards a text
    found = run(text)
    wanted = [naive(text, a) for a in range(PROMPT, PROMPT + ANSWER - 1)]
    for key, lengths in found.lengths.items():
        assert lengths.tolist() == [w[key] for w in wanted], key
    assert set(found.lengths) == {CHAIN, STREAK, "3", "9"}
    assert set(found.lengths[CHAIN].tolist()) == {0, 1, 2, 3}  # or the text would show little
    assert (found.lengths["9"] > found.lengths[CHAIN]).any()


def test_the_walk_commits_every_token_once(text) -> None:
    found = run(text)
    for key in (CHAIN, "3", "9"):
        at, anchors = PROMPT, []
        while at < PROMPT + ANSWER - 1:
            anchors.append(at)
            at += naive(text, at)[key] + 1
        assert found.walk(key) == [naive(text, a)[key] for a in anchors]
        assert sum(found.walk(key)) + len(anchors) == at - PROMPT


def test_figures_are_pooled_and_cut_blocks_do_not_count_as_positions(text) -> None:
    found = run(text)
    figures = offline_figures([found, found], list(BUDGETS))
    assert figures["decode_tau"][CHAIN] == pytest.approx(Counts.of(found.walk(CHAIN)).tau)
    whole = found.lengths[CHAIN][:-2].float()  # the last two anchors have fewer than three tokens after them
    assert figures["every_position"][CHAIN] == pytest.approx(1 + float(whole.mean()))
    assert figures["teacher_forced_tau"][CHAIN] == pytest.approx(1 + float(whole.mean()))  # two texts alike
    assert found.complete.tolist() == [True] * (ANSWER - 3) + [False] * 2
    assert figures["accuracy"][0] == pytest.approx(float((found.lengths[CHAIN] > 0).float().mean()))


def test_unlike_texts_are_pooled_as_decoding_them_would() -> None:
    def always(length: int, anchors: int) -> Replay:
        lengths, yes = torch.full((anchors,), length), torch.ones(anchors, dtype=torch.bool)
        slots = torch.zeros(anchors, 7, dtype=torch.bool)
        return Replay({CHAIN: lengths, STREAK: lengths}, yes, slots, slots)

    figures = offline_figures([always(7, 80), always(0, 80)], [])
    # 10 verifies of 8 tokens and 80 of one.
    assert figures["decode_tau"][CHAIN] == figures["teacher_forced_tau"][CHAIN] == pytest.approx(160 / 90)
    assert figures["every_position"][CHAIN] == pytest.approx(4.5)


def test_a_text_that_does_not_fit_its_features_is_refused(text) -> None:
    drafter, target, tokens, features = text
    with pytest.raises(TrainError, match="found 45 feature rows, 46 tokens"):
        replay(drafter, target, tokens, features[:-1], PROMPT)
    with pytest.raises(TrainError, match="an answer from 0"):
        replay(drafter, target, tokens, features, 0)
    with pytest.raises(TrainError, match="wide"):
        replay(drafter, target, tokens, features[:, :HIDDEN], PROMPT)


def test_an_answer_of_one_token_has_nothing_to_verify(text) -> None:
    drafter, target, tokens, features = text
    found = replay(drafter, target, tokens[: PROMPT + 1], features[: PROMPT + 1], PROMPT, BUDGETS)
    assert found.walk(CHAIN) == []
    assert offline_figures([], [7])["accuracy"] == []
