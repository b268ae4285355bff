"""The drafted tree in the form SGLang's attention and linear-attention backends read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sglang_dflash.config import TreeConfig


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """An irregular tree of depth < block size.

    A subclass of EAGLE's input because flashinfer and the linear-attention backends test the type.
    Its ``seq_lens_cpu`` is the prefix (EAGLE's convention), not prefix + block (DFLASH's).
    """

    @property
    def max_tree_depth(self) -> int:
        """Longest path with the root: the block size."""
        return self.spec_steps + 1

    @property
    def tree_topk(self) -> int:
        """-1: no fixed branching."""
        return -1

    @classmethod
    def of_tree(
        cls,
        tree: TreeConfig,
        *,
        tokens: torch.Tensor | None,
        positions: torch.Tensor | None,
        next_token: torch.Tensor | None,
        next_sibling: torch.Tensor | None,
        retrieve_index: torch.Tensor | None,
        mask: torch.Tensor | None,
        out_cache_loc: torch.Tensor | None = None,
        kv_loc_plan: Any = None,
    ) -> DDTreeVerifyInput:
        """``tokens``, ``positions`` ``[bs * width]`` int64; links ``[bs, width]`` int64 (-1: none);
        ``retrieve_index`` ``[bs, width]`` row numbers in the batch; ``mask`` flat, in the backend's mask mode;
        ``out_cache_loc`` ``[bs * width]`` KV slots.
        """
        return cls(
            draft_token=tokens,
            custom_mask=mask,
            positions=positions,
            retrieve_index=retrieve_index,
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
            retrieve_cum_len=None,
            spec_steps=tree.depth,
            topk=tree.topk,
            draft_token_num=tree.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            prepared_out_cache_loc=out_cache_loc,
            kv_loc_plan=kv_loc_plan,
        )

    @classmethod
    def dummy(cls, tree: TreeConfig, mask: torch.Tensor | None) -> DDTreeVerifyInput:
        """For warm-up and graph capture: a mask, so that the captured kernels read one, and no links."""
        return cls.of_tree(
            tree, tokens=None, positions=None, next_token=None, next_sibling=None, retrieve_index=None, mask=mask
        )
