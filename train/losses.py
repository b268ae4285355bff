"""What a step minimises: a weight for every slot, times the cross-entropy there.

``reference`` is the published loss: hard cross-entropy on the text's own tokens, slot k weighing exp(-(k-1)/gamma),
normalised by the sum of weights. ``argmax`` is the same on the target's own argmax as labels. ``dpace``
(arXiv 2605.18810) weighs a slot by the estimated chance that the block survives to it, and is not normalised by the sum
of its weights, which depend on the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import TrainError

LOSSES = ("reference", "argmax", "dpace")
_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
DPACE_ALPHA = 0.5


def gamma_for(block_size: int) -> float:
    """The published decay for a block size. Raises TrainError where none was published."""
    if block_size not in _GAMMA:
        raise TrainError(
            f"gamma: found none for block size {block_size}, want one (published: "
            f"{', '.join(f'{g:g} for {b}' for b, g in sorted(_GAMMA.items()))}); set gamma in the recipe."
        )
    return _GAMMA[block_size]


def position_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """``[B]`` fp32: 0 for the anchor, exp(-(k-1)/gamma) for slot k >= 1 (arXiv 2602.06036, the loss)."""
    k = torch.arange(block_size, dtype=torch.float32, device=device)
    weights = torch.exp(-(k - 1) / gamma)
    weights[0] = 0.0
    return weights


def slot_weights(loss: str, cross_entropy: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Weights ``[b, N, B]`` and the normaliser (a 0-d tensor) that this batch adds to the global one.

    The step's loss is the sum of weights x cross-entropy over all ranks and accumulation steps, divided by the sum of
    normalisers over the same. ``cross_entropy, valid [b, N, B]``; no gradient passes through the weights.
    """
    total = normaliser(loss, valid, gamma)
    if loss == "dpace":
        return dpace_weights(cross_entropy, valid), total
    return position_weights(valid.shape[-1], gamma, valid.device) * valid, total


def normaliser(loss: str, valid: Tensor, gamma: float) -> Tensor:
    """What ``valid [b, N, B]`` adds to the normaliser: known before the forward, so all of a step's can be summed."""
    if loss in ("reference", "argmax"):
        return (position_weights(valid.shape[-1], gamma, valid.device) * valid).sum()
    if loss == "dpace":
        return valid.any(dim=-1).sum().float()
    raise TrainError(f"loss: found {loss!r}, want one of {', '.join(LOSSES)}.")


def dpace_weights(cross_entropy: Tensor, valid: Tensor, alpha: float = DPACE_ALPHA) -> Tensor:
    """D-PACE: w_j = sum over m >= j of prod over i <= m of q~_i; q~ = (1 - alpha) q + alpha, q = exp(-CE) detached.

    Slots 1..B-1 of each block; a slot that is not valid ends its block: no product and no sum reaches past it.
    """
    q = torch.exp(-cross_entropy.detach().float())
    smoothed = (1 - alpha) * q + alpha
    smoothed[..., 0] = 1.0
    alive = valid.clone()
    alive[..., 0] = True  # the anchor is given
    survival = torch.where(alive, smoothed, 0.0).cumprod(dim=-1)
    survival[..., 0] = 0.0
    return survival.flip(-1).cumsum(dim=-1).flip(-1) * valid
