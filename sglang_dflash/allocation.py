"""KV slots a tree step needs, where upstream's sizing assumes EAGLE's footprint or a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.config import TreeConfig


def extra_context_len(result: int) -> int:
    """AFTER hook of ``get_req_to_token_extra_context_len``: columns of a request's row past the context.

    A step reserves two windows (``dflash_info_v2.prepare_for_decode``), rounded up to a page; without
    room for them a request that reaches the context limit inside a block writes past its row.
    """
    tree = TreeConfig.published()
    if tree is None:
        return result
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size

    return max(result, 2 * tree.width + get_alloc_page_size() - 1)


def verify_mask_context(original: Callable, **kwargs: Any) -> Any:
    """AROUND hook of ``maybe_create_verify_mask``: the mask of a request whose last step passed the context limit.

    Overlap starts one more step for a request that has just reached its limit, with a prefix up to a block past it;
    a buffer sized for the context alone would be written past its end.
    """
    tree = TreeConfig.published()
    if tree is not None and not kwargs["is_draft_runner"]:
        kwargs["max_context_len"] += 2 * tree.width
    return original(**kwargs)


def alloc_len_per_decode(result: int) -> int:
    """AFTER hook of ``get_alloc_len_per_decode``: a step allocates the verify width.

    Upstream answers topk * steps, the footprint of EAGLE's draft, which would inflate retraction
    checks and sliding-window caps.
    """
    tree = TreeConfig.published()
    return result if tree is None else tree.width
