"""prepare: the target answers the prompts, then the same server's tee captures what it saw while reading them.

    OUT/prepare.json    the settings: one folder, one setting
    OUT/answers.jsonl   the answers (`answers`)
    OUT/                shards, manifest and fingerprint (`shards`)

Both halves resume: what is on disk is not asked for again, what is not whole is asked for again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import check_layer_range

from .answers import ANSWERS, AnswerFile, read_answers
from .disk import check_space, unwritable, write_atomically
from .errors import TrainError
from .layer_ids import default_layer_ids
from .prompts import Template, read_prompts
from .server import Request, answering
from .shards import FINGERPRINT, MANIFEST, Sample, ShardWriter, check_same, read_fingerprint
from .spool import Captured, capturing

SETTINGS = "prepare.json"
_AT_ONCE = 512  # answers asked for at a time: more than a server runs, so that it is never idle
_SPARE = 7  # tokens that SGLang keeps from a request's input (its `max_req_input_len`)
_SYNC_S = 1.0  # answers reach the disk at least so often


@dataclass(frozen=True)
class Prepare:
    """What to prepare. ``sampling`` is the target's own setting for the answers; {} is greedy."""

    target: str
    prompts: str
    out: Path
    layer_ids: tuple[int, ...] = ()
    max_length: int = 4096
    max_new_tokens: int = 2048
    thinking: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False
    limit: int | None = None
    url: str | None = None
    capture_folder: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def thinking_flag(self) -> str:
        """As in a fingerprint."""
        return "on" if self.thinking else "off"


def prepare(job: Prepare, console: Console | None = None) -> int:
    """Answer and capture; returns the number of samples in ``out``. Raises TrainError or DrafterError."""
    console = console or Console(stderr=True)
    facts = target_facts(job.target)
    layers = facts.num_hidden_layers
    ids = job.layer_ids or default_layer_ids(layers, min(5, max(1, layers - 3)))
    check_layer_range(Path(job.target) / "config.json", ids, layers)
    _check_lengths(job, facts.context_len)
    template = Template(job.target, thinking=job.thinking)
    prompts = template.all_tokens(read_prompts(job.prompts, job.limit), job.max_length - 1)
    _check_settings(job, ids)
    with closing(AnswerFile(job.out)) as answers:
        _answer(job, prompts, answers, console)
        return _capture(job, ids, {name: answers.have[name] for name in prompts}, console)


def _check_lengths(job: Prepare, context: int | None) -> None:
    context = job.engine.get("context_length", context)
    most = None if context is None else context - _SPARE
    if job.max_length < 2 or (most is not None and job.max_length > most):
        limit = "at least 2" if most is None else f"2..{most} (the target's context of {context} less {_SPARE})"
        raise TrainError(f"--max-length: found {job.max_length}, want {limit}; correct it.")
    if job.max_new_tokens < 1:
        raise TrainError(f"--max-new-tokens: found {job.max_new_tokens}, want at least 1; correct it.")


def _check_settings(job: Prepare, ids: tuple[int, ...]) -> None:
    """A folder holds what one setting made: another would mix texts that serving never mixes."""
    settings = {
        "target": job.target,
        "layer_ids": list(ids),
        "max_length": job.max_length,
        "max_new_tokens": job.max_new_tokens,
        "thinking": job.thinking,
        "sampling": dict(job.sampling),
        "final": job.final,
    }
    file = job.out / SETTINGS
    have = read_settings(job.out)
    if have is None:
        try:
            job.out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise unwritable(job.out, e) from e
        write_atomically(file, json.dumps(settings, indent=1))
        return
    for key, value in settings.items():
        if have.get(key) != value:
            raise TrainError(f"{file}: {key}: found {have.get(key)}, want {value} as given now; use a new --out.")


def read_settings(out: Path) -> dict[str, Any] | None:
    """prepare.json of a folder, None if it has none. Raises TrainError for one that is damaged."""
    file = out / SETTINGS
    try:
        value: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise TrainError(f"{file}: found {type(e).__name__}, want the settings of a prepare; use a new --out.") from e
    if not isinstance(value, dict):
        raise TrainError(f"{file}: found a JSON {type(value).__name__}, want an object; use a new --out.")
    return value


