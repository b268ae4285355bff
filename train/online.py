"""Online training: texts are captured when a batch needs them, through memory, and nothing is left on a disk.

The server writes to a folder of a tmpfs and each file is removed as it is read. Back-pressure is the batch queue's, a
batch being captured only when the trainer has taken one, and within a batch the spool's, in bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import TrainError
from .prepare import as_sample, read_answers, read_settings
from .shards import Sample, check_sample
from .spool import Spool, capturing


class OnlineDataset:
    """Answers of ``prepare`` (token ids) whose features a running engine captures on demand. One rank, one engine."""

    def __init__(self, answers: Mapping[str, Mapping[str, Any]], spool: Spool, *, thinking: str):
        self._spool = spool
        self._lock = threading.Lock()  # the engine's loop runs in one thread at a time
        self._names = [name for name, value in answers.items() if value["answer"]]
        if not self._names:
            raise TrainError("answers: found none with a token in it, want some; run prepare first.")
        self._texts = {name: answers[name]["prompt"] + answers[name]["answer"] for name in self._names}
        self._prompts = {name: len(answers[name]["prompt"]) for name in self._names}
        self.lengths = [len(self._texts[name]) for name in self._names]
        ((name, captured),) = spool.texts({self._names[0]: self._texts[self._names[0]]})
        probe = self._sample(name, captured)
        self.fingerprint: dict[str, Any] = captured.fingerprint | {"thinking": thinking}
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
        names = [self._names[i] for i in indices]
        with self._lock:
            texts = {name: self._texts[name] for name in names}
            samples = {name: self._sample(name, captured) for name, captured in self._spool.texts(texts)}
        return [samples[name] for name in names]

    def _sample(self, name: str, captured: Any) -> Sample:
        sample = as_sample(name, captured, self._prompts[name])
        check_sample(sample)
        return sample


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
    """The answers in ``data`` with an engine (or the server at ``url``) behind them, for as long as the run lasts.

    Raises TrainError, also when there is no memory to capture through.
    """
    answers = read_answers(data)
    if not answers:
        raise TrainError(f"{data}: found no answers, want some; run prepare first.")
    settings = read_settings(data)
    thinking = "unknown" if settings is None else "on" if settings["thinking"] else "off"
    longest = max(len(a["prompt"]) + len(a["answer"]) for a in answers.values())
    with capturing(
        target,
        layer_ids,
        longest,
        label=f"online {data.resolve()}",
        url=url,
        folder=folder,
        final=final,
        extra=extra,
        memory_only=True,
    ) as spool:
        yield OnlineDataset(answers, spool, thinking=thinking)
