"""One training step: anchors, blocks, forward, weighted loss, and the figures that fall out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .attention import Layout, make_masks
from .batches import Batch
from .blocks import Blocks, document_positions, make_blocks, sample_anchors
from .drafter_model import Drafter
from .errors import TrainError
from .head import argmax_labels, head_loss, top_candidates
from .losses import normaliser, slot_weights
from .metrics import TOP, Tally
from .recipe import Recipe
from .target_weights import TargetWeights


@dataclass(frozen=True)
class Drafts:
    """What one batch will draft, before the drafter has run."""

    batch: Batch
    anchors: Tensor  # [b, N]
    blocks: Blocks
    weight: Tensor  # 0-d, this batch's share of the normaliser


def plan_drafts(batch: Batch, recipe: Recipe, generator: torch.Generator) -> Drafts:
    """Sample the anchors of a batch and lay out their blocks, on the generator's device.

    The features stay where they are until they are drafted from: of all of a step's batches they might not fit.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(generator.device, non_blocking=True)

    batch = replace(
        batch,
        token_ids=move(batch.token_ids),
        loss_mask=move(batch.loss_mask),
        documents=move(batch.documents),
    )
    anchors = sample_anchors(batch.loss_mask, batch.documents, recipe.anchors, generator)
    shape = recipe.drafter
    blocks = make_blocks(
        batch.token_ids, batch.loss_mask, batch.documents, anchors, shape.block_size, shape.mask_token_id
    )
    return Drafts(batch, anchors, blocks, normaliser(recipe.loss, blocks.valid, recipe.decay))


def draft_hidden(model: nn.Module, drafter: Drafter, target: TargetWeights, drafts: Drafts, noise: float) -> Tensor:
    """The drafter's hidden states of every slot, ``[b, N, B, H]``. ``model`` is ``drafter``, maybe wrapped."""
    spec, blocks, batch = drafter.spec, drafts.blocks, drafts.batch
    b, n, size = blocks.input_ids.shape
    layout = Layout(drafts.anchors, batch.documents, size)
    masks = make_masks(layout, drafter.layer_types, spec.sliding_window)
    hidden: Tensor = model(
        batch.features.to(batch.documents.device, non_blocking=True),
        target.embed(blocks.input_ids.view(b, n * size)),
        blocks.positions.view(b, n * size),
        document_positions(batch.documents),
        masks,
        noise=noise,
    )
    return hidden.view(b, n, size, -1)


def labels_of(drafts: Drafts, target: TargetWeights, loss: str) -> Tensor:
    """``[b, N, B]``: the text's tokens, or for ``argmax`` what the target would have said at each of them."""
    if loss != "argmax":
        return drafts.blocks.labels
    final = drafts.batch.final
    if final is None:
        raise TrainError(
            "loss argmax: found data without the final hidden state, want it; prepare with --final, or use reference."
        )
    final = final.to(drafts.anchors.device, non_blocking=True)
    said = argmax_labels(final.flatten(0, 1), target.final_norm, target.eps, target.gemma_norm, target.lm_head)
    b, n, size = drafts.blocks.labels.shape
    # Slot k stands at anchor + k and is predicted from the state at anchor + k - 1.
    index = drafts.anchors.clamp(min=0).unsqueeze(-1) + torch.arange(size, device=said.device) - 1
    index = index.clamp(0, final.shape[1] - 1).view(b, n * size)
    return said.view(b, -1).gather(1, index).view(b, n, size)


def loss_of(
    hidden: Tensor, drafts: Drafts, target: TargetWeights, recipe: Recipe, tally: Tally, *, chunk: int | None = None
) -> Tensor:
    """The batch's summed weighted cross-entropy (a 0-d tensor, not yet normalised); adds its figures to ``tally``.

    The anchor's slot never counts and never sees the head.
    """
    labels = labels_of(drafts, target, recipe.loss)[:, :, 1:]
    valid = drafts.blocks.valid
    slots = hidden[:, :, 1:]
    out = head_loss(slots.reshape(-1, slots.shape[-1]), target.lm_head, labels.reshape(-1), chunk)
    cross_entropy = out.cross_entropy.view(labels.shape)
    padded = nn.functional.pad(cross_entropy, (1, 0))
    weights, _ = slot_weights(recipe.loss, padded, valid, recipe.decay)
    tally.add(cross_entropy, out.rank.view(labels.shape), valid[:, :, 1:])
    return (weights[:, :, 1:] * cross_entropy).sum()


@torch.no_grad()
def tally_trees(
    hidden: Tensor, drafts: Drafts, target: TargetWeights, budgets: tuple[int, ...], tally: Tally, blocks: int = 256
) -> None:
    """Add the DDTree-8 figures of at most ``blocks`` blocks a row: trees cost more than the step they describe."""
    slots = hidden[:, :blocks, 1:].flatten(0, 1)
    n, depth, width = slots.shape
    ids, log_probs = top_candidates(slots.reshape(-1, width), target.lm_head, TOP)
    labels = drafts.blocks.labels[:, :blocks, 1:].flatten(0, 1)
    valid = drafts.blocks.valid[:, :blocks, 1:].flatten(0, 1)
    tally.add_trees(ids.view(n, depth, TOP), log_probs.view(n, depth, TOP), labels, valid, budgets)