def _answer(job: Prepare, prompts: Mapping[str, list[int]], answers: AnswerFile, console: Console) -> None:
    """Ask for what is not answered yet."""
    for name, tokens in prompts.items():
        if name in answers.have and answers.have[name]["prompt"] != tokens:
            raise TrainError(
                f"{answers.file}: {name!r}: found another prompt of that id, want the same; use a new --out."
            )
    run = f"answer-{uuid.uuid4().hex}:"

    def requests() -> Iterator[Request]:
        for name, tokens in missing.items():
            room = min(job.max_new_tokens, job.max_length - len(tokens))  # near the limit, what is left
            yield Request(run + name, tokens, {"temperature": 0} | dict(job.sampling) | {"max_new_tokens": room})

    missing = {name: tokens for name, tokens in prompts.items() if name not in answers.have}
    if not missing:
        return
    with answering(job.target, job.max_length, job.url, job.engine) as engine, _progress(console) as progress:
        bar = progress.add_task("answers", total=len(prompts), completed=len(prompts) - len(missing))
        came: list[tuple[str, list[int], list[int]]] = []
        saved = time.monotonic()
        try:
            for request, answer in engine.stream(requests(), _AT_ONCE):
                came.append((request.rid.removeprefix(run), request.tokens, answer))
                progress.advance(bar)
                if time.monotonic() - saved > _SYNC_S:
                    batch, came = came, []
                    answers.add(batch)
                    saved = time.monotonic()
        finally:
            answers.add(came)


def _capture(job: Prepare, ids: tuple[int, ...], answers: Mapping[str, Mapping[str, Any]], console: Console) -> int:
    """Capture what is not captured yet; the number of samples in the folder."""
    texts = {name: value["prompt"] + value["answer"] for name, value in answers.items() if value["answer"]}
    if not texts:
        raise TrainError(f"{job.out / ANSWERS}: found no answer with a token in it, want some; check the prompts.")
    if len(texts) < len(answers):
        console.print(f"{len(answers) - len(texts)} empty answers are left out.", style="yellow")
    writer: ShardWriter | None = None
    if (job.out / MANIFEST).exists():
        writer = ShardWriter(job.out, read_fingerprint(job.out))
    try:
        missing = {name: tokens for name, tokens in texts.items() if writer is None or name not in writer.done}
        if missing:
            # Two bytes are the least: that much is known before a server has started.
            _check_room(job, ids, missing, 2)
            with (
                capturing(
                    job.target,
                    ids,
                    job.max_length,
                    label=str(job.out.resolve()),
                    url=job.url,
                    folder=job.capture_folder,
                    final=job.final,
                    extra=job.engine,
                ) as spool,
                _progress(console) as progress,
            ):
                bar = progress.add_task("capture", total=len(texts), completed=len(texts) - len(missing))
                first = True
                for name, captured in spool.texts(missing):
                    if first:
                        writer = _begin(job, ids, missing, captured, writer)
                        first = False
                    assert writer is not None
                    writer.add(as_sample(name, captured, len(answers[name]["prompt"])))
                    progress.advance(bar)
    finally:
        if writer is not None:
            writer.close()
    assert writer is not None
    return len(writer.done)


def _begin(
    job: Prepare, ids: tuple[int, ...], missing: Mapping[str, list[int]], captured: Captured, writer: ShardWriter | None
) -> ShardWriter:
    """With the first capture in hand: is there room for all, and is it the server that captured what is there?"""
    _check_room(job, ids, missing, captured.features.element_size())
    fingerprint = captured.fingerprint | {"thinking": job.thinking_flag}
    if writer is None:
        return ShardWriter(job.out, fingerprint)
    check_same(writer.fingerprint, fingerprint, job.out / FINGERPRINT, "as of the server that captures now")
    return writer


def _check_room(job: Prepare, ids: tuple[int, ...], missing: Mapping[str, list[int]], size: int) -> None:
    """Raise TrainError unless the disk holds all that is to be captured, with ``size`` bytes a number."""
    width = (len(ids) + job.final) * target_facts(job.target).hidden_size
    check_space(job.out, (width * size + 5) * sum(map(len, missing.values())))


def as_sample(name: str, captured: Captured, prompt: int) -> Sample:
    """All tokens after the first ``prompt`` are the target's own."""
    mask = torch.arange(len(captured.token_ids)) >= prompt
    return Sample(name, captured.token_ids, mask, captured.features, captured.final)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


__all__ = ["ANSWERS", "SETTINGS", "Prepare", "as_sample", "prepare", "read_answers", "read_settings"]
