"""A tiny good drafter on disk, ways to spoil it, and the assertion that it is refused in one full line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.drafter import (
    DrafterError,
    TargetFacts,
    check_drafter,
    read_drafter_spec,
)

H, M, HEADS, KV, D, LAYERS, IDS = 16, 32, 4, 2, 8, 2, [1, 3, 5]
TARGET = TargetFacts(hidden_size=H, num_hidden_layers=8, vocab_size=64, context_len=512, path="the-target")
WEIGHTS = "model.safetensors"


def tiny_config() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": IDS, "block_size": 16},
        "hidden_size": H,
        "intermediate_size": M,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "num_target_layers": 8,
        "max_position_embeddings": 512,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "use_sliding_window": True,
        "attention_bias": False,
    }


def drafter_shapes(h: int, m: int, heads: int, kv: int, d: int, layers: int, k: int) -> dict[str, list[int]]:
    """The 11n+3 names and shapes of the published format, written out apart from the code under test."""
    shapes = {"fc.weight": [h, k * h], "hidden_norm.weight": [h], "norm.weight": [h]}
    for i in range(layers):
        p = f"layers.{i}"
        shapes |= {
            f"{p}.self_attn.q_proj.weight": [heads * d, h],
            f"{p}.self_attn.o_proj.weight": [h, heads * d],
        }
        shapes |= {f"{p}.self_attn.{n}_proj.weight": [kv * d, h] for n in "kv"}
        shapes |= {f"{p}.self_attn.{n}_norm.weight": [d] for n in "qk"}
        shapes |= {f"{p}.mlp.{n}_proj.weight": [m, h] for n in ("gate", "up")}
        shapes |= {f"{p}.mlp.down_proj.weight": [h, m]}
        shapes |= {f"{p}.{n}_layernorm.weight": [h] for n in ("input", "post_attention")}
    return shapes


def tiny_tensors() -> dict[str, torch.Tensor]:
    shapes = drafter_shapes(H, M, HEADS, KV, D, LAYERS, len(IDS))
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def write_tiny(root: Path) -> None:
    """A good tiny drafter in ``root``, for each test to spoil."""
    (root / "config.json").write_text(json.dumps(tiny_config()))
    save_file(tiny_tensors(), root / WEIGHTS)


def edit(root: Path, top: dict[str, Any] | None = None, **nested: Any) -> None:
    """Change config.json: ``top`` at the top level, keywords in dflash_config; ... deletes a key."""
    config = json.loads((root / "config.json").read_text())
    for place, values in ((config, top or {}), (config["dflash_config"], nested)):
        for key, value in values.items():
            if value is ...:
                place.pop(key, None)
            else:
                place[key] = value
    (root / "config.json").write_text(json.dumps(config))


def retensor(root: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(root / WEIGHTS)
    change(tensors)
    save_file(tensors, root / WEIGHTS)


def assert_refused(root: Path, file: str, *parts: str, target: TargetFacts | None = TARGET) -> None:
    """The drafter is refused, in one line that holds the file's path and every one of ``parts``."""
    with pytest.raises(DrafterError) as caught:
        read_drafter_spec(root) if target is None else check_drafter(root, target)
    message = str(caught.value)
    assert "\n" not in message
    assert str(root / file) in message
    assert not [part for part in ("found", "wanted", "; ", *parts) if part not in message], message
