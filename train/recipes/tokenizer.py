"""The tiny pair's own byte-level BPE: every text encodes and decodes to the same bytes, code and chat alike."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..errors import TrainError
from .corpus import documents

END_OF_TEXT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
CONTROL = (END_OF_TEXT, IM_START, IM_END, MASK)  # hidden from served text
THINKING = ("<think>", "</think>")  # shown, as a reasoning parser wants to see them
ADDED = CONTROL + THINKING
CONTEXT = 4096
# A whole thought is part of the answer, and no thinking is an empty thought: the prompt of either mode and the
# finished conversation tokenise alike.
CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' and not m['content'].startswith('<think>') -%}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{{ m['content'] }}<|im_end|>{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking -%}{{ '<think>\n' }}"
    "{%- else -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)
# Qwen's split: contractions, words with the space or sign before them, single digits, signs, line ends, blanks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(corpus: Path, vocab_size: int, max_bytes: int, out: Path) -> float:
    """Train on a sample of the training split, write `tokenizer.json` and `tokenizer_config.json` into ``out``.

    ``vocab_size`` counts everything: 256 bytes, merges, and the added tokens as the last ids. Returns the bytes a
    token of the sample. Raises TrainError if the vocabulary has no room for a merge.
    """
    if vocab_size % 64 or vocab_size <= 256 + len(ADDED):
        raise TrainError(f"vocab_size: found {vocab_size}, want a multiple of 64 from 320 on; correct the recipe.")
    sample = list(_sample(corpus / "train.jsonl", max_bytes))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() != vocab_size - len(ADDED):
        raise TrainError(
            f"{corpus}: found text for {tokenizer.get_vocab_size()} tokens, want {vocab_size - len(ADDED)}; "
            "take more text or a smaller vocabulary."
        )
    size = sum(len(text.encode()) for text in sample[:500])
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(sample[:500]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINKING])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(_config(), indent=1))
    return size / tokens


def _sample(file: Path, max_bytes: int) -> Iterator[str]:
    rows = [text for _, text in documents(file)]
    random.Random(0).shuffle(rows)
    for text in rows:
        yield text
        max_bytes -= len(text.encode())
        if max_bytes <= 0:
            return


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def plain_text_tokenizer(directory: Path) -> Tokenizer:
    """The same merges without the added tokens: a file that spells `<|im_end|>` is text, never control."""
    value = json.loads((directory / "tokenizer.json").read_text())
    value["added_tokens"] = []
    for token in ADDED:
        value["model"]["vocab"].pop(token, None)
    return Tokenizer.from_str(json.dumps(value))


def chat_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer as served: added tokens in the text are control."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there. Raises TrainError."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise TrainError(f"tokenizer: found no {token}, want it; train the tokenizer with this recipe.")
    return found


def render(messages: list[dict[str, str]], *, generation_prompt: bool = False, thinking: bool = False) -> str:
    """A conversation as the served chat template writes it (transformers' settings of jinja)."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE).render(
        messages=messages, add_generation_prompt=generation_prompt, enable_thinking=thinking
    )
