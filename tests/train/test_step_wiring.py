"""How a step joins its parts: places, labels and masks against values worked out by hand, one slot at a time."""

from __future__ import annotations

import pytest
import torch
from shapes import HIDDEN, MASK_ID, VOCAB, make_drafter, run_blocks
from training_data import recipe

from sglang_dflash.train.attention import Layout, dense_mask, make_masks
from sglang_dflash.train.batches import Batch
from sglang_dflash.train.metrics import Tally
from sglang_dflash.train.recipe import Recipe
from sglang_dflash.train.step import Drafts, draft_hidden, labels_of, loss_of, plan_drafts
from sglang_dflash.train.target_weights import TargetWeights

SIZE = 4
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


def settings(loss: str = "reference") -> Recipe:
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "block_size": SIZE,
             "mask_token_id": MASK_ID}  # fmt: skip
    return recipe(drafter=shape, loss=loss)


@pytest.fixture
def target() -> TargetWeights:
    generator = torch.Generator().manual_seed(2)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    return TargetWeights(embedding, head, torch.randn(HIDDEN, generator=generator) * 0.1, 1e-6, True)


@pytest.fixture
def drafts() -> Drafts:
    """Two rows: one document and padding, and two documents, so that no index can pass for another."""
    generator = torch.Generator().manual_seed(0)
    length = 26
    documents = torch.tensor([[0] * 22 + [-1] * 4, [0] * 11 + [1] * 15])
    batch = Batch(
        features=torch.randn(2, length, 3 * HIDDEN, generator=generator),
        token_ids=torch.randint(0, MASK_ID, (2, length), generator=generator),
        loss_mask=torch.ones(2, length, dtype=torch.bool) & (documents >= 0),
        documents=documents,
        final=torch.randn(2, length, HIDDEN, generator=generator),
    )
    return plan_drafts(batch, settings(), torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", [{}, SLIDING], ids=["full", "sliding"])
def test_a_step_drafts_what_the_blocks_are(case: dict, target: TargetWeights, drafts: Drafts) -> None:
    """`draft_hidden` puts context, slots and masks where `run_blocks` does, which is held to a decode step."""
    drafter, batch = make_drafter(**case), drafts.batch
    wanted = run_blocks(
        drafter, batch.features, batch.token_ids, target.embedding, drafts.anchors, documents=batch.documents
    )
    found = draft_hidden(drafter, drafter, target, drafts, 0.0)
    used = drafts.anchors >= 0
    assert used.sum() > 8
    torch.testing.assert_close(found[used], wanted[used], atol=1e-5, rtol=1e-5)


def test_a_window_is_for_sliding_layers_only() -> None:
    layout = Layout(torch.tensor([[9, 15]]), torch.zeros(1, 20, dtype=torch.int64), SIZE)
    masks = make_masks(layout, ("sliding_attention", "full_attention"), 6)
    assert list(masks) == ["sliding_attention", "full_attention"]
    full, sliding = masks["full_attention"], masks["sliding_attention"]
    assert isinstance(full, torch.Tensor)
    assert isinstance(sliding, torch.Tensor)
    assert torch.equal(full, dense_mask(layout))
    assert torch.equal(sliding, dense_mask(layout, 6))
    assert not torch.equal(full, sliding)


@pytest.mark.parametrize("loss", ["reference", "argmax"])
def test_the_loss_of_slot_k_is_the_surprise_at_label_k(loss: str, target: TargetWeights, drafts: Drafts) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*drafts.blocks.labels.shape, HIDDEN, generator=generator)
    labels, how = labels_of(drafts, target, loss), settings(loss)
    wanted = 0.0
    for row, block, slot in drafts.blocks.valid.nonzero().tolist():
        if loss == "reference":  # the text's own next token
            place = int(drafts.anchors[row, block]) + slot
            assert labels[row, block, slot] == drafts.batch.token_ids[row, place]
        surprise = -(target.lm_head @ hidden[row, block, slot]).log_softmax(0)[labels[row, block, slot]]
        wanted += float(surprise) * float(torch.tensor(-(slot - 1) / how.decay).exp())
    found = loss_of(hidden, drafts, target, how, Tally(SIZE - 1))
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_a_tied_head_stays_one_tensor_when_moved() -> None:
    embedding = torch.randn(6, 4)
    tied = TargetWeights(embedding, embedding, torch.ones(4), 1e-6, False).to("cpu", torch.bfloat16)
    assert tied.lm_head is tied.embedding
    apart = TargetWeights(embedding, embedding.clone(), torch.ones(4), 1e-6, False).to("cpu", torch.bfloat16)
    assert apart.lm_head is not apart.embedding
