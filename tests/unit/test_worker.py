"""What the tree worker decides on the host: a batch of chains is verified without a mask."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.config import TreeConfig
from sglang_dflash.cpu import stand_in
from sglang_dflash.tree import DraftTree, build_draft_tree

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402

from sglang_dflash.worker import DDTreeWorker  # noqa: E402

DEPTH, TOPK, BUDGET = 4, 2, 4


def trees(*first: float) -> DraftTree:
    """One tree a request; its first candidates have this log-prob at every depth, its second ones -1.5."""
    log_probs = torch.tensor([[[p, -1.5]] * DEPTH for p in first])
    token_ids = torch.arange(log_probs.numel()).view(log_probs.shape)
    return build_draft_tree(token_ids, log_probs, BUDGET, torch.zeros(len(first), dtype=torch.int64))


@pytest.fixture
def worker() -> Any:
    made = object.__new__(DDTreeWorker)
    made.tree = TreeConfig(block_size=DEPTH + 1, topk=TOPK, budget=BUDGET)
    made.mask_mode = TreeMaskMode.QLEN_ONLY
    made.device = "cpu"
    made._reads_prefix_mask = True
    made.model_runner = SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=None))
    return made


@pytest.mark.parametrize(("first", "masked"), [((-0.1, -0.1), False), ((-0.1, -1.0), True), ((-1.0,), True)])
def test_chains_need_no_mask(worker: Any, first: tuple[float, ...], masked: bool) -> None:
    tree = trees(*first)
    assert tree.is_chain.tolist() == [p == -0.1 for p in first]
    prefix = torch.arange(len(first)) + 7
    mask, positions = worker._mask_and_positions(SimpleNamespace(batch_size=len(first), prefix_lens=prefix), tree)
    assert (mask is not None) == masked
    assert torch.equal(positions, prefix.view(-1, 1) + tree.depths)
    if masked:
        assert torch.equal(mask.view(tree.mask().shape), tree.mask())
    else:
        assert torch.equal(positions, prefix.view(-1, 1) + torch.arange(BUDGET + 1))
