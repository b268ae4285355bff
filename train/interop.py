"""Other people's DFlash checkpoints, read into ours: z-lab's layout and speculators'.

speculators (`DFlashSpeculatorConfig`) counts layer ids one higher (id 0 is the embedding's output), nests the shapes
in ``transformer_layer_config``, of which it writes only what differs from the class's defaults, and may store parts of
the target beside the drafter's own tensors. What comes out is z-lab's format, which this plugin and stock SGLang serve.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import DrafterSpec, check_against_target, read_json, spec_from_dir
from sglang_dflash.drafter_tensors import expected_shapes, read_headers
from sglang_dflash.provenance import read_provenance

from .drafter_weights import read_weights
from .errors import TrainError
from .export import write_drafter

_BORROWED = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")
_REMEDY = "DFLASH serving has no such mode: train without it."


def is_speculators(path: str | Path) -> bool:
    """Whether a checkpoint's config.json is speculators'."""
    config = read_json(Path(path) / "config.json", "give a drafter's directory")
    return "speculators_model_type" in config or "transformer_layer_config" in config


def import_drafter(path: str | Path, target: str | Path, out: str | Path) -> Path:
    """Write the checkpoint at ``path`` as a z-lab drafter for ``target``, in the checkpoint's own dtype.

    Provenance goes along where there is one. Raises TrainError or DrafterError; ``out`` is then not there.
    """
    facts, root = target_facts(target), Path(path)
    theirs = is_speculators(root)
    spec = speculators_spec(root, facts.num_hidden_layers) if theirs else spec_from_dir(root)
    check_against_target(spec, facts)
    weights = _speculators_tensors(root, spec) if theirs else read_weights(root)
    fingerprint = read_provenance(root)
    return write_drafter(
        out,
        spec,
        weights,
        facts.vocab_size,
        fingerprint.to_json() if fingerprint else None,
        dtype=weights["fc.weight"].dtype,
    )


def _speculators_tensors(root: Path, spec: DrafterSpec) -> dict[str, Tensor]:
    """The drafter's own tensors, strictly. Raises TrainError or DrafterError."""
    wanted = expected_shapes(spec)
    weights: dict[str, Tensor] = {}
    for name, header in read_headers(root).items():
        if not name.startswith(_BORROWED):
            with safe_open(str(header.file), framework="pt") as opened:
                weights[name] = opened.get_tensor(header.name)
    for name in sorted(set(weights) | set(wanted)):
        found = list(weights[name].shape) if name in weights else "no such tensor"
        want = list(wanted[name]) if name in wanted else "no such tensor in a DFlash drafter"
        if found != want:
            raise TrainError(f"{root}: {name}: found {found}, want {want}; config.json and tensors must be one's.")
    return weights


def speculators_spec(path: Path, num_target_layers: int) -> DrafterSpec:
    """What a speculators config.json describes. Raises TrainError for anything that DFLASH serving would not run."""
    file = path / "config.json"
    config = read_json(file, "give a drafter's directory")
    if (kind := config.get("speculators_model_type")) != "dflash":
        raise TrainError(f"{file}: speculators_model_type: found {kind!r}, want 'dflash'; give a DFlash checkpoint.")
    if (projector := config.get("projector_type") or "dflash") != "dflash":
        raise TrainError(f"{file}: projector_type: found {projector!r}, want 'dflash'; {_REMEDY}")
    for key in ("sample_from_anchor", "shift_label"):
        if config.get(key):
            raise TrainError(f"{file}: {key}: found true, want false; {_REMEDY}")
    shape = _layer_config(config, file)
    if (draft_vocab := config.get("draft_vocab_size")) not in (None, shape.vocab_size):
        raise TrainError(
            f"{file}: draft_vocab_size: found {draft_vocab}, want {shape.vocab_size}, the whole vocabulary; {_REMEDY}"
        )
    if (width := config.get("target_hidden_size")) not in (None, shape.hidden_size):
        raise TrainError(f"{file}: target_hidden_size: found {width}, want {shape.hidden_size}; {_REMEDY}")
    layer_types = tuple(getattr(shape, "layer_types", None) or ("full_attention",) * shape.num_hidden_layers)
    sliding = "sliding_attention" in layer_types
    # Left out, readers disagree: speculators trains causal, vLLM serves bidirectional.
    if sliding and (mode := config.get("sliding_window_non_causal")) is not False:
        raise TrainError(
            f"{file}: sliding_window_non_causal: found {json.dumps(mode)}, want false, as DFLASH serves sliding "
            "layers; write false if it was trained so."
        )
    rope: dict[str, Any] = getattr(shape, "rope_parameters", None) or {}
    if (rope_type := rope.get("rope_type", "default")) != "default":
        raise TrainError(f"{file}: rope_type: found {rope_type!r}, want 'default'; the trainer rotates plainly only.")
    return DrafterSpec(
        path=str(path),
        block_size=int(_need(config, "block_size", file)),
        mask_token_id=int(_need(config, "mask_token_id", file)),
        target_layer_ids=_layer_ids(config, file),
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
        attention_bias=bool(getattr(shape, "attention_bias", False)),
        attention_sink_bias=False,
        num_target_layers=num_target_layers,
        max_position_embeddings=shape.max_position_embeddings,
        # Partial rotary and M-RoPE keys are the target's: speculators rotates the whole head whatever they say.
        rope_theta=float(rope.get("rope_theta") or shape.rope_theta),
        layer_types=layer_types,
        sliding_window=shape.sliding_window if sliding else None,
        rms_norm_eps=float(shape.rms_norm_eps),
    )


def _layer_config(config: dict[str, Any], file: Path) -> Any:
    """``transformer_layer_config`` with the defaults of its class, as speculators itself reads it."""
    from transformers import AutoConfig

    value = dict(_need(config, "transformer_layer_config", file))
    kind = value.pop("model_type", "qwen3")
    try:
        return AutoConfig.for_model(kind, **value)
    except Exception as e:  # a library's validation: its errors have no common base
        why = " ".join(str(e).split())[:200]
        raise TrainError(
            f"{file}: transformer_layer_config: found {kind!r} ({why}), want layers that transformers knows."
        ) from e


def _layer_ids(config: dict[str, Any], file: Path) -> tuple[int, ...]:
    """Theirs minus one: they count the embedding as 0."""
    ids = _need(config, "aux_hidden_state_layer_ids", file)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise TrainError(f"{file}: aux_hidden_state_layer_ids: found {ids!r}, want a list of integers; write them.")
    return tuple(i - 1 for i in ids)


def _need(config: dict[str, Any], key: str, file: Path) -> Any:
    if config.get(key) is None:
        raise TrainError(f"{file}: {key}: found none, want it; the checkpoint is not complete.")
    return config[key]
