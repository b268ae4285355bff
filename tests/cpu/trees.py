"""Random draft trees, written without the code under test."""

from __future__ import annotations

from itertools import pairwise

import torch


def random_parents(batch: int, nodes: int, seed: int) -> torch.Tensor:
    """int32 `[batch, nodes]`; entry 0 is 0, every other parent is any earlier node."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[0] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)] for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.int32)


def links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling, int32 `[batch, nodes]`, -1 = none."""
    child, sibling = torch.full_like(parents, -1), torch.full_like(parents, -1)
    for b, row in enumerate(parents.tolist()):
        for node in range(len(row)):
            children = [c for c in range(1, len(row)) if row[c] == node]
            if children:
                child[b, node] = children[0]
            for left, right in pairwise(children):
                sibling[b, left] = right
    return child, sibling


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def ancestors_mask(parents: torch.Tensor) -> torch.Tensor:
    """bool `[batch, nodes, nodes]`: j is i or an ancestor of i."""
    mask = torch.zeros(*parents.shape, parents.shape[1], dtype=torch.bool)
    for b, row in enumerate(parents.tolist()):
        for node in range(len(row)):
            mask[b, node, path_to(row, node)] = True
    return mask
