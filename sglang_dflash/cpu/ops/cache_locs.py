"""Moving KV slot numbers between the request table and flat slot lists, and moving KV rows between slots.

Shapes: `bs` requests; `req_to_token` is the request table `[rows, max_context]` (int32) whose entry `[r, p]`
is the KV slot of position `p` of request row `r`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch


def _ranges(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten `[start[i], end[i])` over i: (owner i, position), both int64 `[sum of lengths]`; empty ranges
    vanish."""
    lengths = (end - start).clamp(min=0).long()
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(owner.numel()) - first[owner] + start.long()[owner]
    return owner, position


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the packed slots `out_cache_loc` `[sum(end - start)]` into `req_to_token[r, start:end]` of each
    request.

    `req_pool_indices`, `start_offset`, `end_offset`: int `[bs]`. Twin of the Triton kernel
    `assign_req_to_token_pool` (`srt/mem_cache/allocation.py`); `pool_len`, its row length, is implied by the
    table here.
    """
    owner, position = _ranges(start_offset, end_offset)
    rows = req_pool_indices.long()[owner]
    req_to_token[rows, position] = out_cache_loc[: owner.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse of :func:`assign_req_to_token_pool_cpu`: pack `req_to_token[r, start:end]` into
    `out_cache_loc`.

    Twin of the Triton kernel `assign_extend_cache_locs` (`kernels/ops/speculative/cache_locs.py`).
    """
    owner, position = _ranges(start_offset, end_offset)
    rows = req_pool_indices.long()[owner]
    out_cache_loc[: owner.numel()] = req_to_token[rows, position].to(out_cache_loc.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes, in order, to the front of `accept_out_cache_loc`.

    `accept_index`: int, any shape, node numbers into `out_cache_loc`, -1 where nothing was accepted. Twin of
    the Triton kernel `fill_accept_out_cache_loc` (`kernels/ops/speculative/eagle.py`).
    """
    flat = accept_index.reshape(-1)
    nodes = flat[flat > -1].long()
    accept_out_cache_loc[: nodes.numel()] = out_cache_loc[nodes].to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV rows `src_loc` onto rows `tgt_loc` in every buffer; all sources are read before anything is
    written.

    `data_ptrs`: uint64 `[buffers]`, the addresses of row-major buffers; `strides`: int `[buffers]`, bytes a
    row; `tgt_loc`, `src_loc`: int `[n]`, a negative slot on either side drops the pair. Twin of the Triton
    kernel `copy_all_layer_kv_cache_tiled` (`kernels/ops/kvcache/cache_move.py`).

    Hazard: works on raw addresses, so rows outside the buffer are undefined behaviour, as upstream.
    """
    keep = (tgt_loc >= 0) & (src_loc >= 0)
    target, source = tgt_loc[keep].numpy(), src_loc[keep].numpy()
    if target.size == 0:
        return
    rows = int(max(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        pointer = ctypes.cast(address & 0xFFFFFFFFFFFFFFFF, ctypes.POINTER(ctypes.c_uint8))
        buffer = np.ctypeslib.as_array(pointer, shape=(rows, row_bytes))
        buffer[target] = buffer[source]
