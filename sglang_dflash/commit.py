"""Make the accepted path permanent: recurrent state, target KV, and the drafter's KV.

The order matters. Logprobs and the recurrent state are read before anything moves; the new lengths
are published before the copies, so that the next step's scheduling overlaps them.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.speculative.spec_utils import (
    commit_mamba_states_after_verify,
    move_accept_tokens_to_target_kvcache,
)
from torch import Tensor

from sglang_dflash.kernels.accept_walk import AcceptedPaths
from sglang_dflash.kernels.compact_kv import KVRows, compact_kv

logger = logging.getLogger(__name__)


def commit_recurrent_state(target_worker: Any, batch: Any, accepted: AcceptedPaths, width: int) -> None:
    """Copy the last accepted node's snapshot (and a tracked length's, for the radix cache) into the pool.

    Never the chain's ``_update_target_mamba_state_after_verify``: it takes step ``accept_len - 1``, which in
    a tree is some other node, and fails only as wrong text.
    """
    commit_mamba_states_after_verify(target_worker, batch, accepted.accept_lens, accepted.accept_index, width)


@cache
def kv_rows(pool: Any) -> KVRows | None:
    """``pool``'s buffers when the compaction kernel may move their rows, None when SGLang must. Logs which.

    Ours are the plain ``MHATokenToKVPool``, one contiguous row a slot (bf16, fp32 and per-layer-scaled fp8),
    and the hybrid pool around one. Its subclasses and siblings keep block scales, pages, shards or a second
    id space.
    """
    main = pool.full_kv_pool if type(pool) is HybridLinearKVPool else pool
    name = f"{type(pool).__name__} of {type(main).__name__}" if main is not pool else type(pool).__name__
    reason = _reason_for_upstream(main)
    if reason is None:
        try:
            rows = KVRows.of((*main.k_buffer, *main.v_buffer))
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        logger.info("DDTree KV compaction: SGLang's move_kv_cache (%s: %s).", name, reason)
        return None
    ours = "own kernel" if rows.addresses.is_cuda else "own torch code"
    logger.info("DDTree KV compaction: %s, %d buffers (%s).", ours, len(rows.buffers), name)
    return rows


def _reason_for_upstream(pool: Any) -> str | None:
    if type(pool) is not MHATokenToKVPool:
        return "not the plain pool"
    if pool.use_native_move_kv_cache:
        return "SGLANG_NATIVE_MOVE_KV_CACHE is set"
    if pool.kv_cache_layout != "nhd":
        return f"layout {pool.kv_cache_layout}"
    if pool.is_quantized_kv_cache:
        return f"quantized by {pool.quant_method.name}"
    if pool.layer_num == 0:
        return "no layers"
    return None


def compact_target_kv(batch: Any, accepted: AcceptedPaths, allocator: Any) -> None:
    """Move the accepted nodes' KV to the front of the request's window, where a chain would have written it.

    ``batch.out_cache_loc`` is the window the verify wrote, in the target pool's own slot ids. It is read
    instead of ``req_to_token``, whose row may already belong to another request.
    """
    if not accepted.accept_index.is_cuda and follows_window(accepted, batch.out_cache_loc.numel()):
        return
    rows = kv_rows(allocator.get_kvcache())
    if rows is not None:
        compact_kv(rows, batch.out_cache_loc, accepted.accept_index, accepted.accept_lens)
    else:
        move_accept_tokens_to_target_kvcache(batch, accepted.accept_index, accepted.accept_lens - 1, allocator)


def follows_window(accepted: AcceptedPaths, window_rows: int) -> bool:
    """Whether every path is rows 0, 1, 2, ... of its request's window, so that nothing has to move. Syncs.

    ``window_rows`` is bs * width.
    """
    bs, block = accepted.accept_index.shape
    index = accepted.accept_index
    column = torch.arange(block, device=index.device)
    first = torch.arange(bs, device=index.device).unsqueeze(1) * (window_rows // max(bs, 1))
    return bool(((index == first + column) | (column >= accepted.accept_lens.unsqueeze(1))).all())


def compact_hidden(hidden: Tensor, accepted: AcceptedPaths) -> Tensor:
    """Context features of the accepted path, ``[bs * width, F]`` -> ``[bs * B, F]``.

    Rows past a request's accepted length are row 0's and must not be written anywhere.
    """
    rows = accepted.accept_index.clamp(min=0).view(-1).long()
    return hidden.index_select(0, rows)
