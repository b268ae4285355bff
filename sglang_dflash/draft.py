"""The draft half of a step: one block through the drafter, top-K a depth, and the tree grown from it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from sglang_dflash.config import TreeConfig
from sglang_dflash.kernels.build_tree import TreeBuffers, build_tree_into
from sglang_dflash.tree import DraftTree


class TreeSampler:
    """Top-K candidates and the tree, from the drafter's hidden states.

    Runs as the tail of the draft CUDA graph (``capture_tail_hooks``), so it allocates only through the
    graph's pool, never synchronises, and leaves its result in static buffers; without a graph it is
    called directly.
    """

    def __init__(
        self, config: TreeConfig, *, lm_head: Any, tp_sync: SpecTpSync, max_bs: int, device: torch.device | str
    ):
        self.config = config
        self.lm_head = lm_head
        self.tp_sync = tp_sync
        self.buffers = TreeBuffers.allocate(max_bs, config.budget, device)

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden [bs * B, H]`` -> token ids and log-probs ``[bs, B - 1, K]``, best first.

        Slot 0 is the anchor and proposes nothing. Log-probs are over the whole vocabulary, the
        temperature is 1 (the score of arXiv 2604.12989), and every tensor-parallel rank gets the same.
        """
        block, topk = self.config.block_size, self.config.topk
        rows = hidden.view(-1, block, hidden.shape[-1])[:, 1:].reshape(-1, hidden.shape[-1])
        ids, values, log_partition = candidate_topk(rows, self.lm_head, topk, with_partition=True)
        log_probs = values.float() - log_partition.float().unsqueeze(-1)
        # Ranks that grew different trees would wait for each other forever, or corrupt their caches.
        ids = self.tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, ids)
        log_probs = self.tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, log_probs)
        shape = (-1, self.config.depth, topk)
        return ids.view(shape), log_probs.view(shape)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> None:
        """``hidden [bs * B, H]``, ``input_ids [bs * B]`` (slot 0 of a block is its anchor): fill the buffers."""
        self._grow_into(self.buffers, hidden, input_ids)

    def _grow_into(self, buffers: TreeBuffers, hidden: Tensor, input_ids: Tensor) -> None:
        ids, log_probs = self.candidates(hidden)
        roots = input_ids.view(-1, self.config.block_size)[:, 0].contiguous()
        build_tree_into(ids, log_probs, roots, buffers, self.config.budget)

    def grow(self, hidden: Tensor, input_ids: Tensor) -> DraftTree:
        """The same outside a graph, for any batch size; a captured graph's buffers stay its own."""
        bs = input_ids.numel() // self.config.block_size
        buffers = TreeBuffers.allocate(bs, self.config.budget, input_ids.device)
        self._grow_into(buffers, hidden, input_ids)
        return buffers.view(bs)


def draft_forward_batch(
    *,
    batch: Any,
    block_ids: Tensor,
    embeddings: Tensor,
    positions: Tensor,
    seq_lens_cpu: Tensor,
    spec_info: Any,
) -> ForwardBatch:
    """The drafter's forward over ``block_ids [bs, B]``: a non-causal block after the committed prefix.

    ``embeddings [bs * B, H]`` and ``positions [bs, B]`` belong to the block; ``seq_lens_cpu [bs]`` is an upper
    bound of prefix + B for host planning. KV slots are bound by the caller's plan. As upstream's
    ``DFlashWorkerV2.forward_batch_generation``, step 1.
    """
    bs, block = block_ids.shape
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=block_ids.reshape(-1),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=None,
        seq_lens_sum=int(seq_lens_cpu.sum()),
        seq_lens_cpu=seq_lens_cpu,
        positions=positions.reshape(-1),
        input_embeds=embeddings,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), bs * block, dtype=torch.int32, device=block_ids.device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=bs * block,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
