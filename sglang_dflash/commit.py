"""Make the accepted path permanent: recurrent state, target KV, and the drafter's KV.

The order matters. Logprobs and the recurrent state are read before anything moves; the new lengths
are published before the copies, so that the next step's scheduling overlaps them.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, move_accept_tokens_to_target_kvcache
from torch import Tensor

from sglang_dflash.kernels.accept_walk import AcceptedPaths


def commit_recurrent_state(target_worker: Any, batch: Any, accepted: AcceptedPaths, width: int) -> None:
    """Copy the last accepted node's snapshot (and a tracked length's, for the radix cache) into the state pool.

    Never the chain's ``_update_target_mamba_state_after_verify``: it takes step ``accept_len - 1``, which in a
    tree is some other node, and fails only as wrong text.
    """
    commit_mamba_states_after_verify(target_worker, batch, accepted.accept_lens, accepted.accept_index, width)


def compact_target_kv(batch: Any, accepted: AcceptedPaths, allocator: Any) -> None:
    """Move the accepted nodes' KV to the front of the request's window, where a chain would have written it."""
    move_accept_tokens_to_target_kvcache(batch, accepted.accept_index, accepted.accept_lens - 1, allocator)


def compact_hidden(hidden: Tensor, accepted: AcceptedPaths) -> Tensor:
    """Context features of the accepted path, ``[bs * width, F]`` -> ``[bs * B, F]``.

    Rows past a request's accepted length are row 0's and must not be written anywhere.
    """
    rows = accepted.accept_index.clamp(min=0).view(-1).long()
    return hidden.index_select(0, rows)
