"""What a DFlash drafter's config.json must say before we serve it as a tree.

Upstream (``speculative/dflash_utils.py`` parse_dflash_draft_config, ``spec_aux_hidden_state.py``) fills
every gap with a guess that loads and then accepts little: layer ids from a formula, block size 16, a mask
token from the tokenizer, Hugging Face's class defaults for head_dim and rope_theta. Here nothing that changes
the numbers is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

ARCHITECTURE = "DFlashDraftModel"
CHAIN_REMEDY = "not served as a tree: use --speculative-eagle-topk 1"
MIN_BLOCK, MAX_BLOCK = 2, 32

_NO_ROPE: Mapping[str, Any] = {}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Their config classes add partial_rotary_factor 0.25 by themselves, to a config.json that never mentions it.
_PARTIAL_ROTARY_MODEL_TYPES = ("qwen3_5", "qwen3_next")
_OTHER_HEADS = ("conv_kernel_size", "selector_rank", "markov_rank", "gru_hidden_dim")


class DrafterError(ValueError):
    """A drafter that must not be served. One line: file, key or tensor, value found, value wanted, remedy."""


def refuse(file: str | Path, key: str, found: object, wanted: object, remedy: str) -> DrafterError:
    """The error for ``key`` of ``file``, folded to one line (hub and parser messages carry newlines)."""
    return DrafterError(" ".join(f"{file}: {key}: found {found}, wanted {wanted}; {remedy}".split()))


@dataclass(frozen=True)
class TargetFacts:
    """What the drafter borrows from, or must agree with in, the target."""

    hidden_size: int
    num_hidden_layers: int  # as counted by layer ids: looped models count every loop
    vocab_size: int  # embedding rows, padding included
    context_len: int | None  # the length served, where known
    path: str


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter whose config.json passed every check. Sizes are in elements."""

    path: str  # local directory
    block_size: int  # slots of one draft forward, the anchor's included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # id k = output of the target's 0-based layer k; strictly increasing
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    attention_sink_bias: bool  # one extra [num_heads] tensor a layer (MiMo drafters)
    num_target_layers: int | None  # None where config.json does not say
    max_position_embeddings: int
    rope_theta: float
    layer_types: tuple[str, ...] | None  # None: every layer attends fully
    sliding_window: int | None
    rms_norm_eps: float = 1e-6
    warnings: tuple[str, ...] = ()


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in ``file``. Raises DrafterError if it is missing, unreadable or not an object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise refuse(file, "file", type(e).__name__, "a readable file", remedy) from e
    except ValueError as e:
        raise refuse(file, "file", f"not JSON ({e})", "a JSON object", remedy) from e
    if not isinstance(value, dict):
        raise refuse(file, "file", f"a JSON {type(value).__name__}", "a JSON object", remedy)
    return value


def spec_from_dir(root: Path) -> DrafterSpec:
    """Read and check ``root``/config.json as far as that goes without the target.

    Raises DrafterError. Key lookup (dflash_config first, then the top level) is upstream's
    parse_dflash_draft_config; a key given in both places must agree.
    """
    return _ConfigReader(root).spec()


def check_against_target(spec: DrafterSpec, target: TargetFacts) -> None:
    """Check ``spec`` against the target it will draft for. Raises DrafterError."""
    file = Path(spec.path) / "config.json"
    other = f"use the drafter trained for {target.path}"
    layers = target.num_hidden_layers
    if spec.num_target_layers is not None and spec.num_target_layers != layers:
        raise refuse(file, "num_target_layers", spec.num_target_layers, f"{layers} (the target's layers)", other)
    check_layer_range(file, spec.target_layer_ids, layers)
    if spec.hidden_size != target.hidden_size:
        wanted = f"{target.hidden_size} (the drafter borrows the target's embeddings and head)"
        raise refuse(file, "hidden_size", spec.hidden_size, wanted, other)
    if spec.mask_token_id >= target.vocab_size:
        wanted = f"less than the target's {target.vocab_size} embedding rows"
        remedy = "a row added by resizing was not exported: retrain with an id inside the vocabulary"
        raise refuse(file, "mask_token_id", spec.mask_token_id, wanted, remedy)


