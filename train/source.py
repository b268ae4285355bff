"""Where training samples come from: shards on disk (`shards`) or a server that captures on demand (`online`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .shards import Sample


class Source(Protocol):
    """Samples by index. Lengths are known before a sample is fetched, so batches can be packed."""

    lengths: list[int]
    fingerprint: dict[str, Any]

    @property
    def layer_ids(self) -> tuple[int, ...]: ...

    @property
    def feature_width(self) -> int: ...

    @property
    def has_final(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def fetch(self, indices: Sequence[int]) -> list[Sample]: ...
