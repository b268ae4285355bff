"""From a run to a drafter that serves: the 11n+3 tensors in bf16, the published config.json, and its provenance."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import DrafterSpec, check_against_target, spec_from_dir
from sglang_dflash.drafter_tensors import check_tensors, expected_shapes
from sglang_dflash.provenance import FILE as PROVENANCE

from .checkpoint import checkpoints
from .errors import TrainError
from .fit import load_spec


def published_config(spec: DrafterSpec, vocab_size: int) -> dict[str, Any]:
    """config.json in z-lab's format: block size in both places, and no rope key of the target's but theta."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "layer_types": list(spec.layer_types or ("full_attention",) * spec.num_layers),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": spec.sliding_window is not None,
        "tie_word_embeddings": False,
        "num_target_layers": spec.num_target_layers,
        "block_size": spec.block_size,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
    }


def write_drafter(
    out: str | Path,
    spec: DrafterSpec,
    weights: dict[str, Tensor],
    vocab_size: int,
    provenance: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a drafter directory, whole or not at all, and read it back as the server would.

    Raises TrainError if ``out`` exists or the tensors are not exactly those of ``spec``; DrafterError if what was
    written would not be served.
    """
    out = Path(out)
    if out.exists():
        raise TrainError(f"{out}: found it there already, want a new folder; remove it or name another.")
    shapes = expected_shapes(spec)
    for name in sorted(set(shapes) | set(weights)):
        found = tuple(weights[name].shape) if name in weights else None
        if found != shapes.get(name):
            raise TrainError(f"export: {name}: found shape {found}, want {shapes.get(name)}; the run is damaged.")
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        tensors = {name: weights[name].to(dtype).contiguous().cpu() for name in shapes}
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        config = published_config(spec, vocab_size) | {"dtype": str(dtype).removeprefix("torch.")}
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if provenance is not None:
            (part / PROVENANCE).write_text(json.dumps(provenance, indent=1, sort_keys=True) + "\n")
        check_tensors(spec_from_dir(part))
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def export(run: str | Path, out: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Export the last checkpoint of ``run`` to ``out``. Raises TrainError or DrafterError."""
    spec, about = load_spec(run)
    saved = checkpoints(Path(run))
    if not saved:
        raise TrainError(f"{run}: found no checkpoint, want one; let fit reach its first save.")
    weights = {name: torch.empty(shape) for name, shape in expected_shapes(spec).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process reads alone is meant so
        dcp.load({"model": weights}, checkpoint_id=str(saved[-1]), no_dist=True)
    facts = target_facts(about["target"])
    provenance = dict(about["fingerprint"])
    result = write_drafter(out, spec, weights, facts.vocab_size, provenance, dtype)
    check_against_target(spec_from_dir(result), facts)
    return result
