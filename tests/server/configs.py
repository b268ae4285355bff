"""The servers that the tests share: each is started once a session, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

EXTRA_BUFFER = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
CONTEXT = 200
SMALL_POOL = 1792  # tokens: too few for eight growing requests
SEEDED = ("--enable-deterministic-inference",)


@dataclass(frozen=True)
class Setup:
    """A target, a drafter's block size and the server's options."""

    kind: str
    block_size: int = 8
    options: tuple[str, ...] = ()


# Eight requests that run into the context limit inside a block, in chunks of 64, in a pool too small for all of them.
_CROWDED = ("--context-length", str(CONTEXT), "--max-running-requests", "8", "--chunked-prefill-size", "64",
            "--max-total-tokens", str(SMALL_POOL), "--schedule-conservativeness", "0.05",
            "--speculative-ddtree-budget", "31")  # fmt: skip

SETUPS = {
    "hybrid": Setup(
        "hybrid", options=("--speculative-ddtree-budget", "24", *EXTRA_BUFFER, "--max-mamba-cache-size", "60")
    ),
    "dense": Setup("dense", options=("--speculative-ddtree-budget", "24", "--enable-custom-logit-processor")),
    "crowded-dense-page-16": Setup("dense", 16, (*_CROWDED, "--page-size", "16")),
    "crowded-no-buffer": Setup(
        "hybrid", 16, (*_CROWDED, "--page-size", "1", "--mamba-radix-cache-strategy", "no_buffer",
                       "--disable-overlap-schedule", "--enable-return-hidden-states", "--max-mamba-cache-size", "60")
    ),
    "crowded-lazy": Setup(
        "hybrid", 16, (*_CROWDED, "--page-size", "1", "--mamba-radix-cache-strategy", "extra_buffer_lazy",
                       "--mamba-track-interval", "64", "--max-mamba-cache-size", "80")
    ),
}  # fmt: skip


def on(*names: str) -> Callable:
    """Run a test on these servers: it gets the fixture ``served``."""
    unknown = set(names) - set(SETUPS)
    assert not unknown, unknown
    return pytest.mark.parametrize("served", names, indirect=True)
