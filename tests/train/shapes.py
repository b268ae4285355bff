"""Small drafters and layouts for the trainer's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafter_config import DrafterSpec
from sglang_dflash.train.attention import Layout, dense_mask
from sglang_dflash.train.blocks import document_positions
from sglang_dflash.train.drafter_model import Drafter

HIDDEN, VOCAB, MASK_ID = 32, 50, 49


def drafter_spec(**changes: Any) -> DrafterSpec:
    fields: dict[str, Any] = {
        "path": "memory",
        "block_size": 4,
        "mask_token_id": MASK_ID,
        "target_layer_ids": (1, 3, 5),
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "attention_sink_bias": False,
        "num_target_layers": 8,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
    }
    return DrafterSpec(**fields | changes)


def make_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """Weights large enough that attention and norms matter."""
    drafter = Drafter(drafter_spec(**changes)).initialise(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return drafter.eval()


def inputs(batch: int, length: int, drafter: Drafter, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random features ``[b, S, K*H]``, token ids ``[b, S]`` and an embedding matrix ``[V, H]``."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, length, drafter.fc.in_features, generator=generator)
    tokens = torch.randint(0, MASK_ID, (batch, length), generator=generator)
    return features, tokens, torch.randn(VOCAB, HIDDEN, generator=generator)


def run_blocks(
    drafter: Drafter,
    features: Tensor,
    tokens: Tensor,
    embedding: Tensor,
    anchors: Tensor,
    documents: Tensor | None = None,
    masks: dict[str, Any] | None = None,
) -> Tensor:
    """Hidden states ``[b, N, B, H]`` of the blocks at ``anchors [b, N]``."""
    b, n = anchors.shape
    size = drafter.spec.block_size
    documents = torch.zeros_like(tokens) if documents is None else documents
    layout = Layout(anchors, documents, size)
    window = drafter.spec.sliding_window
    masks = masks or {
        "full_attention": dense_mask(layout),
        "sliding_attention": dense_mask(layout, window),
    }
    ids = torch.full((b, n, size), MASK_ID)
    ids[:, :, 0] = tokens.gather(1, anchors.clamp(min=0))
    places = document_positions(documents)
    positions = places.gather(1, anchors.clamp(min=0)).unsqueeze(-1) + torch.arange(size)
    hidden = drafter(features, embedding[ids].view(b, n * size, -1), positions.view(b, -1), places, masks)
    return hidden.view(b, n, size, -1)
