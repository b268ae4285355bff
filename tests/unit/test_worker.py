"""What the tree worker decides on the host: chains need no mask, and a decode batch is never upstream's."""

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

from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode  # noqa: E402
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2  # noqa: E402

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


@pytest.mark.parametrize("state", [None, SimpleNamespace()])
def test_a_decode_batch_without_our_state_is_an_error(worker: Any, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never falls to upstream's decode, which would serve the chain without a word."""
    monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", lambda *_: "upstream's")
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, spec_info=state)
    with pytest.raises(RuntimeError, match=rf"found {type(state).__name__} as state, want DFlashDraftInputV2"):
        worker.forward_batch_generation(batch)
    for prefill, idle, mixed in ((True, False, False), (False, True, False), (False, False, True)):
        batch.forward_mode = SimpleNamespace(is_extend=lambda value=prefill: value, is_idle=lambda value=idle: value)
        batch.is_extend_in_batch = mixed
        assert worker.forward_batch_generation(batch) == "upstream's"
