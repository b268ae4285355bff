"""RMS norms that SGLang fuses: gemma-style QK norm, gated norm, QK norm with rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms(x) * (1 + weight)` in fp32, cast back."""
    return (_rms(x, eps) * (1.0 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gemma RMS norm of every head; `q`, `k` `[T, heads * head_dim]` -> `[T * heads, head_dim]` each.

    Twin of `fused_qk_gemma_rmsnorm` as `srt/models/qwen3_5.py` calls it.
    """
    return _gemma(q.reshape(-1, head_dim), q_weight, eps), _gemma(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`fused_qk_gemma_rmsnorm_cpu` with q and its output gate interleaved a head.

    `q_gate`: `[T, num_heads * 2 * head_dim]`, each head `[q | gate]`. Returns q `[T * num_heads, head_dim]`,
    k, and the raw gate `[T, num_heads * head_dim]`.
    """
    tokens = q_gate.shape[0]
    q, gate = q_gate.reshape(tokens, num_heads, 2 * head_dim).split(head_dim, -1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(tokens, -1)


def rms_norm_gated_forward(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """`forward` of SGLang's gated RMSNorm: `rms(x) * weight * act(z)`, or the gate first if not
    `norm_before_gate`.

    `x`, `z`: `[..., hidden]`. `self` is `kernels/ops/attention/fla/layernorm_gated.py::RMSNorm`, whose Triton
    form this stands for. Raises ValueError for grouped norms, which no supported model uses.
    """
    if self.group_size is not None:
        raise ValueError(f"gated RMSNorm on CPU: group_size {self.group_size} found, wanted None")
    y = x.float()
    gate = None
    if z is not None:
        activation = torch.sigmoid if self.activation == "sigmoid" else F.silu
        gate = activation(z.reshape(x.shape).float())
    if gate is not None and not self.norm_before_gate:
        y = y * gate
    y = _rms(y, self.eps) * self.weight.float()
    if gate is not None and self.norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """In place on the fused projection: RMS norm of each q and k head, then rotate halves (neox). V is
    untouched.

    `qkv`: `[T, (q heads + k heads + v heads) * head_dim]`; `positions`: int `[T]`; `cos_sin_cache`:
    `[max_position, head_dim]`, cos in the first half of each row, sin in the second. Twin of the Triton op of
    the same name (`kernels/ops/attention/table_qk_norm_rope.py`), which the DFlash draft model calls.
    """
    if qkv.shape[0] == 0:
        return
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, -1)
    sizes = (num_q_heads * head_dim, num_k_heads * head_dim)
    q, k = qkv[:, : sum(sizes)].split(sizes, 1)
    for part, weight in ((q, q_weight), (k, k_weight)):
        heads = _rms(part.unflatten(1, (-1, head_dim)), eps) * weight.float()
        heads = heads.to(qkv.dtype).float()  # upstream rounds between norm and rotation
        left, right = heads.chunk(2, -1)
        rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        part.copy_(rotated.flatten(1))
