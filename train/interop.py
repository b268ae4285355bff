"""Other people's DFlash checkpoints, read into ours: z-lab's layout and speculators'.

speculators counts layer ids one higher (id 0 is the embedding), nests the shapes in ``transformer_layer_config`` and
may store parts of the target beside the drafter's own tensors. What comes out is z-lab's format, which this plugin and
stock SGLang serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import DrafterSpec, check_against_target, read_json, spec_from_dir
from sglang_dflash.drafter_tensors import check_tensors, expected_shapes

from .errors import TrainError
from .export import write_drafter

_BORROWED = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "t2d", "d2t")


def is_speculators(path: str | Path) -> bool:
    """Whether a checkpoint's config.json is speculators'."""
    config = read_json(Path(path) / "config.json", "give a drafter's directory")
    return "speculators_model_type" in config or "transformer_layer_config" in config


def import_drafter(path: str | Path, target: str | Path, out: str | Path) -> Path:
    """Write the checkpoint at ``path`` as a z-lab drafter for ``target``. Raises TrainError or DrafterError."""
    facts = target_facts(target)
    if is_speculators(path):
        spec, weights = _speculators(Path(path), facts.num_hidden_layers)
    else:
        spec = spec_from_dir(Path(path))
        check_tensors(spec)
        weights = {name.removeprefix("model."): t for name, t in read_tensors(Path(path)).items()}
    check_against_target(spec, facts)
    dtype = next(iter(weights.values())).dtype
    return write_drafter(out, spec, weights, facts.vocab_size, dtype=dtype)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of all safetensors files of a directory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in list(opened.keys())}
    if not tensors:
        raise TrainError(f"{path}: found no *.safetensors, want the drafter's weights; download the whole checkpoint.")
    return tensors


def _speculators(path: Path, num_target_layers: int) -> tuple[DrafterSpec, dict[str, Tensor]]:
    file = path / "config.json"
    config = read_json(file, "give a drafter's directory")
    if (kind := config.get("speculators_model_type")) != "dflash":
        raise TrainError(f"{file}: speculators_model_type: found {kind!r}, want 'dflash'; give a DFlash checkpoint.")
    shape = config["transformer_layer_config"]
    draft_vocab, vocab = config.get("draft_vocab_size"), shape["vocab_size"]
    if draft_vocab not in (None, vocab):
        raise TrainError(
            f"{file}: draft_vocab_size: found {draft_vocab}, want {vocab}; a reduced draft vocabulary is not served."
        )
    # Both change what a slot means or sees, which a server would not know.
    for key in ("sample_from_anchor", "sliding_window_non_causal"):
        if config.get(key):
            raise TrainError(
                f"{file}: {key}: found true, want false: DFLASH serving has no such mode; train without it."
            )
    ids = _layer_ids(config, file)
    layers = int(shape["num_hidden_layers"])
    spec = DrafterSpec(
        path=str(path),
        block_size=int(_need(config, "block_size", file)),
        mask_token_id=int(_need(config, "mask_token_id", file)),
        target_layer_ids=ids,
        num_layers=layers,
        hidden_size=int(shape["hidden_size"]),
        intermediate_size=int(shape["intermediate_size"]),
        num_heads=int(shape["num_attention_heads"]),
        num_kv_heads=int(shape["num_key_value_heads"]),
        head_dim=int(shape["head_dim"]),
        attention_bias=bool(shape.get("attention_bias", False)),
        attention_sink_bias=False,
        num_target_layers=num_target_layers,
        max_position_embeddings=int(shape["max_position_embeddings"]),
        rope_theta=float(shape.get("rope_theta") or (shape.get("rope_parameters") or {}).get("rope_theta") or 10000.0),
        layer_types=tuple(shape.get("layer_types") or ("full_attention",) * layers),
        sliding_window=shape.get("sliding_window"),
        rms_norm_eps=float(shape.get("rms_norm_eps", 1e-6)),
    )
    weights = {name: t for name, t in read_tensors(path).items() if not name.startswith(_BORROWED)}
    wanted = expected_shapes(spec)
    unknown = sorted(set(weights) - set(wanted))
    if unknown:
        raise TrainError(
            f"{path}: {unknown[0]}: found a tensor no DFlash drafter has ({len(unknown)} such), want none."
        )
    return spec, weights


def _layer_ids(config: dict[str, Any], file: Path) -> tuple[int, ...]:
    """Theirs minus one: they count the embedding as 0."""
    ids = _need(config, "aux_hidden_state_layer_ids", file)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise TrainError(f"{file}: aux_hidden_state_layer_ids: found {ids!r}, want a list of integers.")
    return tuple(i - 1 for i in ids)


def _need(config: dict[str, Any], key: str, file: Path) -> Any:
    if config.get(key) is None:
        raise TrainError(f"{file}: {key}: found none, want it; the checkpoint is not complete.")
    return config[key]
