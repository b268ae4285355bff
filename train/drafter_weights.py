"""A published drafter's tensors under their plain names, for a module that computes what they were trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import safe_open
from torch import Tensor

from sglang_dflash.drafter_config import DrafterSpec, read_json, spec_from_dir
from sglang_dflash.drafter_tensors import check_tensors, expected_shapes, read_headers

from .errors import TrainError

# What must agree between a checkpoint and the drafter it is loaded into, beside every shape: each changes the numbers.
_MEANING = ("target_layer_ids", "rope_theta", "rms_norm_eps", "layer_types", "sliding_window", "mask_token_id")


def check_plain(path: str | Path) -> None:
    """Refuse a drafter that the server computes otherwise than `drafter_model.Drafter` does, whatever its shapes.

    The keys are those that SGLang's ``models/dflash.py`` reads and the published DFlash drafters leave at their
    defaults. Raises TrainError.
    """
    file = Path(path) / "config.json"
    config = read_json(file, "give the directory of a DFlash drafter")
    nested = config.get("dflash_config") or {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    head_dim = config.get("head_dim")
    found: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "use_gemma_norm": (bool(config.get("use_gemma_norm", False)), False),
        "is_causal": (_mixed_causality(config), None),
        "rope_is_neox_style": (config.get("rope_is_neox_style", config.get("is_neox_style", True)), True),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "rope_dim": (rope.get("rope_dim", head_dim), head_dim),
        "dflash_config.attention_value_scale": (nested.get("attention_value_scale"), None),
    }
    for key, (value, plain) in found.items():
        if value != plain:
            raise TrainError(
                f"{file}: {key}: found {value!r}, want {plain!r}; the trainer does not compute this variant of DFlash."
            )


def _mixed_causality(config: dict[str, Any]) -> bool | None:
    """``is_causal`` where it overrules what a layer's type means (full: not causal in the block, sliding: causal)."""
    causal = config.get("is_causal")
    if causal is None:
        return None
    kinds = set(config.get("layer_types") or ["full_attention"])
    return bool(causal) if ("full_attention" if causal else "sliding_attention") in kinds else None


def read_weights(path: str | Path, spec: DrafterSpec | None = None) -> dict[str, Tensor]:
    """Every tensor of the drafter at ``path`` by its published name, strictly: none missing, unknown or mis-shaped.

    Prefixed and fused names that the server takes are taken here too. With ``spec``, the checkpoint must be of that
    very drafter. Raises DrafterError or TrainError.
    """
    found = spec_from_dir(Path(path))
    check_plain(path)
    check_tensors(found)
    weights: dict[str, Tensor] = {}
    for name, header in read_headers(Path(path)).items():
        with safe_open(str(header.file), framework="pt") as opened:
            weights |= _unfused(name, opened.get_tensor(header.name), found)
    if spec is not None:
        _check_same(found, weights, spec)
    return weights


def _unfused(name: str, tensor: Tensor, spec: DrafterSpec) -> dict[str, Tensor]:
    q, kv, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    for fused, parts in (
        (".qkv_proj.", {".q_proj.": q, ".k_proj.": kv, ".v_proj.": kv}),
        (".gate_up_proj.", {".gate_proj.": inner, ".up_proj.": inner}),
    ):
        if fused in name:
            pieces = torch.split(tensor, list(parts.values()))
            return {name.replace(fused, part): piece for part, piece in zip(parts, pieces, strict=True)}
    return {name: tensor}


def _check_same(found: DrafterSpec, weights: dict[str, Tensor], wanted: DrafterSpec) -> None:
    shapes = expected_shapes(wanted)
    for name in dict.fromkeys([*shapes, *weights]):
        shape = tuple(weights[name].shape) if name in weights else None
        if shape != shapes.get(name):
            have, want = list(shape) if shape else "none", list(shapes[name]) if name in shapes else "none"
            raise TrainError(f"{found.path}: {name}: found {have}, want {want}; give a drafter of this shape.")
    for key in _MEANING:
        have, want = _value(found, key), _value(wanted, key)
        if have != want:
            raise TrainError(
                f"{found.path}: {key}: found {have}, want {want}; give a drafter trained with it, or train anew."
            )


def _value(spec: DrafterSpec, key: str) -> Any:
    value = getattr(spec, key)
    if key == "layer_types":
        return value or ("full_attention",) * spec.num_layers
    if key == "sliding_window" and "sliding_attention" not in (spec.layer_types or ()):
        return None  # set or not, no layer reads it
    return value
