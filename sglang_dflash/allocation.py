"""KV slots a tree step needs, where upstream's sizing assumes EAGLE's footprint or a chain."""

from __future__ import annotations

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


def alloc_len_per_decode(result: int) -> int:
    """AFTER hook of ``get_alloc_len_per_decode``: a step allocates the verify width.

    Upstream answers topk * steps, the footprint of EAGLE's draft, which would inflate retraction
    checks and sliding-window caps.
    """
    tree = TreeConfig.published()
    return result if tree is None else tree.width
