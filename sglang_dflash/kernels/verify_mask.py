"""Attention mask and positions for the target's verify pass, written from the trees' packed ancestor sets.

Two layouts, those of SGLang's `TreeMaskMode`, with Q = N + 1 rows a request:
- QLEN_ONLY: [bs, Q, Q], tree cells only;
- FULL_MASK: request b is a [Q, prefix_b + Q] matrix at offset sum_{j<b} Q * (prefix_j + Q), prefix columns
  first. The tree cells move as the prefixes grow, so a prefix column holds whatever an earlier step left
  there. Triton's two-stage extend kernel and FA3's cascade never look at prefix columns; FlashInfer's packer
  and Triton's one-stage kernel (used under `--enable-deterministic-inference`) do, and need `fill_prefix`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.tree import DraftTree

_ROWS = 16  # tree rows a program


def write_verify_mask(
    tree: DraftTree,
    prefix_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    *,
    full_mask: bool,
    fill_prefix: bool = False,
) -> None:
    """Write the mask cells of every tree into `mask` and prefix_len + depth into `positions`.

    prefix_lens: [bs] int32 or int64, committed tokens a request, none of them in the tree. mask: a contiguous
    bool or uint8 buffer of at least the layout's size; cells beyond it are left alone. On CUDA a FULL_MASK
    buffer's size is the caller's duty: checking it would need the lengths on the host. positions: contiguous
    int64 of exactly bs * Q. full_mask chooses the layout; fill_prefix (FULL_MASK only) also writes the prefix
    columns. No host sync and no allocation on CUDA. Raises ValueError on a wrong shape, dtype or size.
    """
    write = launch_verify_mask if tree.tokens.is_cuda else naive_write_verify_mask
    write(tree, prefix_lens, mask, positions, full_mask=full_mask, fill_prefix=fill_prefix)


def naive_write_verify_mask(
    tree: DraftTree,
    prefix_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    *,
    full_mask: bool,
    fill_prefix: bool = False,
) -> None:
    """The reference for `write_verify_mask`, in plain torch; reads the lengths on the host."""
    _validate(tree, prefix_lens, mask, positions, full_mask, fill_prefix)
    positions.view(tree.tokens.shape).copy_(tree.positions(prefix_lens))
    cells = mask.view(-1)
    q = tree.num_nodes + 1
    start = 0
    for b, sees in enumerate(tree.mask()):
        prefix = int(prefix_lens[b]) if full_mask else 0
        end = start + q * (prefix + q)
        if end > cells.numel():
            raise ValueError(f"mask has {cells.numel()} cells, expected at least {end}: allocate a larger one")
        request = cells[start:end].view(q, prefix + q)
        request[:, prefix:] = sees
        if fill_prefix:
            request[:, :prefix] = True
        start = end


def launch_verify_mask(
    tree: DraftTree,
    prefix_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    *,
    full_mask: bool,
    fill_prefix: bool = False,
) -> None:
    """`write_verify_mask` by the kernel: for CUDA tensors, or for any under Triton's interpreter."""
    _validate(tree, prefix_lens, mask, positions, full_mask, fill_prefix)
    bs, q = tree.tokens.shape
    if bs == 0:
        return
    verify_mask_kernel[(bs, triton.cdiv(q, _ROWS))](
        tree.depths,
        tree.ancestors,
        prefix_lens,
        mask.view(torch.uint8),
        positions,
        Q=q,
        ROWS=_ROWS,
        BLOCK_Q=triton.next_power_of_2(q),
        LEN_BLOCKS=triton.cdiv(bs, 256),
        FULL_MASK=full_mask,
        FILL_PREFIX=fill_prefix,
        num_warps=4,
    )