def check_layer_range(file: Path, ids: tuple[int, ...], layers: int) -> None:
    """Refuse ids outside 0..layers-2: the last layer's output is the final hidden state, never a feature."""
    bad = [i for i in ids if not 0 <= i <= layers - 2]
    if bad:
        wanted = f"0..{layers - 2} for a target of {layers} layers (the last layer is not a context feature)"
        remedy = "vLLM and speculators count one higher: subtract 1, or retrain"
        raise refuse(file, "target_layer_ids", f"{bad[0]} in {list(ids)}", wanted, remedy)


def context_warning(spec: DrafterSpec, target: TargetFacts) -> str | None:
    """One line if requests can outgrow the positions the drafter was made for, else None."""
    if target.context_len is None or spec.max_position_embeddings >= target.context_len:
        return None
    return (
        f"{Path(spec.path) / 'config.json'}: max_position_embeddings: found {spec.max_position_embeddings}, "
        f"wanted at least the served context length {target.context_len}; past it few drafts are accepted: "
        f"lower --context-length or use a drafter trained for longer texts"
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class _ConfigReader:
    """One pass over config.json; each method checks one thing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "config.json"
        self.config = read_json(self.file, "give the directory of a DFlash drafter")
        self.warnings: list[str] = []

    def spec(self) -> DrafterSpec:
        self._check_kind()
        self._check_no_pickle()
        self._check_not_quantised()
        nested = self.config.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise self._refuse("dflash_config", type(nested).__name__, "an object", "restore the published config.json")
        self.nested: Mapping[str, Any] = nested or {}
        self._check_plain_head()
        num_target_layers = self._both("num_target_layers")
        if num_target_layers is not None and not _is_int(num_target_layers):
            raise self._refuse("num_target_layers", num_target_layers, "an integer", "write the target's layer count")
        num_layers = self._size("num_hidden_layers")
        layer_types, sliding_window = self._layer_types(num_layers)
        head_dim = self._size("head_dim")
        return DrafterSpec(
            path=str(self.root),
            block_size=self._block_size(),
            mask_token_id=self._mask_token_id(),
            target_layer_ids=self._target_layer_ids(num_target_layers),
            num_layers=num_layers,
            hidden_size=self._size("hidden_size"),
            intermediate_size=self._size("intermediate_size"),
            num_heads=self._size("num_attention_heads"),
            num_kv_heads=self._size("num_key_value_heads"),
            head_dim=head_dim,
            attention_bias=bool(self.config.get("attention_bias", False)),
            attention_sink_bias=bool(self.nested.get("attention_sink_bias", False)),
            num_target_layers=num_target_layers,
            max_position_embeddings=self._size("max_position_embeddings"),
            rope_theta=self._rope_theta(head_dim),
            layer_types=layer_types,
            sliding_window=sliding_window,
            rms_norm_eps=self._rms_norm_eps(),
            warnings=tuple(self.warnings),
        )

    def _refuse(self, key: str, found: object, wanted: object, remedy: str) -> DrafterError:
        return refuse(self.file, key, found, wanted, remedy)

    def _both(self, key: str) -> Any:
        """``key`` from dflash_config or the top level; None if in neither.

        A null inside dflash_config hides the top-level value from upstream, so that pair disagrees too.
        """
        top = self.config.get(key)
        if key not in self.nested:
            return top
        value = self.nested[key]
        if top is not None and top != value:
            found = f"{json.dumps(top)} at the top level and {json.dumps(value)} in dflash_config"
            raise self._refuse(key, found, "one value", "make the two equal, or delete the wrong one")
        return value

    def _size(self, key: str) -> int:
        value = self.config.get(key)
        if not _is_int(value) or value < 1:
            found = "nothing" if value is None else repr(value)
            raise self._refuse(key, found, "a positive integer", "write it: a library's default would be used instead")
        return int(value)

    def _rms_norm_eps(self) -> float:
        """Left out, it is what the server takes, too (``models/dflash.py``)."""
        value = self.config.get("rms_norm_eps", 1e-6)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise self._refuse("rms_norm_eps", repr(value), "a small positive number", "write the trained one")
        return float(value)

    def _check_kind(self) -> None:
        names = self.config.get("architectures")
        if names != [ARCHITECTURE]:
            raise self._refuse("architectures", names, [ARCHITECTURE], CHAIN_REMEDY)
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str) or model_type.startswith(_PARTIAL_ROTARY_MODEL_TYPES):
            remedy = "write qwen3, the drafter's own layers: a target's type brings the target's partial rotary"
            raise self._refuse("model_type", model_type, "qwen3", remedy)

    def _check_no_pickle(self) -> None:
        if (file := self.root / "mask_embedding.pt").exists():
            remedy = "it would be unpickled and put into the target's embedding: remove it or use another drafter"
            raise refuse(file, "mask_embedding", "a pickle file", "safetensors only", remedy)

    def _check_not_quantised(self) -> None:
        remedy = "use the bf16 drafter: quantised ones load and then accept about nothing"
        for key in ("quantization_config", "compression_config"):
            if value := self.config.get(key):
                method = value.get("quant_method") or value.get("quant_algo") if isinstance(value, dict) else None
                raise self._refuse(key, method or value, "nothing", remedy)
        if (file := self.root / "hf_quant_config.json").exists():
            raise refuse(file, "quantization", "a quantised drafter", "no such file", remedy)

    def _check_plain_head(self) -> None:
        for key in (*_OTHER_HEADS, *(k for k in self.nested if k.startswith("lilicorr_"))):
            if value := self._both(key):
                raise self._refuse(key, value, "nothing (a plain DFlash head)", CHAIN_REMEDY)
        if (projector := self._both("projector_type")) in ("domino", "dspark"):
            raise self._refuse("projector_type", projector, "nothing (a plain DFlash head)", CHAIN_REMEDY)
        # Both mean that slot 0 already predicts a token; DFLASH serving would read every slot one place late.
        for key in ("shift_label", "sample_from_anchor"):
            if self._both(key):
                raise self._refuse(key, "true", "false", "slot 0 must be the anchor: retrain without the shift")
        for key, plain in (("output_multiplier", 1.0), ("final_logit_softcapping", 0.0)):
            if (value := self.nested.get(key)) is not None and value != plain:
                self.warnings.append(
                    f"{self.file}: {key}: found {value}, wanted {plain}; it is not applied to the draft's "
                    f"logits: trees keep their order within a depth but may spend the budget less well"
                )

    def _block_size(self) -> int:
        value = self._both("block_size")
        if value is None:
            raise self._refuse("block_size", "nothing", "the trained block size", "write it; 16 is not assumed")
        if not _is_int(value) or not MIN_BLOCK <= value <= MAX_BLOCK:
            remedy = "write the trained block size, the anchor's slot included"
            raise self._refuse("block_size", repr(value), f"an integer in {MIN_BLOCK}..{MAX_BLOCK}", remedy)
        return int(value)

    def _mask_token_id(self) -> int:
        value = self._both("mask_token_id")
        if not _is_int(value) or value < 0:
            found = "nothing" if value is None else repr(value)
            remedy = "write the id used in training: neither mask_token nor the pad token is a substitute"
            raise self._refuse("mask_token_id", found, "a token id >= 0", remedy)
        return int(value)

    def _target_layer_ids(self, num_target_layers: int | None) -> tuple[int, ...]:
        value = self._both("target_layer_ids")
        remedy = "write the ids used in training: a formula's would load and draft badly"
        if not isinstance(value, list) or not value or not all(_is_int(i) for i in value):
            found = "nothing" if value is None else json.dumps(value)
            raise self._refuse("target_layer_ids", found, "a list of layer ids", remedy)
        ids = tuple(value)
        if len(set(ids)) < len(ids):
            raise self._refuse("target_layer_ids", f"duplicates in {value}", "distinct ids", remedy)
        if list(ids) != sorted(ids):
            raise self._refuse("target_layer_ids", value, f"increasing ids like {sorted(ids)}", remedy)
        # Without the target's depth only the lower bound can be checked here.
        check_layer_range(self.file, ids, num_target_layers if num_target_layers is not None else ids[-1] + 2)
        return ids

    def _layer_types(self, num_layers: int) -> tuple[tuple[str, ...] | None, int | None]:
        types = self.config.get("layer_types")
        if types is None:
            return None, None
        if not isinstance(types, list) or len(types) != num_layers:
            found = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise self._refuse("layer_types", found, f"{num_layers} (num_hidden_layers)", "list one type a layer")
        for i, kind in enumerate(types):
            if kind not in _LAYER_TYPES:
                raise self._refuse(f"layer_types[{i}]", repr(kind), " or ".join(_LAYER_TYPES), "correct the type")
        if "sliding_attention" not in types:
            return tuple(types), None
        window = self.config.get("sliding_window")
        if not _is_int(window) or window < 1:
            found = "nothing" if window is None else repr(window)
            remedy = "write the trained window: layer_types names sliding_attention"
            raise self._refuse("sliding_window", found, "a positive integer", remedy)
        # Qwen3Config drops sliding_window unless this is set.
        if self.config["model_type"] == "qwen3" and not self.config.get("use_sliding_window"):
            found = json.dumps(self.config.get("use_sliding_window"))
            raise self._refuse("use_sliding_window", found, "true", "set it: layer_types names sliding_attention")
        return tuple(types), int(window)

    def _rope_theta(self, head_dim: int) -> float:
        """Check every rotary key; the base that Qwen3Config and upstream's get_rope_config end up with."""
        given = {k: self.config[k] for k in ("rope_parameters", "rope_scaling") if self.config.get(k)}
        for key, value in given.items():
            if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
                raise self._refuse(key, json.dumps(value), "one flat object", "all layers share one rotary embedding")
        if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
            found = f"{json.dumps(given['rope_parameters'])} and rope_scaling {json.dumps(given['rope_scaling'])}"
            raise self._refuse("rope_parameters", found, "one of the two", "delete rope_scaling: it would win")
        where, rope = next(iter(given.items()), ("rope_parameters", _NO_ROPE))
        self._check_full_rotary(where, rope, head_dim)
        thetas = {k: v for k, v in (("top level", self.config.get("rope_theta")), (where, rope.get("rope_theta"))) if v}
        if not thetas:
            raise self._refuse(
                "rope_theta",
                "nothing",
                f"the trained base at the top level or in {where}",
                "write it: 10000 would be used instead",
            )
        if len(set(thetas.values())) > 1:
            found = " and ".join(f"{v} ({k})" for k, v in thetas.items())
            raise self._refuse("rope_theta", found, "one value", "make the two equal")
        theta = next(iter(thetas.values()))
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            raise self._refuse("rope_theta", repr(theta), "a positive number", "write the trained base")
        return float(theta)

    def _check_full_rotary(self, where: str, rope: Mapping[str, Any], head_dim: int) -> None:
        """No partial or M-RoPE field of the target may leak in: the drafter rotates all of head_dim, in 1-D.

        An explicit rope_dim is the trained width and makes upstream (models/dflash.py DFlashAttention) ignore
        the leaked fields, so with it they are harmless.
        """
        remedy = "delete it: it belongs to the target"
        if (rope_dim := rope.get("rope_dim")) is not None:
            if not _is_int(rope_dim) or not 0 < rope_dim <= head_dim or rope_dim % 2:
                wanted = f"an even integer up to head_dim {head_dim}"
                raise self._refuse(f"{where}.rope_dim", repr(rope_dim), wanted, "write the trained rotary width")
            return
        for place, values in (("", self.config), (f"{where}.", rope)):
            factor = values.get("partial_rotary_factor")
            if factor is not None and factor != 1:
                raise self._refuse(f"{place}partial_rotary_factor", factor, "nothing or 1", remedy)
            for key in ("mrope_section", "mrope_interleaved"):
                if values.get(key):
                    raise self._refuse(f"{place}{key}", json.dumps(values[key]), "nothing", remedy)
