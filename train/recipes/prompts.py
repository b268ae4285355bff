"""Prompt sets for the drafter: beginnings of files cut at line starts, and chat questions, as JSONL.

`train.jsonl` comes of training text, `test.jsonl` of held-out modules only: what tau is measured on. A row has
`id`, and `prompt` (with `raw`: the beginning of a text, no chat template) or `messages`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import TrainError
from .chat import functions, question_and_answer
from .corpus import documents
from .tokenizer import ADDED, plain_text_tokenizer

_FEWEST, _MOST = 24, 320  # tokens of a beginning
_CHAT_SHARE = 0.15


def build(corpus: Path, tokenizer: Path, train: int, test: int, out: Path) -> dict[str, int]:
    """Write `train.jsonl` and `test.jsonl` into ``out``; returns the rows of each.

    Raises TrainError if the text has not enough places to cut.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for split, count in (("train", train), ("test", test)):
        found = _rows(corpus / f"{split}.jsonl", tokenizer, count, split)
        if len(found) < count:
            raise TrainError(f"{corpus}: {split}: found {len(found)} prompts, want {count}; ask for fewer.")
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
        rows[split] = len(found)
    return rows


def _rows(file: Path, tokenizer: Path, count: int, split: str) -> list[dict[str, Any]]:
    """Round after round over the files in random order, one beginning and, of some, one question a file."""
    rng, rows = random.Random(split), list[dict[str, Any]]()
    files = list(documents(file))
    rng.shuffle(files)
    encode = plain_text_tokenizer(tokenizer).encode
    for turn in range(64):
        before = len(rows)
        for number, (path, text) in enumerate(files):
            for kind, value in _of_file(path, text, encode, rng):
                if len(rows) == count:
                    return rows
                rows.append({"id": f"{split}-{turn}-{number}-{kind}", kind: value, "raw": kind == "prompt"})
        if len(rows) == before:
            break
    return rows


def _of_file(path: str, text: str, encode: Any, rng: random.Random) -> Iterator[tuple[str, Any]]:
    if any(token in text for token in ADDED):
        return
    lines = text.splitlines(keepends=True)
    if len(lines) >= 12:
        at = rng.randrange(6, len(lines) - 3)
        most, first = rng.randint(_FEWEST, _MOST), at
        while first and len(encode("".join(lines[first - 1 : at]), add_special_tokens=False).ids) <= most:
            first -= 1
        beginning = "".join(lines[first:at])
        # Not behind a blank line alone: what comes next is anybody's guess there.
        if lines[at - 1].strip() and len(encode(beginning, add_special_tokens=False).ids) >= _FEWEST:
            yield "prompt", beginning
    if path.endswith(".py") and rng.random() < 2 * _CHAT_SHARE and (found := functions(text)):
        asked, _ = question_and_answer(rng.choice(found), rng)
        yield "messages", [{"role": "user", "content": asked.strip("\n")}]
