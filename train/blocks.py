"""Anchors and blocks: where a training step drafts, what it should have drafted, and which slots count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """``N`` blocks of ``B`` slots in each of ``b`` rows. Slot 0 is the anchor, whose label never counts."""

    input_ids: Tensor  # [b, N, B] int64: the anchor's token, then mask tokens
    labels: Tensor  # [b, N, B] int64: the text's own tokens (0 where not valid)
    valid: Tensor  # [b, N, B] bool: slots the loss counts; a prefix of slots 1.. of each block
    positions: Tensor  # [b, N, B] int64: the anchor's position + offset


def document_positions(documents: Tensor) -> Tensor:
    """Position of each token in its own document, ``[b, S] -> [b, S]`` int64: what serving counts from 0."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(first, index, 0).cummax(dim=1).values


def anchor_candidates(loss_mask: Tensor, documents: Tensor) -> Tensor:
    """``[b, S]`` bool: assistant tokens whose next token is one too, in the same document."""
    candidates = torch.zeros_like(loss_mask)
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, :-1] >= 0)
    candidates[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:] & same
    return candidates


def sample_anchors(
    loss_mask: Tensor, documents: Tensor, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """At most ``count`` anchors a row, uniform without replacement over the candidates, sorted: ``[b, count]``.

    int64; -1 fills rows with fewer candidates, after the real ones. ``loss_mask [b, S]`` bool, ``documents [b, S]``
    int, -1 for padding. No device synchronisation. The generator lives on the tensors' device.
    """
    candidates = anchor_candidates(loss_mask, documents)
    keys = torch.rand(candidates.shape, device=candidates.device, generator=generator)
    keys = torch.where(candidates, keys, -1.0)
    length = keys.shape[1]
    best = keys.topk(min(count, length), dim=1)
    past_the_end = torch.where(best.values >= 0, best.indices, length)  # sorts last
    anchors = past_the_end.sort(dim=1).values
    anchors = torch.where(anchors < length, anchors, -1)
    missing = count - anchors.shape[1]
    return torch.nn.functional.pad(anchors, (0, missing), value=-1) if missing > 0 else anchors


def make_blocks(
    token_ids: Tensor,
    loss_mask: Tensor,
    documents: Tensor,
    anchors: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """The blocks drafted at ``anchors [b, N]`` of ``token_ids, loss_mask, documents [b, S]``.

    Slot o's label is the token at anchor + o. A block stops counting at the first token that is not an assistant's, or
    belongs to another document, or lies past the row: cumulative, so nothing behind a gap counts.
    """
    b, n = anchors.shape
    length = token_ids.shape[1]
    offsets = torch.arange(block_size, device=anchors.device)
    start = anchors.clamp(min=0).unsqueeze(-1)  # [b, N, 1]
    index = start + offsets  # [b, N, B]
    inside = index < length
    flat = index.clamp(max=length - 1).view(b, -1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, flat).view(b, n, block_size)

    text, own = at(token_ids.long()), at(documents)
    counts = at(loss_mask) & inside & (own == own[:, :, :1]) & (own >= 0) & (anchors >= 0).unsqueeze(-1)
    counts[:, :, 0] = True  # the anchor itself does not count, and must not stop the product
    valid = counts.long().cumprod(dim=-1).bool()
    valid[:, :, 0] = False
    valid &= (anchors >= 0).unsqueeze(-1)
    input_ids = torch.full_like(text, mask_token_id)
    input_ids[:, :, 0] = text[:, :, 0]
    first = document_positions(documents).gather(1, start.view(b, -1)).unsqueeze(-1)
    return Blocks(
        input_ids=input_ids,
        labels=torch.where(valid, text, 0),
        valid=valid,
        positions=first + offsets,
    )
