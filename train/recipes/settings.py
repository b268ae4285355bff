"""The recipe of a tiny pair: one YAML file, every key checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ..errors import TrainError


@dataclass(frozen=True)
class TargetShape:
    """Sizes of the hybrid target; every fourth layer is full attention, the others gated delta net."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    max_position_embeddings: int


@dataclass(frozen=True)
class Fit:
    """How the target is trained; the time is not part of it, the command gives it."""

    length: int
    rows: int  # of a step
    lr: float
    adam_lr: float
    weight_decay: float
    warmup: float  # share of the time
    eval_seconds: float
    eval_rows: int


@dataclass(frozen=True)
class Settings:
    """Everything that makes a pair's target."""

    sources: Path  # requirements file, beside the recipe
    held_out: dict[str, tuple[str, ...]]
    vocab_size: int
    tokenizer_bytes: int
    chat_share: float
    max_tokens: int
    target: TargetShape
    fit: Fit

    @property
    def requirements(self) -> list[str]:
        """`name==version` lines of the sources file."""
        lines = (line.partition("#")[0].strip() for line in self.sources.read_text().splitlines())
        return [line for line in lines if line]


def load(file: Path) -> Settings:
    """Read a recipe. Raises TrainError naming a key that is missing, unknown or of another type."""
    try:
        value = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise TrainError(f"{file}: found {' '.join(str(e).split())}, want a YAML recipe; correct it.") from e
    top = _checked(file, "recipe", Settings, value)
    top["sources"] = file.parent / top["sources"]
    top["held_out"] = {split: tuple(prefixes) for split, prefixes in top["held_out"].items()}
    top["target"] = TargetShape(**_checked(file, "target", TargetShape, top["target"]))
    top["fit"] = Fit(**_checked(file, "fit", Fit, top["fit"]))
    return Settings(**top)


def _checked(file: Path, where: str, kind: type, value: Any) -> dict[str, Any]:
    names = {f.name: f.type for f in fields(kind)}
    found = set(value) if isinstance(value, dict) else set()
    if found != set(names):
        raise TrainError(
            f"{file}: {where}: found keys {sorted(found - set(names))} too many and {sorted(set(names) - found)} "
            f"too few, want exactly {sorted(names)}; correct the recipe."
        )
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}
    for name, type_name in names.items():
        wanted = kinds.get(str(type_name))
        if wanted and (not isinstance(value[name], wanted) or isinstance(value[name], bool)):
            raise TrainError(f"{file}: {where}.{name}: found {value[name]!r}, want a {type_name}; correct the recipe.")
    return dict(value)
