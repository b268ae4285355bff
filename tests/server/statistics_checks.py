"""Do counts follow a distribution? Pearson's chi-square, and the filters of sampling by their definition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def filtered(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities ``[V]`` of float64 ``logits [V]``: scale, keep tokens among the ``top_k`` best (0: all), within
    mass ``top_p``, and at least ``min_p`` of the best, then renormalise."""
    p = torch.softmax(logits.double() / temperature, 0)
    ranked = p.sort(descending=True, stable=True)
    before = ranked.values.cumsum(0) - ranked.values
    keep = (before <= top_p) & (ranked.values >= min_p * ranked.values[0])
    if top_k:
        keep &= torch.arange(len(p)) < top_k
    kept = torch.zeros_like(p)
    kept[ranked.indices[keep]] = ranked.values[keep]
    return kept / kept.sum()


def excess(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """Pearson's statistic in standard deviations above its mean; infinite when something impossible was drawn.

    Outcomes expected fewer than 5 times form one cell. With two dozen cells a correct sampler passes 6 about once in
    10^5 runs; with few cells far more often, so fewer than 6 cells are refused.
    """
    draws = sum(counts.values())
    if any(expected.get(outcome, 0.0) == 0 for outcome in counts):
        return math.inf
    cells = [(counts.get(o, 0), p * draws) for o, p in expected.items() if p * draws >= 5]
    rest = draws - sum(mean for _, mean in cells)
    if rest > 1:
        cells.append((draws - sum(count for count, _ in cells), rest))
    freedom = len(cells) - 1
    assert freedom >= 5, "a distribution too narrow to test anything"
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return (statistic - freedom) / math.sqrt(2 * freedom)
