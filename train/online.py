"""Online training: texts are captured when a batch needs them, through memory, and nothing is left on a disk.

The server writes to a folder of a tmpfs and each file is removed as it is read. Back-pressure is the batch queue's: a
batch is captured only when the trainer has taken one, so at most a few batches of features exist at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .errors import TrainError
from .prepare import read_answers
from .server import Engine, capture_texts, capturing
from .shards import Sample, check_sample


class OnlineDataset:
    """Answers of ``prepare`` (token ids) whose features a running engine captures on demand. One rank, one engine."""

    def __init__(self, answers: Mapping[str, Mapping[str, Any]], engine: Engine, folder: Path, *, thinking: str):
        self._engine, self._folder = engine, folder
        self._names = [name for name, value in answers.items() if value["answer"]]
        if not self._names:
            raise TrainError("answers: found none with a token in it, want some; run prepare first.")
        self._texts = {name: answers[name]["prompt"] + answers[name]["answer"] for name in self._names}
        self._prompts = {name: len(answers[name]["prompt"]) for name in self._names}
        self.lengths = [len(self._texts[name]) for name in self._names]
        (probe,) = self._capture([self._names[0]])
        self.fingerprint: dict[str, Any] = self._fingerprint | {"thinking": thinking}
        self.feature_width = probe.features.shape[1]
        self.has_final = probe.final is not None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.fingerprint["layer_ids"])

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Sample:
        return self.fetch([index])[0]

    def fetch(self, indices: Sequence[int]) -> list[Sample]:
        """Capture several texts with one call to the engine, which batches them. Raises TrainError."""
        return self._capture([self._names[i] for i in indices]) if indices else []

    def _capture(self, names: Sequence[str]) -> list[Sample]:
        captured = capture_texts(self._engine, self._folder, {name: self._texts[name] for name in names})
        samples = []
        for name in names:
            tensors, token_ids = captured[name].tensors, captured[name].tensors["token_ids"]
            mask = torch.arange(len(token_ids)) >= self._prompts[name]
            sample = Sample(name, token_ids, mask, tensors["features"], tensors.get("final"))
            check_sample(sample)
            samples.append(sample)
        self._fingerprint = captured[names[0]].fingerprint
        return samples


@contextmanager
def online(
    target: str,
    data: Path,
    layer_ids: tuple[int, ...],
    *,
    url: str | None = None,
    folder: Path | None = None,
    final: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Iterator[OnlineDataset]:
    """The answers in ``data`` with an engine (or the server at ``url``) behind them, for as long as the run lasts."""
    answers = read_answers(data)
    if not answers:
        raise TrainError(f"{data}: found no answers, want some; run prepare first.")
    thinking = "unknown"
    if (settings := data / "prepare.json").exists():
        thinking = "on" if json.loads(settings.read_text())["thinking"] else "off"
    longest = max(len(a["prompt"]) + len(a["answer"]) for a in answers.values())
    with capturing(target, layer_ids, longest, url=url, folder=folder, final=final, extra=extra) as (engine, spool):
        yield OnlineDataset(answers, engine, spool, thinking=thinking)
