"""Teacher-forced figures against walks done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dflash.train.metrics import Tally, leading_run, tree_depth_accepted
from sglang_dflash.tree import build_draft_tree


def test_leading_run() -> None:
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert leading_run(hits).tolist() == [2, 0, 4]


def candidates(blocks: int, depth: int, seed: int) -> tuple[Tensor, Tensor]:
    """Distinct tokens a depth, log-probs of a softmax over more than the 8 that are kept, best first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(blocks, depth, 12, generator=generator) * 2
    best = logits.log_softmax(-1).topk(8)
    return best.indices, best.values


@pytest.mark.parametrize("budget", [1, 5, 16, 60])
def test_a_tree_accepts_the_longest_root_path_of_the_text(budget: int) -> None:
    ids, log_probs = candidates(64, 5, budget)
    labels = torch.randint(0, 12, (64, 5), generator=torch.Generator().manual_seed(7))
    labels[:32] = ids[:32, :, 0]  # texts that follow the drafts deep
    valid = torch.ones(64, 5, dtype=torch.bool)
    valid[::3, 3:] = False
    tree = build_draft_tree(ids, log_probs, budget)

    def paths(block: int) -> set[tuple[int, ...]]:
        out = set()
        for row in range(1, budget + 1):
            path, at = [], row
            while at > 0:
                path.append(int(tree.tokens[block, at]))
                at = int(tree.parents[block, at])
            if int(tree.depths[block, row]) == len(path):
                out.add(tuple(reversed(path)))
        return out

    got = tree_depth_accepted(ids, log_probs, labels, valid, budget).tolist()
    for block in range(64):
        known, text = paths(block), labels[block].tolist()[: int(valid[block].sum())]
        want = max((n for n in range(len(text) + 1) if n == 0 or tuple(text[:n]) in known), default=0)
        assert got[block] == want
    assert max(got) > 0


def test_a_budget_of_the_chain_accepts_no_less_than_the_chain_where_drafts_are_sure() -> None:
    ids, _ = candidates(20, 4, 0)
    sure = torch.full((20, 4, 8), -9.0)
    sure[:, :, 0] = -0.001
    labels = torch.where(torch.rand(20, 4, generator=torch.Generator().manual_seed(1)) < 0.7, ids[:, :, 0], -5)
    valid = torch.ones(20, 4, dtype=torch.bool)
    chain = leading_run(labels == ids[:, :, 0])
    assert torch.equal(tree_depth_accepted(ids, sure, labels, valid, 4), chain)


def test_figures_are_pooled_over_blocks() -> None:
    """Two rows of two blocks of three slots, one block unused."""
    rank = torch.tensor([[[0, 0, 9], [0, 3, 0]], [[7, 0, 0], [0, 0, 0]]])
    valid = torch.tensor([[[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [0, 0, 0]]], dtype=torch.bool)
    tally = Tally(3)
    tally.add(torch.full((2, 2, 3), 2.0), rank, valid)
    figures = tally.read()
    assert figures["tau/chain"] == pytest.approx(1 + (2 + 1 + 0) / 3)
    assert figures["streak/top8"] == pytest.approx((2 + 2 + 3) / 3)
    assert figures["accuracy/all"] == pytest.approx(5 / 8)
    assert [figures[f"accuracy/slot_0{k}"] for k in (1, 2, 3)] == pytest.approx([2 / 3, 2 / 3, 1 / 2])
    assert figures["cross_entropy"] == pytest.approx(2.0)
    tally.add(torch.full((2, 2, 3), 2.0), rank, valid)  # the same again changes no mean
    assert tally.read() == pytest.approx(figures)


def test_nothing_drafted_is_a_tau_of_one_and_no_error() -> None:
    tally = Tally(3)
    tally.add(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, 3, dtype=torch.bool))
    assert tally.read()["tau/chain"] == 1.0
    assert Tally(3).read()["accuracy/all"] == 0.0
