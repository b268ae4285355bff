"""The tree builder against brute force, an eager heap and the documented rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_reference import assert_tree_is, brute_force, heap_order, random_candidates

from sglang_dflash.tree import MAX_NODES, DraftTree, build_draft_tree, naive_build_draft_tree

NINF = float("-inf")


def check(token_ids: Tensor, log_probs: Tensor, num_nodes: int, order: Callable[..., list] = brute_force) -> DraftTree:
    """Candidates must be sorted. Checks every request against `order`; returns the tree."""
    roots = torch.arange(token_ids.shape[0]) + 7
    tree = naive_build_draft_tree(token_ids, log_probs, num_nodes, roots)
    for b in range(token_ids.shape[0]):
        assert_tree_is(tree, b, order(log_probs[b], num_nodes), token_ids[b], int(roots[b]))
    return tree


@pytest.mark.parametrize("levels", [None, 1, 2, 3])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 5), (4, 1), (2, 3), (3, 3), (4, 2), (5, 3)])
def test_equals_brute_force(depth: int, width: int, levels: int | None) -> None:
    for seed, num_nodes in enumerate((1, 2, 5, 16, 128)):
        token_ids, log_probs = random_candidates(3, depth, width, seed, levels, dead=0.2 * (seed % 2))
        check(token_ids, log_probs, num_nodes)


@pytest.mark.parametrize("levels", [None, 1, 4])
@pytest.mark.parametrize(("depth", "width", "num_nodes"), [(15, 8, 32), (31, 16, 128), (7, 4, 64), (15, 1, 15)])
def test_equals_heap(depth: int, width: int, num_nodes: int, levels: int | None) -> None:
    token_ids, log_probs = random_candidates(2, depth, width, depth + num_nodes, levels, dead=0.1)
    check(token_ids, log_probs, num_nodes, heap_order)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_candidates(data: st.DataObject) -> None:
    bs, depth, width = (data.draw(st.integers(low, high)) for low, high in ((0, 5), (1, 3), (1, 4)))
    num_nodes = data.draw(st.integers(1, 100))
    value = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, -1e-30, -3e38, NINF, float("nan"), 0.5])
    count = bs * depth * width
    log_probs = torch.tensor(data.draw(st.lists(value, min_size=count, max_size=count)), dtype=torch.float32)
    log_probs = log_probs.view(bs, depth, width)
    token_ids = torch.arange(count).view(bs, depth, width)

    tree = build_draft_tree(token_ids, log_probs, num_nodes)

    rank_key = torch.where(log_probs.isnan(), NINF, log_probs.clamp_max(0))
    order = rank_key.sort(dim=-1, descending=True, stable=True).indices
    token_ids, log_probs = token_ids.gather(-1, order), log_probs.gather(-1, order)
    for b in range(bs):
        assert_tree_is(tree, b, brute_force(log_probs[b], num_nodes), token_ids[b], -1)
    # Facts that hold whatever the order: parents first, and a mask row is its parent's row plus itself.
    rows = torch.arange(num_nodes + 1)
    assert (tree.parents < rows).all()
    assert ((tree.next_sibling > rows) | (tree.next_sibling == -1)).all()
    mask = tree.mask()
    assert mask.any(-1).all()
    assert torch.equal(mask.sum(-1), tree.depths + 1)
    for b, t in (tree.parents >= 0).nonzero().tolist():
        above = mask[b, tree.parents[b, t]].clone()
        above[t] = True
        assert torch.equal(mask[b, t], above)


def test_worked_example() -> None:
    """Two depths, two candidates: 0.7/0.3 then 0.6/0.4; scores a .7, aA .42, b .3, aB .28, bA .18, bB .12."""
    log_probs = torch.tensor([[[0.7, 0.3], [0.6, 0.4]]]).log()
    token_ids = torch.tensor([[[10, 11], [20, 21]]])
    tree = build_draft_tree(token_ids, log_probs, 5, torch.tensor([9], dtype=torch.int32))
    assert tree.tokens.tolist() == [[9, 10, 20, 11, 21, 20]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 1, 3]]
    assert tree.next_token.tolist() == [[1, 2, -1, 5, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 3, 4, -1, -1, -1]]
    assert tree.positions(torch.tensor([100])).tolist() == [[100, 101, 102, 101, 102, 102]]
    assert tree.mask()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]
    assert tree.is_chain.tolist() == [False]


def test_ties_prefer_shallow_then_parent_then_rank() -> None:
    tree = build_draft_tree(torch.zeros(1, 3, 2, dtype=torch.int64), torch.zeros(1, 3, 2), 14)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]]


def test_unsorted_candidates_keep_first_of_equals() -> None:
    log_probs = torch.tensor([[[-2.0, -1.0, -1.0, float("nan")]]])
    tree = build_draft_tree(torch.tensor([[[5, 6, 7, 8]]]), log_probs, 4)
    assert tree.tokens.tolist() == [[-1, 6, 7, 5, 0]]


def test_full_width_ancestor_bits() -> None:
    """The largest tree there is: both ancestor words and their sign bits are used."""
    token_ids, log_probs = random_candidates(1, 31, 16, seed=3, levels=2)
    tree = check(token_ids, log_probs, MAX_NODES, heap_order)
    assert (tree.ancestors[..., 0] < 0).any()
    assert (tree.ancestors[..., 1] < 0).any()


def test_no_requests() -> None:
    tree = build_draft_tree(torch.zeros(0, 4, 2, dtype=torch.int64), torch.zeros(0, 4, 2), 6)
    assert tree.mask().shape == (0, 7, 7)
    assert tree.positions(torch.zeros(0, dtype=torch.int64)).shape == (0, 7)


def test_nothing_possible_leaves_the_root() -> None:
    tree = build_draft_tree(torch.ones(1, 2, 2, dtype=torch.int64), torch.full((1, 2, 2), NINF), 3)
    assert tree.tokens.tolist() == [[-1, 0, 0, 0]]
    assert tree.next_token.tolist() == [[-1] * 4]
    assert torch.equal(tree.mask()[0], torch.eye(4, dtype=torch.bool))


IDS = torch.zeros(2, 3, 4, dtype=torch.int64)
LPS = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[[1]]], LPS, 4), "token_ids is a list, expected a torch.Tensor"),
        ((IDS, None, 4), "log_probs is a NoneType, expected a torch.Tensor"),
        ((IDS, LPS, 4, [1]), "root_tokens is a list, expected a torch.Tensor"),
    ],
)
def test_refuses_what_is_no_tensor(arguments: tuple, words: str) -> None:
    for build in (build_draft_tree, naive_build_draft_tree):
        with pytest.raises(TypeError, match=words):
            build(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((IDS[0], LPS[0], 4), "token_ids has shape (3, 4)"),
        ((IDS, LPS[:1], 4), "log_probs has shape (1, 3, 4)"),
        ((IDS[:, :0], LPS[:, :0], 4), "depth (token_ids.shape[1]) is 0"),
        ((IDS.repeat(1, 11, 1), LPS.repeat(1, 11, 1), 4), "is 33, expected an int in 1..31"),
        ((IDS.repeat(1, 1, 5), LPS.repeat(1, 1, 5), 4), "is 20, expected an int in 1..16"),
        ((IDS, LPS, 0), "num_nodes is 0"),
        ((IDS, LPS, 129), "num_nodes is 129"),
        ((IDS, LPS, 4.0), "num_nodes is 4.0"),
        ((IDS, LPS, True), "num_nodes is True"),
        ((IDS, LPS.double(), 4), "log_probs has dtype torch.float64"),
        ((IDS.float(), LPS, 4), "token_ids has dtype torch.float32"),
        ((IDS, LPS, 4, torch.zeros(3, dtype=torch.int64)), "root_tokens has shape (3,)"),
        ((IDS, LPS, 4, torch.zeros(2)), "root_tokens has dtype torch.float32"),
        ((IDS.to("meta"), LPS, 4), "token_ids is on meta"),
    ],
)
def test_refuses(arguments: tuple, words: str) -> None:
    for build in (build_draft_tree, naive_build_draft_tree):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are matched below
            build(*arguments)
        assert words in str(error.value)
        assert "\n" not in str(error.value)
