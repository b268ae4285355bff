"""A tiny target directory and captured-looking data that a drafter can learn from."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import random_pair
import torch
from safetensors.torch import save_file

from sglang_dflash.provenance import hash_weights
from sglang_dflash.train.recipe import Recipe, parse_recipe
from sglang_dflash.train.shards import Sample, ShardWriter

TESTS = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # where a test's own program finds its helpers
HIDDEN, VOCAB, MASK_ID, LAYERS = 32, 64, 63, 8
LAYER_IDS = [1, 3, 5]


@functools.cache
def target_hash() -> str:
    """Of the weights that `write_target` writes."""
    with tempfile.TemporaryDirectory() as folder:
        return hash_weights(write_target(Path(folder)))


def fingerprint(**changes: Any) -> dict[str, Any]:
    """A server's fingerprint, as captured data carries it."""
    return {
        "sglang": "0.5.23", "attention": "a", "linear_attention": "b", "conv": "c", "dtype": "float32",
        "state_dtype": "float32, float32", "quantization": "none", "layer_ids": LAYER_IDS, "target_config": "d",
        "target_weights": target_hash(), "tokenizer": "f", "chat_template": "none", "thinking": "off",
    } | changes  # fmt: skip


def write_target(folder: Path) -> Path:
    """config.json and the three tensors that training reads."""
    folder.mkdir(parents=True, exist_ok=True)
    config = random_pair.target_config() | {
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.zeros(HIDDEN),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_data(
    folder: Path,
    *,
    samples: int = 12,
    length: int = 40,
    seed: int = 0,
    shuffled: bool = False,
    uneven: bool = False,
    **changes: Any,
) -> Path:
    """Texts that count upwards by a stride of their own: features of the last token tell token and stride.

    ``shuffled``: the tokens have nothing to do with the features. ``uneven``: 9 to ``length`` tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, 3 * HIDDEN, generator=torch.Generator().manual_seed(99))
    strides = torch.randn(4, 3 * HIDDEN, generator=torch.Generator().manual_seed(98))
    with ShardWriter(folder, fingerprint(**changes), shard_bytes=40_000) as writer:
        for i in range(samples):
            size = int(torch.randint(9, length + 1, (1,), generator=generator)) if uneven else length
            start, stride = (int(torch.randint(0, n, (1,), generator=generator)) for n in (VOCAB - 1, 4))
            tokens = (start + (1 + stride) * torch.arange(size)) % (VOCAB - 1)
            features = table[tokens] + strides[stride]
            if shuffled:
                tokens = torch.randint(0, VOCAB - 1, (size,), generator=generator)
            mask = torch.arange(size) >= 5
            writer.add(Sample(f"s{i}", tokens.int(), mask, features))
    return folder


def recipe(**changes: Any) -> Recipe:
    value: dict[str, Any] = {
        "drafter": {
            "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64, "block_size": 4,
            "mask_token_id": MASK_ID,
        },
        "gamma": 4.0, "anchors": 8, "max_length": 80, "rows": 2, "epochs": 2, "lr": 3e-3, "dtype": "float32",
        "log_every": 1, "save_every": 2, "tree_budgets": [7], "tensorboard": False,
    }  # fmt: skip
    return parse_recipe(value | changes, "test")
