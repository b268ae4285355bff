"""One training step as a whole: what noise reaches, what stays frozen, and that a drafter lives off its features."""

from __future__ import annotations

import hashlib

import pytest
import torch
from shapes import HIDDEN, VOCAB, make_drafter
from training_data import recipe

from sglang_dflash.train.batches import Batch
from sglang_dflash.train.drafter_model import Drafter
from sglang_dflash.train.metrics import Tally
from sglang_dflash.train.recipe import Recipe
from sglang_dflash.train.step import Drafts, draft_hidden, labels_of, loss_of, plan_drafts
from sglang_dflash.train.target_weights import TargetWeights


def settings(**changes: object) -> Recipe:
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "block_size": 4,
             "mask_token_id": VOCAB - 1}  # fmt: skip
    return recipe(drafter=shape, **changes)


@pytest.fixture
def target() -> TargetWeights:
    generator = torch.Generator().manual_seed(2)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    return TargetWeights(embedding, head, torch.randn(HIDDEN, generator=generator) * 0.1, 1e-6, True)


def batch(rows: int = 2, length: int = 30, seed: int = 0) -> Batch:
    """Texts that count up by 1 or 2; the features of a token tell it and the stride."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(2, VOCAB, 3 * HIDDEN, generator=torch.Generator().manual_seed(7))
    start = torch.randint(0, VOCAB - 1, (rows, 1), generator=generator)
    stride = torch.randint(0, 2, (rows, 1), generator=generator)
    tokens = (start + (1 + stride) * torch.arange(length)) % (VOCAB - 1)
    return Batch(
        features=table[stride.expand_as(tokens), tokens],
        token_ids=tokens,
        loss_mask=torch.ones(rows, length, dtype=torch.bool),
        documents=torch.zeros(rows, length, dtype=torch.int64),
        final=torch.randn(rows, length, HIDDEN, generator=generator),
    )


def plan(data: Batch, how: Recipe, seed: int = 0) -> Drafts:
    return plan_drafts(data, how, torch.Generator().manual_seed(seed))


def checksum(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("loss", ["reference", "argmax", "dpace"])
def test_invariant_09_and_10_noise_reaches_fc_and_nothing_else(loss: str, target: TargetWeights) -> None:
    """Teacher logits, labels, weights and inputs are bit-identical with noise on and off."""
    drafter, seen = make_drafter().train(), {}
    drafter.fc.register_forward_pre_hook(lambda _m, args: seen.setdefault("fc", []).append(args[0].detach().clone()))
    inputs = []
    drafter.layers[0].register_forward_pre_hook(lambda _m, args: inputs.append(args[0].detach().clone()))
    kept = []
    for noise in (0.0, 0.7):
        data, how = batch(), settings(loss=loss, noise=noise)
        drafts = plan(data, how)
        before = checksum(data.features, data.final)
        hidden = draft_hidden(drafter, drafter, target, drafts, how.noise)
        labels = labels_of(drafts, target, loss)
        loss_of(hidden, drafts, target, how, Tally(3)).backward()
        assert checksum(data.features, data.final) == before
        kept.append(checksum(labels, drafts.blocks.valid, drafts.weight, labels_of(drafts, target, "argmax")))
    assert kept[0] == kept[1]
    assert torch.equal(inputs[0], inputs[1])  # block embeddings
    quiet, loud = seen["fc"]
    assert torch.equal(quiet, batch().features)
    assert ((loud - quiet).std() / quiet.std()).item() == pytest.approx(0.7, rel=0.05)


def test_invariant_10_evaluation_has_no_noise(target: TargetWeights) -> None:
    drafter, drafts = make_drafter().eval(), plan(batch(), settings())
    quiet, asked = (draft_hidden(drafter, drafter, target, drafts, noise) for noise in (0.0, 0.7))
    assert torch.equal(quiet, asked)


def train(target: TargetWeights, steps: int, how: Recipe) -> Drafter:
    drafter = make_drafter().train()
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(steps):
        drafts = plan(batch(rows=8, seed=step), how, step)
        hidden = draft_hidden(drafter, drafter, target, drafts, 0.0)
        (loss_of(hidden, drafts, target, how, Tally(3)) / drafts.weight).backward()
        optimiser.step()
        optimiser.zero_grad()
    return drafter.eval()


@torch.no_grad()
def tau(drafter: Drafter, target: TargetWeights, how: Recipe, data: Batch) -> float:
    drafts, tally = plan(data, how), Tally(3)
    loss_of(draft_hidden(drafter, drafter, target, drafts, 0.0), drafts, target, how, tally)
    return tally.read()["tau/chain"]


def test_invariant_24_and_26_head_and_embeddings_stay_frozen_and_random_features_drop_tau(
    target: TargetWeights,
) -> None:
    before, how = checksum(target.embedding, target.lm_head, target.final_norm), settings()
    drafter = train(target, 150, how)
    assert checksum(target.embedding, target.lm_head, target.final_norm) == before
    assert not any(t.requires_grad or t.grad is not None for t in (target.embedding, target.lm_head))
    assert not {"embed", "head"} & {name.split(".")[0].split("_")[0] for name, _ in drafter.named_parameters()}
    data = batch(rows=8, seed=1000)
    learnt = tau(drafter, target, how, data)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(data.features.shape, generator=generator)
    blind = tau(drafter, target, how, Batch(noise, data.token_ids, data.loss_mask, data.documents, data.final))
    assert learnt > 3.3, learnt
    assert blind < 1 + 0.5 * (learnt - 1), (learnt, blind)


def test_argmax_labels_are_what_the_target_says_one_token_earlier(target: TargetWeights) -> None:
    """Slot k stands at anchor + k, and the target predicts it from its state at anchor + k - 1."""
    data, how = batch(), settings(loss="argmax")
    assert data.final is not None
    unit = data.final * torch.rsqrt(data.final.pow(2).mean(-1, keepdim=True) + target.eps)
    said = ((unit * (1 + target.final_norm)) @ target.lm_head.T).argmax(-1)
    drafts = plan(data, how)
    labels = labels_of(drafts, target, "argmax")
    checked = 0
    for row, anchors in enumerate(drafts.anchors.tolist()):
        for block, anchor in enumerate(anchors):
            for slot in range(1, 4):
                if drafts.blocks.valid[row, block, slot]:
                    assert labels[row, block, slot] == said[row, anchor + slot - 1]
                    checked += 1
    assert checked > 20
    assert torch.equal(labels_of(drafts, target, "reference"), drafts.blocks.labels)
