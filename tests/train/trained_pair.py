"""A tiny target and a drafter that this trainer made for it from this server's own hidden states, in a minute.

The target has random weights, so its texts can only be learnt by heart: the drafter has seen three of four of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import random_pair
import torch

from sglang_dflash.drafter import read_drafter_spec
from sglang_dflash.train.evaluate import Captured, capture_answers
from sglang_dflash.train.export import export
from sglang_dflash.train.fit import Fit
from sglang_dflash.train.recipe import Recipe, parse_recipe
from sglang_dflash.train.served import Answer, Mode, Prompt, Serving
from sglang_dflash.train.shards import Sample, ShardWriter

NEW_TOKENS = 72
_WORDS = ("river", "copper", "seven", "lamp", "orbit", "paper", "violin", "moss")


@dataclass(frozen=True)
class Pair:
    target: Path
    drafter: Path  # trained
    untrained: Path
    prompts: list[Prompt]
    answers: tuple[Answer, ...]
    texts: list[Captured]
    data: Path
    run: Path


def prompts(count: int = 16) -> list[Prompt]:
    """Bytes are tokens: the byte-level tokenizer's ids of ASCII text."""
    ids = random_pair.byte_vocabulary()
    texts = [f"{_WORDS[i % 8]}:{_WORDS[(3 * i + 1) % 8]}:{i}" for i in range(count)]
    return [Prompt(f"p{i}", tuple(ids[c] for c in text)) for i, text in enumerate(texts)]


def recipe(**changes: object) -> Recipe:
    value = {
        "drafter": {
            "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256,
            "block_size": random_pair.BLOCK_SIZE,
            "mask_token_id": random_pair.drafter_config()["dflash_config"]["mask_token_id"],
        },
        "anchors": 32, "max_length": 112, "rows": 6, "epochs": 45, "lr": 4e-3, "dtype": "float32",
        "log_every": 1000, "save_every": 1000, "tree_budgets": [7], "tensorboard": False,
    }  # fmt: skip
    return parse_recipe(value | changes, "test")


def write_data(folder: Path, texts: list[Captured], fingerprint: dict, *, shuffled: bool = False) -> Path:
    """``shuffled``: every text with the features of another one."""
    order = [(i + 1) % len(texts) for i in range(len(texts))] if shuffled else range(len(texts))
    with ShardWriter(folder, fingerprint | {"thinking": "off"}) as writer:
        for i, text in enumerate(texts):
            features = texts[order[i]].features
            size = min(len(features), len(text.token_ids))
            mask = torch.arange(size) >= text.answer_start
            writer.add(Sample(f"s{i}", text.token_ids[:size], mask, features[:size].clone()))
    return folder


def make_pair(work: Path) -> Pair:
    """One server start and some forty epochs."""
    target, untrained = random_pair.write(work / "models")
    asked = prompts()
    (work / "logs").mkdir()
    (work / "spool").mkdir()
    serving = Serving(str(target), False, work / "logs", 4, 128, {})
    spec = read_drafter_spec(untrained)
    with serving.start(Mode("7"), untrained, lambda line: None, capture_into=work / "spool") as client:
        answers = client.run(asked, NEW_TOKENS, 4, lambda: None).answers
        texts = capture_answers(client, asked, answers, spec, work)
        fingerprint = client.fingerprint
    data = write_data(work / "data", [t for i, t in enumerate(texts) if i % 4], fingerprint)
    Fit(target, [data], work / "run", recipe()).run()
    drafter = export(work / "run", work / "drafter", dtype=torch.float32)
    return Pair(target, drafter, untrained, asked, answers, texts, data, work / "run")


def write_prompts(file: Path) -> Path:
    """The same prompts as a prompt set."""
    symbols = {i: symbol for symbol, i in random_pair.byte_vocabulary().items()}
    lines = [{"id": p.id, "raw": True, "prompt": "".join(symbols[t] for t in p.token_ids)} for p in prompts()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
