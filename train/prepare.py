"""prepare: the target answers the prompts, then the same server's tee captures what it saw while reading them.

    OUT/answers.jsonl   a line an answer, appended and synced: prompt and answer in tokens
    OUT/                shards, manifest and fingerprint (`shards`)

Both halves resume: what is on disk is not asked for again, what is not whole is asked for again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from sglang_dflash.drafter import target_facts
from sglang_dflash.drafter_config import check_layer_range

from .errors import TrainError
from .layer_ids import default_layer_ids
from .prompts import PromptText, Template, read_prompts
from .server import Engine, answering, capture_texts, capturing
from .shards import Sample, ShardWriter, check_sample, write_atomically

ANSWERS, SETTINGS = "answers.jsonl", "prepare.json"
_IN_FLIGHT = 256 << 20  # bytes of features asked for at once: the spool's back-pressure


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


def prepare(job: Prepare, console: Console | None = None) -> int:
    """Answer and capture; returns the number of samples in ``out``. Raises TrainError."""
    console = console or Console(stderr=True)
    layers = target_facts(job.target).num_hidden_layers
    ids = job.layer_ids or default_layer_ids(layers, min(5, max(1, layers - 3)))
    check_layer_range(Path(job.target) / "config.json", ids, layers)
    texts = read_prompts(job.prompts, job.limit)
    template = Template(job.target, thinking=job.thinking)
    prompts = template.all_tokens(texts, job.max_length - 1)
    _check_settings(job, ids, texts)
    answers = _answer(job, prompts, console)
    return _capture(job, ids, answers, console)


def _check_settings(job: Prepare, ids: tuple[int, ...], texts: Sequence[PromptText]) -> None:
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
    if file.exists():
        have = json.loads(file.read_text())
        for key, value in settings.items():
            if have[key] != value:
                raise TrainError(f"{file}: {key}: found {have[key]}, want {value} as given now; use a new --out.")
    else:
        job.out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(settings, indent=1))


def read_answers(out: Path) -> dict[str, dict[str, Any]]:
    """Answers on disk by prompt id. Half a last line, of a run that was killed, does not count."""
    file = out / ANSWERS
    if not file.exists():
        return {}
    raw = file.read_text()
    whole = raw[: raw.rfind("\n") + 1]
    if whole != raw:
        write_atomically(file, whole)
    return {value["id"]: value for value in map(json.loads, whole.splitlines())}


def _answer(job: Prepare, prompts: Mapping[str, list[int]], console: Console) -> dict[str, dict[str, Any]]:
    have = read_answers(job.out)
    for name, value in have.items():
        if name in prompts and value["prompt"] != prompts[name]:
            raise TrainError(
                f"{job.out / ANSWERS}: {name!r}: found another prompt of that id, want the same; use a new --out."
            )
    missing = {name: tokens for name, tokens in prompts.items() if name not in have}
    if missing:
        with (
            answering(job.target, job.max_length, job.url, job.engine) as engine,
            Progress(console=console) as progress,
            (job.out / ANSWERS).open("a") as file,
        ):
            bar = progress.add_task("answers", total=len(prompts), completed=len(have))
            for batch in _batches(missing, 64):
                for line in _answer_batch(job, engine, batch):
                    file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
                progress.advance(bar, len(batch))
    return {name: value for name, value in read_answers(job.out).items() if name in prompts}


def _answer_batch(job: Prepare, engine: Engine, batch: Mapping[str, list[int]]) -> Iterator[str]:
    """One request a prompt of one length limit: a prompt near the limit gets what is left."""
    by_room: dict[int, list[str]] = {}
    for name, tokens in batch.items():
        by_room.setdefault(min(job.max_new_tokens, job.max_length - len(tokens)), []).append(name)
    for room, names in by_room.items():
        sampling = {"temperature": 0} | dict(job.sampling) | {"max_new_tokens": room}
        answers = engine.generate([batch[n] for n in names], sampling, [f"answer:{n}" for n in names])
        for name, answer in zip(names, answers, strict=True):
            yield json.dumps({"id": name, "prompt": batch[name], "answer": answer})


def _capture(job: Prepare, ids: tuple[int, ...], answers: Mapping[str, Any], console: Console) -> int:
    texts = {name: value["prompt"] + value["answer"] for name, value in answers.items() if value["answer"]}
    skipped = len(answers) - len(texts)
    if not texts:
        raise TrainError(f"{job.out / ANSWERS}: found no answer with a token in it, want some; check the prompts.")
    width = len(ids) * target_facts(job.target).hidden_size * 4
    per_batch = max(1, _IN_FLIGHT // (job.max_length * width))
    fingerprint_file = job.out / "fingerprint.json"
    if fingerprint_file.exists():
        done = ShardWriter(job.out, json.loads(fingerprint_file.read_text())).done
        texts_left = {name: tokens for name, tokens in texts.items() if name not in done}
    else:
        done, texts_left = set(), texts
    if texts_left:
        with (
            capturing(
                job.target,
                ids,
                job.max_length,
                url=job.url,
                folder=job.capture_folder,
                final=job.final,
                extra=job.engine,
            ) as (engine, folder),
            Progress(console=console) as progress,
        ):
            bar = progress.add_task("capture", total=len(texts), completed=len(done & set(texts)))
            writer: ShardWriter | None = None
            for batch in _batches(texts_left, per_batch):
                captured = capture_texts(engine, folder, batch)
                for name, got in captured.items():
                    if writer is None:
                        print_ = got.fingerprint | {"thinking": "on" if job.thinking else "off"}
                        if tuple(print_["layer_ids"]) != ids:
                            raise TrainError(
                                f"server: layer_ids: found {print_['layer_ids']}, want {list(ids)}; start it with a "
                                "drafter of those layers."
                            )
                        writer = ShardWriter(job.out, print_)
                    sample = _sample(name, got.tensors, len(answers[name]["prompt"]))
                    check_sample(sample)
                    writer.add(sample)
                progress.advance(bar, len(batch))
            if writer is not None:
                writer.close()
    if skipped:
        console.print(f"{skipped} empty answers were left out.", style="yellow")
    return len(texts)


def _sample(name: str, tensors: Mapping[str, torch.Tensor], prompt: int) -> Sample:
    token_ids = tensors["token_ids"]
    return Sample(name, token_ids, torch.arange(len(token_ids)) >= prompt, tensors["features"], tensors.get("final"))


def _batches(texts: Mapping[str, list[int]], size: int) -> Iterator[dict[str, list[int]]]:
    items = iter(texts.items())
    while batch := dict(islice(items, size)):
        yield batch
