"""What `fit` trains when no recipe is given: the published settings on the shape of the published drafters."""

from __future__ import annotations

from typing import Any

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import read_json
from sglang_dflash.provenance import target_folder

from .errors import TrainError
from .layer_ids import default_layer_ids
from .recipe import Recipe, parse_recipe

# Of z-lab's drafters, by the target's vocabulary: ids that its texts never contain.
_MASK_TOKENS = {248320: 248070, 151936: 151669}


def default_recipe(target: str) -> Recipe:
    """The recipe for ``target``. Raises TrainError where its mask token would have to be guessed."""
    vocabulary = target_facts(target).vocab_size
    config = read_json(target_folder(target) / "config.json", "give the directory of the target")
    text: dict[str, Any] = config.get("text_config", config)
    if vocabulary not in _MASK_TOKENS:
        raise TrainError(
            f"--config: found none for a target of {vocabulary} tokens, want a recipe with drafter.mask_token_id; a "
            "mask token is published for Qwen3 (151936) and Qwen3.5/3.6 (248320) only."
        )
    inner = text.get("intermediate_size") or 3 * text["hidden_size"]
    drafter = {"mask_token_id": _MASK_TOKENS[vocabulary], "intermediate": inner}
    return parse_recipe({"drafter": drafter}, "default recipe")


def online_layer_ids(target: str) -> tuple[int, ...]:
    """The context layers that `prepare` would choose."""
    layers = target_facts(target).num_hidden_layers
    return default_layer_ids(layers, min(5, max(1, layers - 3)))
