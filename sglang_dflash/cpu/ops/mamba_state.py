"""Copies between GDN state pools: verify snapshots to live slots, live slots to tracked slots.

Pools are `[layers, slots, ...]`; snapshots `[layers, rows, steps, ...]`. A negative index drops the entry.
"""

from __future__ import annotations

import torch


def scatter_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """`dst[:, dst_indices[i]] = src[:, row i, step_indices[i]]` wherever both indices are >= 0.

    Index tensors: int `[n]`; rows are `src_indices_raw`, or 0..n-1. Twin of
    `fused_mamba_state_scatter_with_mask` and `fused_conv_window_scatter_with_mask`
    (`kernels/ops/mamba/mamba_state_scatter_triton.py`).
    """
    rows = torch.arange(step_indices_raw.shape[0]) if src_indices_raw is None else src_indices_raw
    keep = (step_indices_raw >= 0) & (dst_indices_raw >= 0) & (rows >= 0)
    row, step, slot = rows[keep].long(), step_indices_raw[keep].long(), dst_indices_raw[keep].long()
    dst[:, slot] = src[:, row, step].to(dst.dtype)


def track_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the live state of every masked request to its tracked slot, in both pools and all layers.

    `cache_indices`, `mamba_track_indices`: int `[>= batch_size]`, `mamba_track_mask`: bool likewise. Twin of
    `track_mamba_states_all_layers`; negative slots are always dropped, so `check_freed_slots` changes
    nothing.
    """
    source, target = cache_indices[:batch_size].long(), mamba_track_indices[:batch_size].long()
    keep = mamba_track_mask[:batch_size].bool() & (source >= 0) & (target >= 0)
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target[keep]] = pool[:, source[keep]]


def track_one_layer(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """:func:`track_all_layers` for the pools `[slots, ...]` of one layer; twin of
    `track_mamba_states_if_needed`."""
    track_all_layers(
        conv_states.unsqueeze(0),
        ssm_states.unsqueeze(0),
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
    )
