"""Prompts whose greedy text cannot hinge on rounding, and what a server must answer to them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models
from reference import CACHE, Greedy, greedy

# Logits; fp32 noise between two exact implementations is below 1e-4, but for rare tokens at which a hybrid model
# normalises almost nothing.
MARGIN = {"dense": 1e-3, "llama": 1e-3, "hybrid": 2e-3}
SHARED_PREFIX = 130


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    answer: list[int]  # transformers' greedy continuation

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Pair:
    """A tiny target and drafter on disk, and reference texts."""

    target: Path
    drafter: Path
    cases: list[Case]

    @property
    def truths(self) -> list[list[int]]:
        return [case.text for case in self.cases]


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def model(kind: str) -> Path:
    """The tiny target ``dense``, ``hybrid`` or ``llama``, made once and kept in the cache folder."""
    home = CACHE / "models" / kind
    if not (home / "config.json").exists():
        {"dense": models.make_dense, "hybrid": models.make_hybrid, "llama": models.make_llama}[kind](home)
    return home


def drafter(kind: str, block_size: int) -> Path:
    home = CACHE / "models" / f"{kind}-drafter-{block_size}"
    if not (home / "config.json").exists():
        models.make_drafter(home, model(kind), block_size=block_size)
    return home


def _lengths(count: int) -> list[int]:
    # Short, odd, past 64-token chunks and past pages; no two alike.
    return [1, 2, 5, 9, 16, 17, 33, 47, 63, 64, 65, 70, 97, 128, 150, 201, 3, 29, 80, 111, 140, 190,
            4, 12, 21, 40, 55, 90, 105, 120][:count]  # fmt: skip


def pair(kind: str, *, block_size: int = 8, count: int = 16, new_tokens: int = 64, shared: int = 0) -> Pair:
    """``count`` cases of different lengths, and ``shared`` more that begin with one long common prefix."""
    candidates = [random_ids(n, 100 + n) for n in _lengths(count + 12)]
    common = random_ids(SHARED_PREFIX, 999)
    tails = [common + random_ids(9 + i, 1000 + i) for i in range(shared + 4 if shared else 0)]
    texts = greedy(model(kind), candidates + tails, new_tokens)
    picked = _firm(kind, candidates, texts, count) + _firm(kind, tails, texts[len(candidates) :], shared)
    return Pair(model(kind), drafter(kind, block_size), picked)


def limited_cases(kind: str, context: int, count: int) -> list[Case]:
    """``count`` cases whose texts fill the context: prompts from half of it to almost all of it."""
    lengths = [context // 2 + (7 * i) % (context // 2 - 3) for i in range(count + 12)]
    prompts = [random_ids(n, 3000 + n) for n in lengths]
    texts = greedy(model(kind), prompts, context - context // 2)
    return _firm(kind, prompts, texts, count)


def _firm(kind: str, prompts: list[list[int]], texts: list[Greedy], count: int) -> list[Case]:
    firm = [Case(p, list(t.tokens)) for p, t in zip(prompts, texts, strict=False) if t.margin > MARGIN[kind]]
    assert len(firm) >= count, f"only {len(firm)} of {len(prompts)} prompts have a margin above {MARGIN[kind]}"
    return firm[:count]
