"""The gated delta rule and its convolution in plain torch, quick to train and to compile; the naive twins are
transformers' `torch_recurrent_gated_delta_rule` and `causal_conv1d_fn`.

fla's backward refuses on some hosts, and transformers' chunked path solves triangular systems with an operator that
the compiler cannot differentiate. Here the system's inverse is built by substitution inside blocks of 16 and by matrix
products between them, as fla's kernel does (Gated Delta Networks, arXiv 2412.06464, section 3.3; the UT transform of
arXiv 2406.06484).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import TrainError

CHUNK, BLOCK = 64, 16


class UnitLowerInverse(torch.autograd.Function):
    """``(I + N)^-1`` for strictly lower triangular ``N [..., 64, 64]`` fp32 (what is on or above its diagonal must
    be 0)."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        eye = torch.eye(BLOCK, dtype=lower.dtype, device=lower.device)
        corners = [lower[..., i : i + BLOCK, i : i + BLOCK] for i in range(0, size, BLOCK)]
        diagonal = torch.stack(corners, dim=-3)  # [..., size / BLOCK, BLOCK, BLOCK]
        # Row i of the inverse is e_i minus row i of N times the rows above it.
        rows = [eye[:1].expand(*diagonal.shape[:-2], 1, BLOCK)]
        for i in range(1, BLOCK):
            above = torch.cat(rows, dim=-2)
            rows.append(eye[i : i + 1] - diagonal[..., i : i + 1, :i] @ above)
        blocks = list(torch.cat(rows, dim=-2).unbind(-3))
        # Two neighbours A and B with C below A: the inverse's corner is -B^-1 C A^-1.
        width = BLOCK
        while width < size:
            merged = []
            for j in range(0, len(blocks), 2):
                first, second, at = blocks[j], blocks[j + 1], j * width
                corner = -second @ lower[..., at + width : at + 2 * width, at : at + width] @ first
                top = torch.cat((first, torch.zeros_like(first)), dim=-1)
                merged.append(torch.cat((top, torch.cat((corner, second), dim=-1)), dim=-2))
            blocks, width = merged, 2 * width
        ctx.save_for_backward(blocks[0])
        return blocks[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed).tril(-1)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Training's case of transformers' function of the same contract: whole sequences from an empty state.

    Args:
        query, key: ``[B, T, H, K]``. value: ``[B, T, H, V]``. g (log decay, <= 0), beta: ``[B, T, H]``. Any dtype;
            computed in fp32.

    Returns ``[B, T, H, V]`` in the query's dtype. Raises TrainError if a state is given or wanted.
    """
    if initial_state is not None or output_final_state:
        raise TrainError("delta rule: found a state to carry on, want training without a cache; use use_cache=False.")
    dtype, (batch, length, heads, _k) = query.dtype, query.shape
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    pad = -length % CHUNK

    def chunks(x: Tensor) -> Tensor:
        """``[B, T, H, ...]`` to fp32 ``[B, H, T / 64, 64, ...]``, zeros behind the end."""
        x = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, pad)).transpose(1, 2)
        return x.reshape(batch, heads, -1, CHUNK, *x.shape[3:])

    q, k, v = chunks(query) * query.shape[-1] ** -0.5, chunks(key), chunks(value)
    b, total = chunks(beta).unsqueeze(-1), chunks(g).cumsum(-1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # [.., i, j]: from j to i
    k_beta, kt = k * b, k.transpose(-1, -2)
    inverse: Tensor = UnitLowerInverse.apply((k_beta @ kt * decay).tril(-1))
    since_start, to_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    new, read = inverse @ (v * b), inverse @ (k_beta * since_start)
    inside, q_start, k_end = q @ kt * decay, q * since_start, (k * to_end).transpose(-1, -2)
    whole = total[..., -1, None, None].exp()

    state = q.new_zeros(batch, heads, q.shape[-1], v.shape[-1])
    out = []
    for new_c, read_c, inside_c, q_c, k_c, whole_c in zip(
        *(x.unbind(2) for x in (new, read, inside, q_start, k_end, whole)), strict=True
    ):
        fresh = new_c - read_c @ state
        out.append(q_c @ state + inside_c @ fresh)
        state = state * whole_c + k_c @ fresh
    joined = torch.stack(out, dim=2).reshape(batch, heads, -1, v.shape[-1])[:, :, :length]
    return joined.transpose(1, 2).to(dtype), None


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Depthwise causal convolution of ``hidden_states [B, C, T]`` with ``weight [C, W]``, as shifted sums."""
    if bias is not None or activation != "silu":
        raise TrainError(f"convolution: found activation {activation!r} or a bias, want silu alone; update the recipe.")
    width, length = weight.shape[-1], hidden_states.shape[-1]
    x = F.pad(hidden_states.transpose(1, 2), (0, 0, width - 1, 0))
    w = weight.to(x.dtype)
    total = x[:, :length] * w[:, 0]
    for i in range(1, width):
        total = total + x[:, i : i + length] * w[:, i]
    return F.silu(total).transpose(1, 2)


def install(modeling: ModuleType) -> None:
    """Make transformers' qwen3_5 layers call these two. Raises TrainError if their names are no longer there."""
    replacements = {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule, "causal_conv1d_fn": causal_conv1d}
    for name, function in replacements.items():
        if not hasattr(modeling, name):
            raise TrainError(f"{modeling.__name__}.{name}: found nothing, want transformers 5.17 to 5.19; install one.")
        setattr(modeling, name, function)
