"""A drafter that drafts nothing of use: what a server needs to capture before one is trained, or more layers of."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_dflash.drafter_config import DrafterSpec, TargetFacts
from sglang_dflash.drafter_tensors import expected_shapes

from .export import write_drafter

BLOCK = 2  # the shortest: all of it is thrown away
_HEADS, _HEAD_DIM = 8, 64  # heads for as many tensor-parallel ranks


def write_probe(out: Path, facts: TargetFacts, layer_ids: tuple[int, ...]) -> Path:
    """One layer that conditions on ``layer_ids``, all its matrices zero, in the dtype a server has here."""
    spec = DrafterSpec(
        path=str(out),
        block_size=BLOCK,
        mask_token_id=facts.vocab_size - 1,
        target_layer_ids=layer_ids,
        num_layers=1,
        hidden_size=facts.hidden_size,
        intermediate_size=_HEADS * _HEAD_DIM,
        num_heads=_HEADS,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        attention_bias=False,
        attention_sink_bias=False,
        num_target_layers=facts.num_hidden_layers,
        max_position_embeddings=facts.context_len or 32768,
        rope_theta=10000.0,
        layer_types=None,
        sliding_window=None,
    )
    shapes = expected_shapes(spec)
    weights = {name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape) for name, shape in shapes.items()}
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return write_drafter(out, spec, weights, facts.vocab_size, dtype=dtype)