def _validate(
    tree: DraftTree, prefix_lens: Tensor, mask: Tensor, positions: Tensor, full_mask: bool, fill_prefix: bool
) -> None:
    bs, q = tree.tokens.shape
    if prefix_lens.shape != (bs,) or prefix_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"prefix_lens is {prefix_lens.dtype} of shape {tuple(prefix_lens.shape)}, expected int32 or "
            f"int64 of shape ({bs},): pass one length a tree"
        )
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool or uint8: allocate it as one of these")
    if positions.dtype != torch.int64 or positions.numel() != bs * q:
        raise ValueError(
            f"positions has {positions.numel()} elements of {positions.dtype}, expected {bs * q} of "
            "torch.int64: slice the buffer to bs * Q"
        )
    if not full_mask and mask.numel() < bs * q * q:
        raise ValueError(f"mask has {mask.numel()} cells, expected at least {bs * q * q}: allocate a larger one")
    if fill_prefix and not full_mask:
        raise ValueError("fill_prefix is True, expected False: a mask without prefix columns has none to fill")
    for name, tensor in (
        ("prefix_lens", prefix_lens),
        ("mask", mask),
        ("positions", positions),
        ("tree.depths", tree.depths),
        ("tree.ancestors", tree.ancestors),
    ):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous: call .contiguous() on it")
        if tensor.device != tree.tokens.device:
            raise ValueError(f"{name} is on {tensor.device}, expected tree's {tree.tokens.device}: move it there")


@triton.jit
def verify_mask_kernel(  # type: ignore[no-untyped-def]
    p_depths,  # [bs, Q] int64
    p_ancestors,  # [bs, Q, 2] int64
    p_prefix_lens,  # [bs] int32 or int64
    p_mask,  # out, uint8 cells
    p_positions,  # out [bs, Q] int64
    Q: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    LEN_BLOCKS: tl.constexpr,  # blocks of 256 that cover prefix_lens
    FULL_MASK: tl.constexpr,
    FILL_PREFIX: tl.constexpr,
):
    i_b = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_Q)
    in_rows = rows < Q
    o_rows = i_b.to(tl.int64) * Q + rows
    prefix = tl.load(p_prefix_lens + i_b).to(tl.int64)

    depth = tl.load(p_depths + o_rows, mask=in_rows, other=0)
    tl.store(p_positions + o_rows, prefix + depth, mask=in_rows)

    low = tl.load(p_ancestors + o_rows * 2, mask=in_rows, other=0)
    high = tl.load(p_ancestors + o_rows * 2 + 1, mask=in_rows, other=0)
    word = tl.where(cols[None, :] <= 64, low[:, None], high[:, None])
    bit = ((cols - 1) & 63).to(tl.int64)
    sees_node = ((word >> bit[None, :]) & 1) != 0
    sees_root = (rows == 0) | (depth > 0)  # not so in unused rows
    sees = tl.where(cols[None, :] == 0, sees_root[:, None], sees_node)

    p_request = p_mask + i_b.to(tl.int64) * (Q * Q)
    stride = tl.full((), Q, dtype=tl.int64)
    if FULL_MASK:
        others = tl.arange(0, 256)
        before = tl.zeros([256], dtype=tl.int64)
        for block in range(LEN_BLOCKS):
            index = block * 256 + others
            before += tl.load(p_prefix_lens + index, mask=index < i_b, other=0).to(tl.int64)
        p_request += tl.sum(before, axis=0) * Q
        stride += prefix
        if FILL_PREFIX:
            p_rows = p_request + rows[:, None] * stride
            ones = tl.full([ROWS, 256], 1, dtype=tl.uint8)
            start = tl.full((), 0, dtype=tl.int64)
            while start < prefix:
                index = start + others
                tl.store(p_rows + index[None, :], ones, mask=in_rows[:, None] & (index < prefix)[None, :])
                start += 256
        p_request += prefix
    p_cells = p_request + rows[:, None] * stride + cols[None, :]
    tl.store(p_cells, sees.to(tl.uint8), mask=in_rows[:, None] & (cols < Q)[None, :])
