"""The DFlash drafter as a torch module that trains: SGLang's ``models/dflash.py`` with whole blocks as queries.

Parameter names are the published tensor names, so a state dict is a checkpoint (11 a layer and 3). Embeddings and head
are the target's and no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sglang_dflash.drafter_config import DrafterSpec, spec_from_dir

from .attention import Mask, attend
from .drafter_weights import read_weights
from .errors import TrainError


class DrafterAttention(nn.Module):
    """Queries from the block alone; keys and values from the context features and the block. QK-norm before RoPE."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        h, d, self.heads, self.kv_heads = spec.hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads
        self.head_dim = d
        self.q_proj = nn.Linear(h, self.heads * d, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, h, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=spec.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, rope_context: Tensor, mask: Mask) -> Tensor:
        b, q_len, _ = x.shape
        # One projection of both: the context does not pass input_layernorm, x already did.
        both = torch.cat([context, x], dim=1)
        q = self.q_norm(self.q_proj(x).view(b, q_len, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(both).view(b, both.shape[1], self.kv_heads, self.head_dim))
        v = self.v_proj(both).view(b, both.shape[1], self.kv_heads, self.head_dim)
        q = rotate(q, rope)
        k = rotate(k, torch.cat([rope_context, rope], dim=1))
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        out = out.transpose(1, 2).reshape(b, q_len, -1)
        projected: Tensor = self.o_proj(out)
        return projected


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        h, m = spec.hidden_size, spec.intermediate_size
        self.gate_proj = nn.Linear(h, m, bias=False)
        self.up_proj = nn.Linear(h, m, bias=False)
        self.down_proj = nn.Linear(m, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DrafterLayer(nn.Module):
    """A pre-norm Qwen3 layer."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.self_attn = DrafterAttention(spec)
        self.mlp = DrafterMLP(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, rope_context: Tensor, mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, rope_context, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """A DFlash drafter of the shape ``spec``. Weights are uninitialised until `initialise` or `load`."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        if spec.attention_bias or spec.attention_sink_bias:
            raise TrainError(
                f"{spec.path}: found attention biases, want none; the trainer trains the published 11n+3 tensors only."
            )
        self.spec = spec
        h = spec.hidden_size
        self.fc = nn.Linear(len(spec.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = nn.RMSNorm(h, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(h, eps=spec.rms_norm_eps)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return self.spec.layer_types or ("full_attention",) * self.spec.num_layers

    def context(self, features: Tensor, noise: float = 0.0) -> Tensor:
        """``hidden_norm(fc(features))``: ``[b, S, K*H] -> [b, S, H]``, shared by all layers.

        ``noise`` is the standard deviation, relative to each token's RMS, of Gaussian noise on a copy of the features;
        in evaluation there is none. Nothing that the loss is computed from may ever pass through it.
        """
        wanted = self.fc.in_features
        if features.shape[-1] != wanted:
            k, h = len(self.spec.target_layer_ids), self.spec.hidden_size
            raise TrainError(
                f"context features: found {features.shape[-1]} wide, want {wanted} ({k} target_layer_ids x hidden size "
                f"{h}); capture with the drafter's own layer ids (the final hidden state is no context feature)."
            )
        if noise and self.training:
            scale = features.float().pow(2).mean(-1, keepdim=True).sqrt().to(features.dtype)
            features = features + noise * scale * torch.randn_like(features)
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        positions: Tensor,
        context_positions: Tensor,
        masks: Mapping[str, Mask],
        *,
        noise: float = 0.0,
    ) -> Tensor:
        """Hidden states of every slot, final norm applied: the target's head turns them into logits.

        Args:
            features: ``[b, S, K*H]`` target hidden states after layers ``target_layer_ids``, concatenated.
            block_embeddings: ``[b, N*B, H]`` target embeddings of anchors and mask tokens.
            positions: ``[b, N*B]`` int, the anchor's position + offset.
            context_positions: ``[b, S]`` int.
            masks: by layer type (`attention.make_masks`).
            noise: see `context`.

        Returns ``[b, N*B, H]``. Raises TrainError if the features are not K*H wide.
        """
        context = self.context(features, noise)
        x = block_embeddings.to(context.dtype)
        rope = rope_table(positions, self.spec)
        rope_context = rope_table(context_positions, self.spec)
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            x = layer(x, context, rope, rope_context, masks[kind])
        out: Tensor = self.norm(x)
        return out

    @torch.no_grad()
    def initialise(self, seed: int) -> Drafter:
        """Normal(0, 0.02) matrices and unit norms; the same weights for the same seed on any device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
        return self

    @torch.no_grad()
    def load(self, path: str | Path) -> Drafter:
        """Strictly load a checkpoint of this very drafter (`drafter_weights.read_weights`). Raises its errors."""
        for name, tensor in read_weights(path, self.spec).items():
            self.get_parameter(name).copy_(tensor)
        return self

    @classmethod
    def from_dir(cls, path: str | Path) -> Drafter:
        """The checkpoint at ``path``, fp32. Raises DrafterError or TrainError."""
        return cls(spec_from_dir(Path(path))).load(path)


def rope_table(positions: Tensor, spec: DrafterSpec) -> Tensor:
    """Complex-free RoPE table ``[b, T, 1, head_dim]`` fp32: cosines in the first half, sines in the second."""
    half = spec.head_dim // 2
    step = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * spec.rope_theta ** (-step / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).unsqueeze(2)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """NeoX-style rotation of ``x [b, T, heads, d]`` by ``rope [b, T, 1, d]``, in fp32."""
    cos, sin = rope.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
