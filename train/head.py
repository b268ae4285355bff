"""The target's frozen head over the drafter's slots, a chunk of positions at a time.

512 anchors x 16 slots x 248,320 tokens are 8 GB of fp32 logits a sample, so no ``[positions, vocabulary]`` tensor is
ever whole. The head is frozen, so the gradient of a position's cross-entropy in its hidden state is the same whatever
the loss does with it: it is computed beside the forward and scaled later, and no product is computed twice.

Why not a kept one: the losses weigh each position by what its cross-entropy turned out to be, and every metric needs
the label's rank from the same logits. torch's ``linear_cross_entropy`` (new in torch 2.13; older ones train too) and
Liger's fused kernel (GPU only; projects again in backward for ``reduction="none"``) return no rank, so either costs
another projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK_CELLS = 1 << 28  # logits held at once: 1 GiB of fp32


@dataclass(frozen=True)
class HeadOutput:
    """What the head says of each position."""

    cross_entropy: Tensor  # [P] fp32, differentiable in the hidden states
    rank: Tensor  # [P] int32: how many tokens are drafted before the label; 0 = the argmax, below 8 = in the top 8


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        positions = hidden.shape[0]
        cross_entropy = torch.empty(positions, dtype=torch.float32, device=hidden.device)
        rank = torch.empty(positions, dtype=torch.int32, device=hidden.device)
        tokens = torch.arange(weight.shape[0], device=hidden.device)
        wants_grad = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wants_grad else None
        for start in range(0, positions, chunk):
            part = slice(start, min(start + chunk, positions))
            logits = (hidden[part] @ weight.T).float()
            label = labels[part].unsqueeze(1)
            score = logits.gather(1, label)
            # bf16 logits tie often; the lower id goes first, as in argmax.
            tied_before = ((logits == score) & (tokens < label)).sum(dim=1, dtype=torch.int32)
            rank[part] = (logits > score).sum(dim=1, dtype=torch.int32) + tied_before
            log_norm = logits.logsumexp(dim=1, keepdim=True)
            cross_entropy[part] = (log_norm - score).squeeze(1)
            if gradient is not None:
                logits.sub_(log_norm).exp_()
                logits.scatter_add_(1, label, torch.full_like(score, -1.0))
                gradient[part] = logits.to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(rank)
        return cross_entropy, rank

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * upstream[0].unsqueeze(1)).to(gradient.dtype), None, None, None


def head_loss(hidden: Tensor, lm_head: Tensor, labels: Tensor, chunk: int | None = None) -> HeadOutput:
    """Cross-entropy and rank of ``labels [P]`` under ``hidden [P, H] @ lm_head[V, H].T``, in chunks of positions.

    Logits are taken in the head's dtype, as the server takes them, and reduced in fp32. The default chunk holds about
    1 GiB of logits; what is kept for backward is one gradient of the size of ``hidden``.
    """
    chunk = chunk or max(64, _CHUNK_CELLS // lm_head.shape[0])
    # Outside of autocast's reach: the dtypes here are chosen.
    with torch.autocast(hidden.device.type, enabled=False):
        cross_entropy, rank = _FrozenHead.apply(hidden.to(lm_head.dtype), lm_head, labels, chunk)
    return HeadOutput(cross_entropy, rank)


@torch.no_grad()
def top_candidates(hidden: Tensor, lm_head: Tensor, count: int, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """The ``count`` best tokens of each position: ids ``[P, count]`` int64 and log-probs fp32, best first."""
    chunk = chunk or max(64, _CHUNK_CELLS // lm_head.shape[0])
    ids, log_probs = [], []
    for part in hidden.to(lm_head.dtype).split(chunk):
        logits = (part @ lm_head.T).float()
        best = logits.topk(count, dim=1)
        ids.append(best.indices)
        log_probs.append(best.values - logits.logsumexp(dim=1, keepdim=True))
    return torch.cat(ids), torch.cat(log_probs)


@torch.no_grad()
def argmax_labels(final_hidden: Tensor, norm: Tensor, eps: float, gemma: bool, lm_head: Tensor) -> Tensor:
    """The target's own next token after each ``final_hidden [P, H]`` (before the final norm): ``[P]`` int64.

    ``gemma``: the norm multiplies by 1 + weight, as in Qwen3.5 and Qwen3.6; the drafter's multiplies by the weight.
    """
    x = final_hidden.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    x = x * (1.0 + norm.float() if gemma else norm.float())
    ids, _ = top_candidates(x.to(lm_head.dtype), lm_head, 1)
    return ids.squeeze(1)
