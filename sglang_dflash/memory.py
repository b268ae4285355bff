"""How many requests of a hybrid model fit: the formula, printed with its numbers.

Stock SGLang keeps one recurrent-state snapshot a verify row and request
(``memory_pool.py``, ``intermediate_ssm``), so the verify width decides how many requests fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.config import TreeConfig

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True)
class StateMemory:
    """Recurrent-state memory of one worker.

    ``limit``: requests the other limits leave (the wish, the KV cache); None when unknown.
    ``state_bytes``: one state (all linear-attention layers, conv and recurrent), bytes.
    ``slots``: committed states the pool holds (``max_mamba_cache_size``).
    ``slots_per_request``: committed states one running request may hold at once (radix copies included).
    """

    state_bytes: int
    width: int
    slots: int
    slots_per_request: int
    limit: int | None = None

    @property
    def requests(self) -> int:
        """Requests that run: what the committed states allow, or fewer."""
        allowed = self.slots // self.slots_per_request
        return allowed if self.limit is None else min(allowed, self.limit)

    @property
    def snapshot_bytes(self) -> int:
        """Verify snapshots: one a row and request, and one padding request."""
        return (self.requests + 1) * self.width * self.state_bytes

    @property
    def committed_bytes(self) -> int:
        """Committed states and the pool's padding slot."""
        return (self.slots + 1) * self.state_bytes

    def __str__(self) -> str:
        return (
            f"state slots {self.slots} // {self.slots_per_request} a request = {self.slots // self.slots_per_request} "
            f"requests, {self.requests} run; "
            f"committed states ({self.slots} + 1) x {self.state_bytes / MIB:.2f} MiB = "
            f"{self.committed_bytes / MIB:.0f} MiB; verify snapshots ({self.requests} + 1) requests x {self.width} "
            f"rows x {self.state_bytes / MIB:.2f} MiB = {self.snapshot_bytes / MIB:.0f} MiB"
        )


_REMEDY = (
    "lower --speculative-ddtree-budget, raise --mem-fraction-static or --mamba-full-memory-ratio, or set "
    "--mamba-ssm-dtype bfloat16"
)


def _measure(configurator: Any, tree: TreeConfig, limit: int | None = None) -> StateMemory | None:
    """The state memory of a hybrid target, None for a dense one or before the slots are known."""
    from sglang.srt.runtime_context import get_schedule

    config = configurator.mambaish_config
    slots = get_schedule().max_mamba_cache_size
    if config is None or slots is None:
        return None
    return StateMemory(
        state_bytes=int(config.mamba2_cache_params.mamba_cache_per_req),
        width=tree.width,
        slots=max(0, int(slots)),
        slots_per_request=configurator._calculate_mamba_ratio(),
        limit=limit,
    )


def _explained(error: RuntimeError, configurator: Any, tree: TreeConfig) -> RuntimeError:
    memory = _measure(configurator, tree)
    detail = f"{memory}" if memory else "no state slots"
    return RuntimeError(f"DDTree: not even one request fits: {detail}; {_REMEDY}. SGLang: {error}")


def resolve_max_num_reqs(original: Callable, self: Any, token_capacity: int) -> int:
    """AROUND hook of ``KVCacheConfigurator.resolve_max_num_reqs``: print the formula, warn when it lowered the wish.

    Raises RuntimeError with the formula when not even one request fits.
    """
    from sglang.srt.runtime_context import get_schedule

    tree = TreeConfig.published()
    if tree is None or self.is_draft_worker:
        return original(self, token_capacity)
    wished = get_schedule().max_running_requests
    try:
        allowed = original(self, token_capacity)
    except RuntimeError as error:
        raise _explained(error, self, tree) from error
    memory = _measure(self, tree, allowed)
    if memory is not None:
        logger.info("DDTree state memory: %s.", memory)
        if wished is not None and allowed < wished:
            logger.warning(
                "DDTree: max_running_requests lowered from %d to %d: %s. To run more: %s.",
                wished,
                allowed,
                memory,
                _REMEDY,
            )
    return allowed


def handle_max_mamba_cache(original: Callable, self: Any, total_rest_memory: float) -> float:
    """AROUND hook of ``KVCacheConfigurator._handle_max_mamba_cache``: its error, with the formula."""
    tree = TreeConfig.published()
    try:
        return original(self, total_rest_memory)
    except RuntimeError as error:
        if tree is None:
            raise
        raise _explained(error, self, tree) from error
