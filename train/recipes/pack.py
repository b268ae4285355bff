"""The corpus as token ids, small enough to carry: `{train,validation,test}.u16.xz`, the tokenizer, `pack.json`."""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TrainError
from .chat import conversations
from .corpus import documents
from .settings import Settings
from .tokenizer import CONTROL, END_OF_TEXT, chat_tokenizer, plain_text_tokenizer, render, token_id

Ids = npt.NDArray[np.uint16]
_BATCH = 512
# Two-byte symbols: positions matter modulo two, so say it to the coder.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 2, "lp": 1, "pb": 1, "dict_size": 1 << 26}]


def build(corpus: Path, tokenizer: Path, settings: Settings, out: Path) -> dict[str, Any]:
    """Tokenise the corpus into ``out`` and return `pack.json`'s content.

    Every document ends with `<|endoftext|>`. Training mixes conversations into the files, in random order; the
    held-out splits are files only, with their bytes counted so that bits per byte can be told.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = token_id(chat_tokenizer(tokenizer), END_OF_TEXT)
    facts: dict[str, Any] = {"vocab_size": settings.vocab_size, "end_of_text": end, "splits": {}}
    for split in ("validation", "test"):
        rows = [text for _, text in documents(corpus / f"{split}.jsonl")]
        ids = _joined(_plain(tokenizer, rows), end)
        facts["splits"][split] = _write(out / f"{split}.u16.xz", ids) | {"bytes": sum(len(r.encode()) for r in rows)}

    rng = random.Random(0)
    files = list(documents(corpus / "train.jsonl"))
    rng.shuffle(files)
    room = round(settings.max_tokens * settings.chat_share)
    chats = _until(room, _chat(tokenizer, (m for path, text in files for m in conversations(path, text, rng))))
    room = settings.max_tokens - sum(map(len, chats))
    plain = _until(room, _plain(tokenizer, (text for _, text in files)))
    everything = chats + plain
    rng.shuffle(everything)
    facts["splits"]["train"] = _write(out / "train.u16.xz", _joined(everything, end)) | {
        "files": len(plain),
        "of_files": len(files),
        "conversations": len(chats),
        "conversation_tokens": sum(map(len, chats)),
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    (out / "pack.json").write_text(json.dumps(facts, indent=1))
    return facts


def _plain(directory: Path, texts: Iterable[str]) -> Iterator[Ids]:
    tokenizer, texts = plain_text_tokenizer(directory), iter(texts)
    while batch := list(itertools.islice(texts, _BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint16)


def _chat(directory: Path, chats: Iterable[list[dict[str, str]]]) -> Iterator[Ids]:
    tokenizer, chats = chat_tokenizer(directory), iter(chats)
    while batch := list(itertools.islice(chats, _BATCH)):
        # What users write cannot be control either: made of files, and files that spell control tokens are skipped.
        batch = [c for c in batch if not any(token in m["content"] for m in c for token in CONTROL)]
        for encoding in tokenizer.encode_batch_fast([render(c) for c in batch], add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint16)


def _until(tokens: int, documents: Iterator[Ids]) -> list[Ids]:
    taken: list[Ids] = []
    while tokens > 0 and (ids := next(documents, None)) is not None:
        taken.append(ids)
        tokens -= len(ids) + 1
    return taken


def _joined(documents: Iterable[Ids], end: int) -> Ids:
    mark = np.array([end], dtype=np.uint16)
    return np.concatenate([part for ids in documents for part in (ids, mark)] or [mark])


def _write(file: Path, ids: Ids) -> dict[str, Any]:
    content = ids.astype("<u2").tobytes()
    file.write_bytes(lzma.compress(content, format=lzma.FORMAT_XZ, filters=_FILTERS))
    return {
        "tokens": len(ids),
        "packed_bytes": file.stat().st_size,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def read(folder: Path, split: str) -> Ids:
    """`[n]` uint16 token ids of a split. Raises TrainError if a file is missing or not what `pack.json` says."""
    file = folder / f"{split}.u16.xz"
    try:
        facts = json.loads((folder / "pack.json").read_text())["splits"][split]
        content = lzma.decompress(file.read_bytes())
    except (OSError, ValueError, KeyError, lzma.LZMAError, EOFError) as e:
        raise TrainError(f"{file}: found {type(e).__name__}: {e}, want a packed split; pack the corpus again.") from e
    found = hashlib.sha256(content).hexdigest()
    if found != facts["sha256"]:
        raise TrainError(f"{file}: found sha256 {found}, want {facts['sha256']}; copy or pack it again.")
    return np.frombuffer(content, dtype="<u2")
