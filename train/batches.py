"""Captured samples packed into rows for a training step, in a seeded order that a resumed run continues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import TrainError
from .shards import Sample
from .source import Source

_COPIERS = 4


@dataclass(frozen=True)
class Batch:
    """``b`` rows of ``S`` tokens; several documents may share a row."""

    features: Tensor  # [b, S, K*H]
    token_ids: Tensor  # [b, S] int64
    loss_mask: Tensor  # [b, S] bool
    documents: Tensor  # [b, S] int64, -1: padding
    final: Tensor | None  # [b, S, H]


def pack(lengths: Sequence[int], order: Sequence[int], row_length: int, rows: int) -> list[list[list[int]]]:
    """Batches of ``rows`` rows of sample indices, each row at most ``row_length`` tokens, in ``order``, first fit.

    Raises TrainError for a sample longer than a row: cutting it would train on texts that nobody wrote.
    """
    batches: list[list[list[int]]] = []
    current: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        if length > row_length:
            raise TrainError(
                f"sample {index}: found {length} tokens, want at most max_length {row_length}; raise max_length or "
                "prepare shorter texts."
            )
        fit = next((i for i, free in enumerate(room) if free >= length), None)
        if fit is None and len(current) == rows:
            batches.append(current)
            current, room = [], []
        if fit is None or not current:
            current.append([])
            room.append(row_length)
            fit = len(current) - 1
        current[fit].append(index)
        room[fit] -= length
    if current:
        batches.append(current)
    return batches


class Batches:
    """Every epoch's batches of one rank. Batch ``n`` is the same whenever it is asked for: a run resumes at any step.

    All ranks see the same order and take every ``world``-th batch; a rank past the end gets an empty batch, so that all
    take part in every step.
    """

    def __init__(
        self,
        dataset: Source,
        *,
        row_length: int,
        rows: int,
        seed: int,
        epochs: int,
        rank: int = 0,
        world: int = 1,
        mask_token_id: int = -1,
    ):
        self.dataset, self.row_length, self.rows, self.seed = dataset, row_length, rows, seed
        self.rank, self.world, self.mask_token_id = rank, world, mask_token_id
        self._epoch = -1
        self._packed: list[list[list[int]]] = []
        self._probe: Sample | None = None
        # Copies of megabytes, for which torch lets go of the interpreter.
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="batches-copy")
        # Another order packs into another number of batches, so every epoch has its own.
        self.per_epoch = [self._steps(epoch) for epoch in range(epochs)]

    def _steps(self, epoch: int) -> int:
        self._pack(epoch)
        return -(-len(self._packed) // self.world)

    def _pack(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        self._packed = pack(self.dataset.lengths, order, self.row_length, self.rows)
        self._epoch = epoch

    def at(self, epoch: int, step: int, *, pin: bool = False) -> Batch:
        """This rank's batch of a step of an epoch; all padding where the data has run out.

        Raises TrainError for a text that has the mask token in it.
        """
        rows = self.indices(epoch, step)
        samples = iter(self.dataset.fetch([i for row in rows for i in row]))
        return self.collate([[next(samples) for _ in row] for row in rows], pin=pin)

    def indices(self, epoch: int, step: int) -> list[list[int]]:
        """Which samples stand in which row of this rank's batch."""
        self._pack(epoch)
        index = step * self.world + self.rank
        return self._packed[index] if index < len(self._packed) else []

    def collate(self, rows: list[list[Sample]], *, pin: bool = False) -> Batch:
        """One batch, written once: into page-locked memory with ``pin``, of which torch keeps and reuses the blocks."""
        if self._probe is None:
            self._probe = rows[0][0] if rows else self.dataset[0]
        probe = self._probe
        shape = (self.rows, self.row_length)  # always the same: compiled kernels and masks are reused

        def empty(like: Tensor) -> Tensor:
            return torch.empty(*shape, *like.shape[1:], dtype=like.dtype, pin_memory=pin)

        features, final = empty(probe.features), None if probe.final is None else empty(probe.final)
        token_ids = torch.zeros(shape, dtype=torch.int64, pin_memory=pin)
        loss_mask = torch.zeros(shape, dtype=torch.bool, pin_memory=pin)
        documents = torch.full(shape, -1, dtype=torch.int64, pin_memory=pin)

        def fill(r: int) -> None:
            at = 0
            for d, sample in enumerate(rows[r] if r < len(rows) else []):
                check_mask_token(sample, self.mask_token_id)
                part = slice(at, at + len(sample.token_ids))
                at = part.stop
                features[r, part], token_ids[r, part] = sample.features, sample.token_ids
                loss_mask[r, part], documents[r, part] = sample.loss_mask, d
                if final is not None and sample.final is not None:
                    final[r, part] = sample.final
            # Nobody sees padding, but 0 x NaN is NaN: whatever lay in this memory must not stay.
            features[r, at:].zero_()
            if final is not None:
                final[r, at:].zero_()

        list(self._copiers.map(fill, range(self.rows)))
        return Batch(features, token_ids, loss_mask, documents, final)

    def stream(self, epoch: int, step: int, *, ahead: int = 4, pin: bool = False) -> Iterator[Batch]:
        """Batches from (epoch, step) to the end of the last epoch, made by a thread that runs ``ahead``."""
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=ahead)
        stop = threading.Event()

        def put(item: Batch | BaseException | None) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.2)
                    return True
                except queue.Full:
                    continue
            return False

        def produce() -> None:
            try:
                for e in range(epoch, len(self.per_epoch)):
                    for s in range(step if e == epoch else 0, self.per_epoch[e]):
                        if not put(self.at(e, s, pin=pin)):
                            return
                put(None)
            except BaseException as error:  # handed to the consumer, who raises it
                put(error)

        thread = threading.Thread(target=produce, name="batches", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()


def check_mask_token(sample: Sample, mask_token_id: int) -> None:
    """A mask token inside a text would be drafted as if it were one."""
    if bool((sample.token_ids == mask_token_id).any()):
        raise TrainError(
            f"sample {sample.id!r}: found the mask token {mask_token_id} in its text, want a token that no text "
            "has; choose another drafter.mask_token_id."
        )
