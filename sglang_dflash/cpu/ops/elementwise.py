"""Small fused elementwise ops, splits and the hash behind seeded sampling."""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """`x *= sigmoid(gate)` in place; the gate has as many elements as x. Twin of `fused_sigmoid_mul`."""
    x.mul_(torch.sigmoid(gate.float()).reshape(x.shape).to(x.dtype))


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, head_k: int, head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the GDN projections: qkv `[T, 2*Hk*K + Hv*V]`, z `[T, Hv, V]`, b `[T, Hv]`, a `[T, Hv]`.

    `qkvz`: `[T, 2*Hk*K + 2*Hv*V]` laid out q, k, v, z; `ba`: `[T, 2*Hv]`. Twin of
    `fused_qkvzba_split_reshape_cat_contiguous` as `srt/models/qwen3_5.py` calls it.
    """
    width = 2 * num_k_heads * head_k + num_v_heads * head_v
    qkv, z = qkvz.split([width, num_v_heads * head_v], 1)
    b, a = ba.split(num_v_heads, 1)
    return qkv.contiguous(), z.reshape(-1, num_v_heads, head_v), b.contiguous(), a.contiguous()


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK32


def _mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _rotate((key * 0xCC9E2D51) & _MASK32, 15)
    h = _rotate(h ^ ((key * 0x1B873593) & _MASK32), 13)
    return (h * 5 + 0xE6546B64) & _MASK32


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed low, seed high, position, column), the noise of seeded sampling.

    `seed`: int64/uint64 `[n]`; `positions`: int `[n]`; `col_indices`: int `[m]`. Returns uint32 `[n, m]`, bit
    for bit what the Triton kernel `murmur_hash32_kernel` (`kernels/ops/sampling/murmur_hash.py`) gives.

    int64 arithmetic wraps modulo 2**64, and the low 32 bits of a wrapped product are right, so masking is
    enough.
    """
    seed = seed.to(torch.int64).unsqueeze(1)
    h = torch.zeros_like(seed)
    blocks = (
        seed,
        seed >> 32,
        positions.to(torch.int64).unsqueeze(1),
        col_indices.to(torch.int64).unsqueeze(0),
    )
    for block in blocks:
        h = _mix(h, block & _MASK32)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK32
    return (h ^ (h >> 16)).to(torch.uint32)
