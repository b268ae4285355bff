"""Independent references for the tree tests: brute force over every prefix, a heap, and plain-python walks.

They share no code with `sglang_dflash.tree`: prefixes are tuples of ranks, scores numpy float32.
"""

from __future__ import annotations

import functools
import heapq
import itertools

import numpy as np
import torch
from torch import Tensor

from sglang_dflash.tree import DraftTree

Prefix = tuple[int, ...]


def cleaned(log_probs: Tensor) -> np.ndarray:
    """[D, K] float32 with the documented reading of odd values: NaN impossible, above 0 counts as 0."""
    values = log_probs.numpy().copy()
    values[np.isnan(values)] = -np.inf
    values[values > 0] = 0
    return values


def score(prefix: Prefix, log_probs: np.ndarray) -> np.float32:
    total = np.float32(0)
    with np.errstate(over="ignore"):  # a sum below the fp32 range is -inf: impossible
        for depth, rank in enumerate(prefix):
            total = np.float32(total + log_probs[depth, rank])
    return total


def brute_force(log_probs: Tensor, num_nodes: int) -> list[Prefix]:
    """The tree's prefixes in row order, for one request [D, K] already sorted: sort every prefix there is."""
    values = cleaned(log_probs)
    depth, width = values.shape
    scores = {
        prefix: score(prefix, values)
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(width), repeat=length)
    }
    scores[()] = np.float32(0)

    @functools.cache
    def compare(a: Prefix, b: Prefix) -> int:
        if a == b:
            return 0
        if scores[a] != scores[b]:
            return -1 if scores[a] > scores[b] else 1
        if len(a) != len(b):
            return len(a) - len(b)
        return compare(a[:-1], b[:-1]) or a[-1] - b[-1]

    possible = [prefix for prefix in scores if prefix and scores[prefix] > -np.inf]
    return sorted(possible, key=functools.cmp_to_key(compare))[:num_nodes]


def heap_order(log_probs: Tensor, num_nodes: int) -> list[Prefix]:
    """As `brute_force`, with an eager heap: a pop pushes all of its children."""
    values = cleaned(log_probs)
    depth, width = values.shape
    heap: list[tuple[float, int, int, int, Prefix]] = []

    def push_children(parent: Prefix, row: int) -> None:
        if len(parent) == depth:
            return
        for rank in range(width):
            total = score((*parent, rank), values)
            if total > -np.inf:
                heapq.heappush(heap, (-float(total), len(parent) + 1, row, rank, (*parent, rank)))

    push_children((), 0)
    rows: list[Prefix] = []
    while heap and len(rows) < num_nodes:
        rows.append(heapq.heappop(heap)[-1])
        push_children(rows[-1], len(rows))
    return rows


def assert_tree_is(tree: DraftTree, b: int, prefixes: list[Prefix], token_ids: Tensor, root: int) -> None:
    """Every field of request `b` follows from the list of prefixes; token_ids: [D, K], sorted."""
    q = tree.num_nodes + 1
    row_of = {prefix: row for row, prefix in enumerate([(), *prefixes])}
    tokens, parents, depths = [root] + [0] * (q - 1), [-1] * q, [0] * q
    sees = [{row} for row in range(q)]
    children: dict[int, list[int]] = {}
    for prefix, row in row_of.items():
        if not prefix:
            continue
        tokens[row] = int(token_ids[len(prefix) - 1, prefix[-1]])
        parents[row] = row_of[prefix[:-1]]
        depths[row] = len(prefix)
        sees[row] = {row_of[prefix[:length]] for length in range(len(prefix) + 1)}
        children.setdefault(parents[row], []).append(row)
    first, sibling = [-1] * q, [-1] * q
    for parent, brothers in children.items():
        assert brothers == sorted(brothers, key=lambda row: [*row_of][row][-1])
        first[parent] = brothers[0]
        for left, right in itertools.pairwise(brothers):
            sibling[left] = right
    assert tree.tokens[b].tolist() == tokens
    assert tree.parents[b].tolist() == parents
    assert tree.depths[b].tolist() == depths
    assert tree.next_token[b].tolist() == first
    assert tree.next_sibling[b].tolist() == sibling
    assert [set(row.nonzero().flatten().tolist()) for row in tree.mask()[b]] == sees
    assert bool(tree.is_chain[b]) == all(parents[row] == row - 1 for row in range(1, len(prefixes) + 1))


def random_candidates(
    bs: int, depth: int, width: int, seed: int, levels: int | None = None, dead: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sorted (token_ids, log_probs); `levels` distinct log-probs make ties, a share `dead` is -inf."""
    generator = torch.Generator().manual_seed(seed)
    shape = (bs, depth, width)
    token_ids = torch.randint(0, 1000, shape, generator=generator)
    if levels is None:
        log_probs = torch.log_softmax(3 * torch.randn(*shape[:2], 50, generator=generator), -1)[..., :width]
    else:
        log_probs = -0.5 * torch.randint(0, levels, shape, generator=generator).float()
    log_probs = log_probs.masked_fill(torch.rand(shape, generator=generator) < dead, -torch.inf)
    return token_ids, log_probs.sort(dim=-1, descending=True, stable=True).values


def python_walk(tree: DraftTree, target: Tensor, b: int) -> list[int]:
    """Rows visited from the root of request `b`, following the child whose token the target chose."""
    parents, tokens = tree.parents[b].tolist(), tree.tokens[b].tolist()
    path = [0]
    while True:
        wanted = int(target[b, path[-1]])
        below = [r for r in range(1, len(parents)) if parents[r] == path[-1] and tokens[r] == wanted]
        if not below:
            return path
        path.append(below[0])


def target_tokens_for(tree: DraftTree, seed: int, hit_rate: float = 0.8) -> Tensor:
    """[bs, Q] target choices: mostly a random child of the node, else a token that no child may have."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 1000, tree.tokens.shape, generator=generator)
    for b, row in itertools.product(range(tree.batch_size), range(tree.num_nodes + 1)):
        below = (tree.parents[b] == row).nonzero().flatten()
        if len(below) and torch.rand((), generator=generator) < hit_rate:
            pick = torch.randint(0, len(below), (), generator=generator)
            target[b, row] = tree.tokens[b, below[pick]]
    return target
