"""Trees grown outside a graph are the graph's own trees, and leave its buffers alone."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.config import TreeConfig
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang_dflash.draft import TreeSampler  # noqa: E402

TREE = TreeConfig(block_size=4, topk=3, budget=6)
VOCAB = 32


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> TreeSampler:
    """Candidates are those of ``hidden`` read as logits."""
    made = TreeSampler(TREE, lm_head=None, tp_sync=SimpleNamespace(), max_bs=2, device="cpu")

    def candidates(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = hidden.view(-1, TREE.block_size, VOCAB)[:, 1:].log_softmax(-1).topk(TREE.topk)
        return best.indices, best.values

    monkeypatch.setattr(made, "candidates", candidates)
    return made


def block(bs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(bs * TREE.block_size, VOCAB, generator=generator)
    return hidden, torch.arange(bs * TREE.block_size) + 100 * seed


def copy(buffers: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in vars(buffers).items()}


@pytest.mark.parametrize("bs", [1, 2, 5])
def test_grow_leaves_the_captured_buffers_alone(sampler: TreeSampler, bs: int) -> None:
    sampler(*block(2, seed=1))  # as the tail of a graph
    captured, before = sampler.buffers, copy(sampler.buffers)
    addresses = {name: value.data_ptr() for name, value in vars(captured).items()}
    tree = sampler.grow(*block(bs, seed=2))
    assert tree.tokens.shape == (bs, TREE.width)
    assert tree.tokens[:, 0].tolist() == [200 + TREE.block_size * i for i in range(bs)]
    assert sampler.buffers is captured
    for name, value in vars(captured).items():
        assert value.data_ptr() == addresses[name]
        assert torch.equal(value, before[name])
        assert getattr(tree, name).data_ptr() != addresses[name]


def test_grow_and_the_graph_make_the_same_trees(sampler: TreeSampler) -> None:
    hidden, ids = block(2, seed=3)
    tree = sampler.grow(hidden, ids)
    sampler(hidden, ids)
    graph = sampler.buffers.view(2)
    for name, value in asdict(graph).items():
        assert torch.equal(value, getattr(tree, name))
