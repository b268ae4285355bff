"""KV compaction: move the accepted path's rows to the front of the request's window, in place.

Verify wrote node t of request b to slot `slots[b * Q + t]`; the cache wants the j-th row of the accepted path
in the j-th slot of the window. A path enters ever greater rows, so row j comes from a row >= j: walking j
upward, a row is always read before it is overwritten. A path that is a chain moves nothing.

SGLang's own move (`copy_all_layer_kv_cache_tiled`) copies every row of every path through dense slot lists,
moved or not, and shares the rows of one byte range among warps that no barrier orders. Here one program owns
a byte range and walks the path, so that the order above holds thread by thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # bytes: what one thread moves at a time
_WORDS = 256  # 8-byte words a program: 2 a thread of 4 warps


@dataclass(frozen=True, eq=False)
class KVRows:
    """Buffers of one KV pool that hold a slot's bytes side by side: K and V of every layer."""

    buffers: tuple[Tensor, ...]  # each [slots, ...] contiguous, any dtype; keeps the addresses below alive
    addresses: Tensor  # [n] int64
    row_words: Tensor  # [n] int64; 8-byte words a slot
    widest: int  # the greatest of row_words

    @classmethod
    def of(cls, buffers: Sequence[Tensor]) -> KVRows:
        """Raises ValueError when a buffer is not contiguous, not aligned, or not on the others' device."""
        if not buffers:
            raise ValueError("buffers is empty, expected K and V of at least one layer: pass the pool's buffers")
        device, words = buffers[0].device, []
        for number, buffer in enumerate(buffers):
            row_bytes = buffer[:1].numel() * buffer.element_size()
            if not buffer.is_contiguous():
                raise ValueError(
                    f"buffers[{number}] has strides {buffer.stride()} for shape {tuple(buffer.shape)}, "
                    "expected contiguous: leave pools of another layout to SGLang"
                )
            if row_bytes % ALIGNMENT or buffer.data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"buffers[{number}] has rows of {row_bytes} bytes at address {buffer.data_ptr()}, "
                    f"expected multiples of {ALIGNMENT}: leave such pools to SGLang"
                )
            if buffer.device != device:
                raise ValueError(f"buffers[{number}] is on {buffer.device}, expected {device}: move it there")
            words.append(row_bytes // 8)
        return cls(
            buffers=tuple(buffers),
            addresses=torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device),
            row_words=torch.tensor(words, dtype=torch.int64, device=device),
            widest=max(words),
        )


def compact_kv(rows: KVRows, slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
    """Copy slot `slots[accept_index[b, j]]` to `slots[b * Q + j]` for j < accept_lens[b], in all buffers.

    slots: [bs * Q] int64, the window the verify wrote, in any order; no slot twice. accept_index: [bs, B]
    int32 and accept_lens: [bs] int32, as `accept_walk` leaves them: increasing rows, the root first. Rows
    already in place are not touched. No host sync and no allocation on CUDA. Raises ValueError on a wrong
    shape, dtype or device.
    """
    move = launch_compact_kv if slots.is_cuda else naive_compact_kv
    move(rows, slots, accept_index, accept_lens)


def naive_compact_kv(rows: KVRows, slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
    """The reference for `compact_kv` in plain torch: reads everything, then writes; syncs with the host."""
    q = _validate(rows, slots, accept_index, accept_lens)
    bs, block = accept_index.shape
    column = torch.arange(block, device=slots.device)
    target = torch.arange(bs, device=slots.device).unsqueeze(1) * q + column
    moved = (column < accept_lens.unsqueeze(1)) & (accept_index != target)
    source_slots, target_slots = slots[accept_index[moved].long()], slots[target[moved]]
    for buffer in rows.buffers:
        # As bytes: indexing is not implemented for every storage dtype.
        as_bytes = buffer.view(torch.uint8)
        as_bytes[target_slots] = as_bytes[source_slots]


def launch_compact_kv(rows: KVRows, slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
    """`compact_kv` by the kernel: for CUDA tensors, or for any under Triton's interpreter."""
    q = _validate(rows, slots, accept_index, accept_lens)
    bs, block = accept_index.shape
    if bs == 0:
        return
    compact_kv_kernel[(bs, len(rows.buffers), triton.cdiv(rows.widest, _WORDS))](
        rows.addresses,
        rows.row_words,
        slots,
        accept_index,
        accept_lens,
        Q=q,
        B=block,
        WORDS=_WORDS,
        num_warps=4,
    )


def _validate(rows: KVRows, slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> int:
    """Q, the rows a request brought to the verify pass."""
    if accept_index.ndim != 2 or accept_index.dtype != torch.int32:
        raise ValueError(
            f"accept_index is {accept_index.dtype} of shape {tuple(accept_index.shape)}, expected "
            "torch.int32 of shape [bs, B]: pass what accept_walk wrote"
        )
    bs, block = accept_index.shape
    if accept_lens.shape != (bs,) or accept_lens.dtype != torch.int32:
        raise ValueError(
            f"accept_lens is {accept_lens.dtype} of shape {tuple(accept_lens.shape)}, expected torch.int32 "
            f"of shape ({bs},): pass what accept_walk wrote"
        )
    q = slots.numel() // bs if bs else block
    if slots.dtype != torch.int64 or slots.shape != (bs * q,) or q < block:
        raise ValueError(
            f"slots is {slots.dtype} of shape {tuple(slots.shape)}, expected torch.int64 of shape [{bs} * Q] "
            f"with Q >= {block}: pass the window the verify pass wrote"
        )
    for name, tensor in (("slots", slots), ("accept_index", accept_index), ("accept_lens", accept_lens)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous: call .contiguous() on it")
        if tensor.device != rows.addresses.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {rows.addresses.device}: move it there")
    return q


@triton.jit
def compact_kv_kernel(  # type: ignore[no-untyped-def]
    p_addresses,  # [n] int64
    p_row_words,  # [n] int64
    p_slots,  # [bs * Q] int64
    p_accept_index,  # [bs, B] int32
    p_accept_lens,  # [bs] int32
    Q: tl.constexpr,
    B: tl.constexpr,
    WORDS: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    i_n = tl.program_id(1)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    # Promised by KVRows (ALIGNMENT); without it every thread would move its two words one by one.
    row_words = tl.multiple_of(tl.load(p_row_words + i_n), 2)
    in_row = words < row_words
    p_buffer = tl.multiple_of(tl.load(p_addresses + i_n).to(tl.pointer_type(tl.int64)), 16) + words
    length = tl.load(p_accept_lens + i_b)

    # Row 0 is the root and always in place. Must stay one row after the other: see the module's docstring.
    for j in range(1, length):
        source = tl.load(p_accept_index + i_b * B + j).to(tl.int64)
        target = i_b * Q + j
        if source != target:
            o_source = tl.multiple_of(tl.load(p_slots + source) * row_words, 2)
            o_target = tl.multiple_of(tl.load(p_slots + target) * row_words, 2)
            tl.store(p_buffer + o_target, tl.load(p_buffer + o_source, mask=in_row), mask=in_row)
