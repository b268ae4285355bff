"""Who sees whom in a training row: blocks of a drafter over the target's packed context.

A query is slot ``o`` of the block drafted at ``anchor`` (row ``j * B + o`` of ``N * B``). It sees the context before
its anchor, never at it (at serving the target has not run on the anchor yet), in the anchor's own document, and its own
block. In a sliding layer it sees no further back than ``window - 1`` positions and no later slot of its block.

The dense mask is the reference; ``flex_mask`` is the same rule as a FlexAttention ``BlockMask``, which skips what
nobody sees. Both come from one predicate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Mask = Tensor | BlockMask


@dataclass(frozen=True)
class Layout:
    """What decides visibility in a batch of ``b`` rows with ``S`` context tokens and ``N`` blocks of ``B`` slots."""

    anchors: Tensor  # [b, N] int64, index into the row's context; -1: an unused block
    documents: Tensor  # [b, S] int, the document of each context token; -1: padding
    block_size: int

    @property
    def queries(self) -> int:
        return self.anchors.shape[1] * self.block_size

    @property
    def context(self) -> int:
        return self.documents.shape[1]


def visible(layout: Layout, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's ``mask_mod`` (batch, head, query, key -> bool) for full layers or a sliding ``window``.

    Keys 0..S-1 are the context, S.. the blocks' slots in query order.
    """
    anchors, documents, size, context = layout.anchors, layout.documents, layout.block_size, layout.context

    def mask_mod(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block, offset = q // size, q % size
        anchor = anchors[b, block]
        in_context = k < context
        token = torch.where(in_context, k, 0)
        same_document = documents[b, token] == documents[b, anchor.clamp(min=0)]
        before = in_context & (token < anchor) & same_document
        slot = torch.where(in_context, 0, k - context)
        same_block = ~in_context & (slot // size == block)
        if window is not None:
            before = before & (token > anchor + offset - window)
            back = offset - slot % size
            same_block = same_block & (back >= 0) & (back < window)
        return before | same_block

    return mask_mod


def dense_mask(layout: Layout, window: int | None = None) -> Tensor:
    """``[b, 1, N*B, S + N*B]`` bool, True where a query sees a key. The reference for `flex_mask`."""
    device = layout.anchors.device
    b, q, k = layout.anchors.shape[0], layout.queries, layout.context + layout.queries
    head = torch.zeros((), dtype=torch.int64, device=device)
    grid = torch.meshgrid(*(torch.arange(n, device=device) for n in (b, q, k)), indexing="ij")
    return visible(layout, window)(grid[0], head, grid[1], grid[2]).unsqueeze(1)


def flex_mask(layout: Layout, window: int | None = None) -> BlockMask:
    """The same rule as a ``BlockMask``; on CUDA its creation is compiled, else ``[Q, KV]`` would be materialised."""
    b, q, k = layout.anchors.shape[0], layout.queries, layout.context + layout.queries
    create: Callable[..., BlockMask] = _compiled_mask() if layout.anchors.is_cuda else create_block_mask
    return create(visible(layout, window), B=b, H=None, Q_LEN=q, KV_LEN=k, device=str(layout.anchors.device))


def make_masks(layout: Layout, layer_types: tuple[str, ...], window: int | None) -> dict[str, Mask]:
    """The mask of each kind of layer in ``layer_types``: flex where a GPU trains, dense elsewhere.

    FlexAttention is compiled for every shape it meets. A training run has one; evaluation (no gradients) has as many as
    texts, and its masks are small.
    """
    flex = layout.anchors.is_cuda and torch.is_grad_enabled()
    make: Callable[[Layout, int | None], Mask] = flex_mask if flex else dense_mask
    return {kind: make(layout, window if kind == "sliding_attention" else None) for kind in dict.fromkeys(layer_types)}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention of ``q [b, heads, Q, d]`` over ``k, v [b, kv_heads, KV, d]`` -> ``[b, heads, Q, d]``.

    A BlockMask runs FlexAttention, a bool tensor torch's SDPA. Every query sees itself, so no row is empty.
    """
    if isinstance(mask, Tensor):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    run: Any = _compiled_flex() if q.is_cuda else flex_attention
    out: Tensor = run(q, k, v, block_mask=mask, enable_gqa=True)
    return out


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # A whole graph: past dynamo's limit of recompilations it fails, where a broken one would run on unfused in silence.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.cache
def _compiled_mask() -> Callable[..., BlockMask]:
    compiled: Callable[..., BlockMask] = torch.compile(create_block_mask)
    return compiled
