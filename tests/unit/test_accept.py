"""Tokens at the nodes are drawn in pieces of bounded size, and the pieces change nothing."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang_dflash import accept  # noqa: E402

REQUESTS, WIDTH, VOCAB = 3, 5, 64


def sampling_info(seeded: bool, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """Every request another temperature, seed, top-k and top-p, so that a wrong row shows."""
    return SimpleNamespace(
        is_all_greedy=False,
        sampling_seed=torch.arange(REQUESTS) + 40 if seeded else None,
        temperatures=torch.linspace(0.5, 3, REQUESTS).unsqueeze(1),
        top_ks=torch.linspace(top_k, max(1, top_k // 4), REQUESTS).int() if top_k else torch.full((REQUESTS,), 1 << 30),
        top_ps=torch.linspace(top_p, top_p / 2, REQUESTS) if top_p < 1 else torch.ones(REQUESTS),
        min_ps=torch.full((REQUESTS,), min_p),
        need_top_k_sampling=top_k > 0,
        need_top_p_sampling=top_p < 1,
        need_min_p_sampling=min_p > 0,
        max_top_k=top_k or None,
    )


def draw(info: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(REQUESTS * WIDTH, VOCAB, generator=generator)
    positions = torch.randint(0, 1000, (REQUESTS * WIDTH,), generator=generator)
    return accept.sample_target_tokens(logits, info, WIDTH, positions)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.95}], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 14])
def test_pieces_give_the_tokens_of_one_piece(filters: dict, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``rows`` a piece: fewer than one row's cells too, and pieces that cross requests."""
    whole = draw(sampling_info(True, **filters))
    assert whole.dtype == torch.int64
    assert len(set(whole.tolist())) > 5
    monkeypatch.setattr(accept, "_SAMPLED_CELLS", rows * VOCAB + VOCAB // 2)
    calls = []
    for name in ("sampling_from_probs_torch", "top_k_top_p_min_p_sampling_from_probs_torch"):
        original = getattr(accept, name)

        def counted(probs: torch.Tensor, *rest: Any, original: Any = original, **options: Any) -> torch.Tensor:
            calls.append(len(probs))
            return original(probs, *rest, **options)

        monkeypatch.setattr(accept, name, counted)
    assert torch.equal(draw(sampling_info(True, **filters)), whole)
    assert sum(calls) == REQUESTS * WIDTH
    assert max(calls) == max(1, rows)


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "min_p": 0.5}], ids=str
)
def test_the_filters_reach_every_piece(filters: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that leave one token make sampling greedy, without a seed too."""
    greedy = draw(SimpleNamespace(is_all_greedy=True))
    monkeypatch.setattr(accept, "_SAMPLED_CELLS", 4 * VOCAB)
    assert torch.equal(draw(sampling_info(False, **filters)), greedy)
    assert torch.equal(draw(None), greedy)


def test_min_p_is_that_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last request's leaves one token."""
    torch.manual_seed(3)
    greedy, info = draw(None).view(REQUESTS, WIDTH), sampling_info(False, min_p=1.0)
    info.min_ps[:-1] = 0.0
    monkeypatch.setattr(accept, "_SAMPLED_CELLS", 4 * VOCAB)
    same = draw(info).view(REQUESTS, WIDTH) == greedy
    assert same[-1].all()
    assert not same[0].all()
    assert not same[1].all()
