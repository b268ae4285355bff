"""A training recipe: one YAML file, every key checked, the published values as defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import DrafterSpec, check_layer_range, read_json

from .errors import TrainError
from .losses import gamma_for


class Strict(BaseModel):
    """An unknown key is a typing error, not an option."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DrafterShape(Strict):
    """The drafter's own sizes; the rest is the target's."""

    layers: int = Field(5, ge=1)
    heads: int = Field(32, ge=1)
    kv_heads: int = Field(8, ge=1)
    head_dim: int = Field(128, ge=2, multiple_of=2)
    intermediate: int = Field(17408, ge=1)
    block_size: int = Field(16, ge=2, le=32)
    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] | None = None  # those the data was captured at; given here, they must be these
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: int | None = Field(None, ge=1)
    rope_theta: float | None = Field(None, gt=0)  # the target's


class Recipe(Strict):
    """What `fit` does. Defaults are the published recipe: AdamW, lr 6e-4 cosine, warm-up 4%, clip 1, gamma by block."""

    drafter: DrafterShape
    loss: Literal["reference", "argmax", "dpace"] = "reference"
    gamma: float | None = Field(None, gt=0)
    anchors: int = Field(512, ge=1)  # a row and step
    max_length: int = Field(4096, ge=2)  # tokens of a row
    rows: int = Field(1, ge=1)  # rows of a rank's batch
    accumulation: int = Field(1, ge=1)
    epochs: int = Field(6, ge=1)
    lr: float = Field(6e-4, gt=0)
    warmup: float = Field(0.04, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    noise: float = Field(0.0, ge=0)
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    log_every: int = Field(10, ge=1)  # steps; the device is waited for only then
    save_every: int = Field(500, ge=1)
    tree_budgets: tuple[int, ...] = (15, 31, 63)  # of the offline DDTree tau that is logged
    tensorboard: bool = True

    @property
    def decay(self) -> float:
        return self.gamma if self.gamma is not None else gamma_for(self.drafter.block_size)


def load_recipe(file: str | Path) -> Recipe:
    """Read a recipe. Raises TrainError naming the key, the value found and what is allowed."""
    try:
        value = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as e:
        raise TrainError(f"{file}: found {' '.join(str(e).split())}, want a YAML recipe; correct it.") from e
    return parse_recipe(value, file)


def parse_recipe(value: Any, where: str | Path) -> Recipe:
    try:
        return Recipe.model_validate(value)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"])) or "recipe"
        raise TrainError(f"{where}: {key}: found {first['input']!r}, want {first['msg']}; correct the recipe.") from e


def drafter_spec(recipe: Recipe, target: str | Path, layer_ids: tuple[int, ...], feature_width: int) -> DrafterSpec:
    """The drafter that ``recipe`` makes for ``target``. Raises TrainError where data, recipe and target disagree."""
    facts, shape = target_facts(target), recipe.drafter
    if shape.target_layer_ids not in (None, layer_ids):
        raise TrainError(
            f"data: layer ids: found {list(layer_ids)}, want {list(shape.target_layer_ids or ())} as in the recipe; "
            "capture with these, or correct drafter.target_layer_ids."
        )
    check_layer_range(Path("data"), layer_ids, facts.num_hidden_layers)
    if feature_width != len(layer_ids) * facts.hidden_size:
        raise TrainError(
            f"data: features: found {feature_width} wide, want {len(layer_ids) * facts.hidden_size} "
            f"({len(layer_ids)} layer ids x hidden size {facts.hidden_size} of {target}); capture from this target."
        )
    if shape.mask_token_id >= facts.vocab_size:
        raise TrainError(
            f"drafter.mask_token_id: found {shape.mask_token_id}, want below {facts.vocab_size}, the target's size; "
            "choose a token that no text has."
        )
    if shape.heads % shape.kv_heads:
        raise TrainError(
            f"drafter.kv_heads: found {shape.kv_heads}, want a divisor of heads, {shape.heads}; correct the recipe."
        )
    if shape.layer_types is not None and len(shape.layer_types) != shape.layers:
        raise TrainError(
            f"drafter.layer_types: found {len(shape.layer_types)}, want {shape.layers}, one a layer; correct it."
        )
    if shape.layer_types and "sliding_attention" in shape.layer_types and shape.sliding_window is None:
        raise TrainError("drafter.sliding_window: found none, want one for the sliding layers; set it.")
    config = read_json(Path(target) / "config.json", "give the directory of the target")
    text = config.get("text_config", config)
    theta = shape.rope_theta or _rope_theta(text)
    return DrafterSpec(
        path="recipe",
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=layer_ids,
        num_layers=shape.layers,
        hidden_size=facts.hidden_size,
        intermediate_size=shape.intermediate,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention_bias=False,
        attention_sink_bias=False,
        num_target_layers=facts.num_hidden_layers,
        max_position_embeddings=int(text["max_position_embeddings"]),
        rope_theta=theta,
        layer_types=shape.layer_types or ("full_attention",) * shape.layers,
        sliding_window=shape.sliding_window,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
    )


def _rope_theta(text: dict[str, Any]) -> float:
    """Of the target's rope keys only theta: its partial rotary and M-RoPE are not the drafter's."""
    parameters = text.get("rope_parameters") or {}
    return float(text.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
