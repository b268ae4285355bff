"""What a drafter would have had accepted on a finished text, from captured features, without a server.

A block is drafted at every token of the answer in turn (teacher forcing), so two figures come of one pass:

- **teacher-forced tau**: 1 + the mean over all those anchors, as in training. Every position weighs the same.
- **decode tau**: 1 + the mean over the anchors at which decoding would really have verified: the walk that goes on
  behind the accepted tokens. This is what a server counts, and on the same text the two must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Layout, make_masks
from .drafter_model import Drafter
from .errors import TrainError
from .head import top_candidates
from .metrics import TOP, leading_run, tree_depth_accepted
from .target_weights import TargetWeights

CHAIN, STREAK = "chain", "top-8 streak"
_QUERIES = 4096  # block slots a forward


@dataclass(frozen=True)
class Replay:
    """One text. Lengths are accepted drafts of the block at each anchor; the first anchor is the answer's first token.

    Keys: ``chain``, ``top-8 streak`` (the ceiling of every width-8 tree, no tau) and every budget as text.
    """

    lengths: Mapping[str, Tensor]  # [A] int64
    complete: Tensor  # [A] bool: the text goes on for a whole block, so that nothing was cut
    correct: Tensor  # [A, B-1] bool: the argmax of each slot is the text's token
    inside: Tensor  # [A, B-1] bool: the slot has a token to be compared with

    def walk(self, key: str) -> list[int]:
        """Accepted drafts of each verify of a decode of this text."""
        lengths, at, accepted = self.lengths[key].tolist(), 0, []
        while at < len(lengths):
            accepted.append(lengths[at])
            at += lengths[at] + 1
        return accepted


def replay(
    drafter: Drafter,
    target: TargetWeights,
    token_ids: Tensor,
    features: Tensor,
    answer_start: int,
    budgets: Iterable[int] = (),
) -> Replay:
    """Draft at every token of the answer but the last.

    Args:
        drafter: on the device and in the dtype to compute in, in evaluation mode.
        target: embeddings and head, likewise.
        token_ids: ``[S]`` int, prompt and answer; the answer begins at ``answer_start``.
        features: ``[S, K*H]`` of exactly these tokens.
        budgets: tree sizes N, each with K = 8 candidates a depth.

    Raises TrainError if lengths or widths do not fit.
    """
    length, size = len(token_ids), drafter.spec.block_size
    if len(features) != length or not 1 <= answer_start < length:
        raise TrainError(
            f"replay: found {len(features)} feature rows, {length} tokens and an answer from {answer_start}, want as "
            "many rows as tokens and an answer inside them; capture the text again."
        )
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    tokens, features = token_ids.to(device).long(), features.to(device, dtype).unsqueeze(0)
    anchors = torch.arange(answer_start, length - 1, device=device)
    index = anchors.unsqueeze(1) + torch.arange(1, size, device=device)
    inside = index < length
    labels = torch.where(inside, tokens[index.clamp(max=length - 1)], -1)
    ids, log_probs = [], []
    for part in anchors.split(max(1, _QUERIES // size)) if len(anchors) else ():
        hidden = draft_blocks(drafter, target, tokens, features, part)
        best, scores = top_candidates(hidden[:, 1:].flatten(0, 1), target.lm_head, TOP)
        ids.append(best.view(len(part), size - 1, TOP))
        log_probs.append(scores.view(len(part), size - 1, TOP))
    candidates, scores = (
        (torch.cat(ids), torch.cat(log_probs))
        if ids
        else (labels.new_zeros(0, size - 1, TOP), features.new_zeros((0, size - 1, TOP), dtype=torch.float32))
    )
    hit = candidates == labels.unsqueeze(-1)
    lengths = {
        CHAIN: leading_run(hit[..., 0]),
        STREAK: leading_run(hit.any(dim=-1)),
    }
    for budget in budgets:
        lengths[str(budget)] = tree_depth_accepted(candidates, scores, labels, inside, budget)
    cpu = {key: value.cpu() for key, value in lengths.items()}
    return Replay(cpu, inside.all(dim=1).cpu(), hit[..., 0].cpu(), inside.cpu())


@torch.no_grad()
def draft_blocks(drafter: Drafter, target: TargetWeights, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Hidden states ``[A, B, H]`` of the blocks drafted at ``anchors [A]`` of one text.

    ``tokens [S]`` int64, ``features [1, S, K*H]``.
    """
    size, length = drafter.spec.block_size, len(tokens)
    documents = torch.zeros(1, length, dtype=torch.int64, device=tokens.device)
    masks = make_masks(Layout(anchors.unsqueeze(0), documents, size), drafter.layer_types, drafter.spec.sliding_window)
    block = torch.full((len(anchors), size), drafter.spec.mask_token_id, device=tokens.device)
    block[:, 0] = tokens[anchors]
    positions = (anchors.unsqueeze(1) + torch.arange(size, device=tokens.device)).view(1, -1)
    places = torch.arange(length, device=tokens.device).unsqueeze(0)
    hidden: Tensor = drafter(features, target.embed(block).view(1, len(anchors) * size, -1), positions, places, masks)
    return hidden.view(len(anchors), size, -1)
