"""Each loss option's formula, the chunked head, and what the loss is invariant to: invariants 20 and 22."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import random_pair
import torch
from safetensors.torch import save_file
from shapes import HIDDEN, VOCAB, inputs, make_drafter, run_blocks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dflash.train.blocks import make_blocks
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.head import argmax_labels, head_loss, top_candidates
from sglang_dflash.train.losses import dpace_weights, gamma_for, position_weights, slot_weights
from sglang_dflash.train.target_weights import load_target_weights


def test_invariant_20_golden_position_weights() -> None:
    weights = position_weights(16, 7.0)
    assert weights[0] == 0
    assert weights[1:4].tolist() == pytest.approx([1.0, 0.8668779, 0.7514773], abs=1e-6)
    assert weights[15].item() == pytest.approx(math.exp(-2), abs=1e-6)
    assert [gamma_for(b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]
    with pytest.raises(TrainError, match="block size 12"):
        gamma_for(12)


@pytest.mark.parametrize("loss", ["reference", "argmax"])
def test_reference_weights(loss: str) -> None:
    valid = torch.tensor([[[False, True, True, False], [False, True, False, False]]])
    weights, total = slot_weights(loss, torch.randn(1, 2, 4), valid, gamma=2.0)
    assert weights[0].tolist() == [[0, 1, pytest.approx(math.exp(-0.5)), 0], [0, 1, 0, 0]]
    assert total.item() == pytest.approx(2 + math.exp(-0.5))


def test_dpace_is_its_formula() -> None:
    q = torch.tensor([0.9, 0.2, 0.7])
    smooth = [0.5 * float(x) + 0.5 for x in q]
    ce = torch.zeros(1, 1, 5)
    ce[0, 0, 1:4] = -q.log()
    ce.requires_grad_(True)
    valid = torch.tensor([[[False, True, True, True, False]]])
    weights, blocks = slot_weights("dpace", ce, valid, gamma=7.0)
    survive = [smooth[0], smooth[0] * smooth[1], smooth[0] * smooth[1] * smooth[2]]
    wanted = [0, sum(survive), sum(survive[1:]), survive[2], 0]
    assert weights[0, 0].tolist() == pytest.approx(wanted, abs=1e-6)
    assert not weights.requires_grad  # a weight that could be lowered would be
    assert blocks.item() == 1  # never the sum of the weights


def test_dpace_does_not_reach_past_a_gap() -> None:
    valid = torch.tensor([[[False, True, False, True]]])
    assert dpace_weights(torch.full((1, 1, 4), 0.1), valid)[0, 0, 2:].tolist() == [0, 0]


def test_unknown_loss() -> None:
    with pytest.raises(TrainError, match="found 'kl', want one of reference, argmax, dpace"):
        slot_weights("kl", torch.zeros(1, 1, 2), torch.ones(1, 1, 2).bool(), 7.0)


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
def test_invariant_22_the_chunk_size_changes_nothing(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, HIDDEN, generator=generator, requires_grad=True)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (70,), generator=generator)
    scale = torch.rand(70, generator=generator)
    out = head_loss(hidden, head, labels, chunk)
    (out.cross_entropy * scale).sum().backward()
    plain = hidden.detach().requires_grad_(True)
    logits = plain @ head.T
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (wanted * scale).sum().backward()
    torch.testing.assert_close(out.cross_entropy, wanted)
    torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-5, rtol=1e-4)
    order = logits.argsort(dim=1, descending=True)
    assert out.rank.tolist() == [(order[i] == labels[i]).nonzero().item() for i in range(70)]


class Largest(TorchDispatchMode):
    """The most cells that any tensor made under it has had."""

    cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.cells = max(self.cells, leaf.numel())
        return out


def test_invariant_22_no_tensor_is_ever_positions_by_vocabulary() -> None:
    positions, vocabulary, chunk = 500, 3000, 20
    hidden = torch.randn(positions, HIDDEN, requires_grad=True)
    head, labels = torch.randn(vocabulary, HIDDEN), torch.randint(0, vocabulary, (positions,))
    with Largest() as seen:
        head_loss(hidden, head, labels, chunk).cross_entropy.sum().backward()
        top_candidates(hidden, head, 8, chunk)
    assert chunk * vocabulary <= seen.cells <= max(chunk * vocabulary, head.numel())
    with Largest() as seen:  # what the alarm is for
        torch.nn.functional.cross_entropy(hidden @ head.T, labels).backward()
    assert seen.cells == positions * vocabulary


def test_ties_rank_the_lower_id_first_as_argmax_does() -> None:
    head = torch.eye(4)[[0, 1, 1, 2]]  # tokens 1 and 2 always tie
    hidden = torch.tensor([[0.0, 1.0, 0.5, 0.0]] * 4)
    out = head_loss(hidden, head, torch.arange(4))
    assert out.rank.tolist() == [3, 0, 1, 2]
    assert (hidden @ head.T).argmax(-1).tolist() == [1] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_head_is_reduced_in_fp32(dtype: torch.dtype) -> None:
    """Against autograd on the same rounded logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, HIDDEN, generator=generator, requires_grad=True)  # fp32 masters' activations
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (40,), generator=generator)
    out = head_loss(hidden, head, labels, 16)
    assert out.cross_entropy.dtype == torch.float32
    out.cross_entropy.sum().backward()
    plain = hidden.detach().requires_grad_(True)
    logits = (plain.to(dtype) @ head.T).float()
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    wanted.sum().backward()
    torch.testing.assert_close(out.cross_entropy, wanted, atol=1e-5, rtol=1e-5)
    assert hidden.grad is not None
    assert plain.grad is not None
    assert (hidden.grad - plain.grad).norm() < 0.02 * plain.grad.norm()


def test_top_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    ids, log_probs = top_candidates(hidden, head, 5, chunk=4)
    best = (hidden @ head.T).log_softmax(-1).topk(5)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(log_probs, best.values)


def loss_of(drafter, features, tokens, embedding, anchors, documents, mask):
    """Summed weighted loss and normaliser of one batch."""
    hidden = run_blocks(drafter, features, tokens, embedding, anchors, documents)
    blocks = make_blocks(tokens, mask, documents, anchors, 4, 49)
    out = head_loss(hidden.reshape(-1, HIDDEN), embedding, blocks.labels.view(-1))
    ce = out.cross_entropy.view(blocks.labels.shape)
    weights, total = slot_weights("reference", ce, blocks.valid, 4.0)
    return (weights * ce).sum(), total


def test_invariant_22_accumulation_and_padding_change_nothing() -> None:
    drafter = make_drafter()
    features, tokens, embedding = inputs(2, 16, drafter)
    documents, mask = torch.zeros(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.bool)
    mask[1, :9] = False
    anchors = torch.tensor([[2, 7, 12], [9, 12, 13]])
    whole, weight = loss_of(drafter, features, tokens, embedding, anchors, documents, mask)
    parts = [
        loss_of(drafter, *(x[i : i + 1] for x in (features, tokens)), embedding,
                *(x[i : i + 1] for x in (anchors, documents, mask)))
        for i in range(2)
    ]  # fmt: skip
    assert (sum(p[0] for p in parts) / sum(p[1] for p in parts)).item() == pytest.approx((whole / weight).item(), 1e-5)
    pad = torch.nn.functional.pad
    padded, same = loss_of(
        drafter,
        pad(features, (0, 0, 0, 5), value=9.0),
        pad(tokens, (0, 5)),
        embedding,
        pad(anchors, (0, 2), value=-1),
        pad(documents, (0, 5), value=-1),
        pad(mask, (0, 5), value=True),
    )
    # Blocks that ran to the row's end are cut there with and without padding.
    assert (padded / same).item() == pytest.approx((whole / weight).item(), 1e-5)


def test_argmax_labels_know_both_norms() -> None:
    generator = torch.Generator().manual_seed(3)
    final, norm = torch.randn(200, HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    unit = final / final.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    for gemma in (True, False):
        wanted = ((unit * (norm + gemma)) @ head.T).argmax(-1)
        assert torch.equal(argmax_labels(final, norm, 1e-6, gemma, head), wanted)


def test_target_weights(tmp_path: Path) -> None:
    target, _ = random_pair.write(tmp_path)
    weights = load_target_weights(target)
    config = json.loads((target / "config.json").read_text())
    assert weights.embedding.shape == (config["vocab_size"], config["hidden_size"])
    assert weights.gemma_norm
    assert (weights.lm_head is weights.embedding) is bool(config["tie_word_embeddings"])
    moved = weights.to("cpu", torch.bfloat16)
    assert moved.embedding.dtype == torch.bfloat16
    assert (moved.lm_head is moved.embedding) is (weights.lm_head is weights.embedding)
    save_file({"model.norm.weight": torch.ones(4)}, target / "model.safetensors")
    with pytest.raises(TrainError, match=r"found no model\.embed_tokens\.weight"):
        load_target_weights(target)
    with pytest.raises(TrainError, match=r"config\.json: found FileNotFoundError"):
        load_target_weights(tmp_path / "absent")


@pytest.mark.parametrize(("tie", "head"), [(None, False), (True, True), (True, False)])
def test_a_tied_head_is_the_embedding(tie: bool | None, head: bool, tmp_path: Path) -> None:
    config = {"hidden_size": 4, "model_type": "qwen3"} | ({} if tie is None else {"tie_word_embeddings": tie})
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.randn(6, 4), "model.norm.weight": torch.ones(4)}
    save_file(tensors | ({"lm_head.weight": torch.randn(6, 4)} if head else {}), tmp_path / "model.safetensors")
    weights = load_target_weights(tmp_path)
    assert weights.lm_head is weights.embedding
    assert not weights.gemma_norm
    assert weights.to("cpu", torch.bfloat16).lm_head.dtype == torch.bfloat16


def test_a_target_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    def write(config: dict, **tensors: torch.Tensor) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({name.replace("_weight", ".weight"): t for name, t in tensors.items()}, tmp_path / "a.safetensors")

    def refused(words: str) -> None:
        with pytest.raises(TrainError, match=words) as caught:
            load_target_weights(tmp_path)
        assert "\n" not in str(caught.value)

    write({}, norm_weight=torch.ones(4))
    refused("hidden_size: found None, want an integer")
    whole = {"embed_tokens_weight": torch.randn(6, 4), "norm_weight": torch.ones(4)}
    write({"hidden_size": 4, "tie_word_embeddings": False}, **whole)
    refused(r"found no lm_head\.weight")
    write({"hidden_size": 4}, **whole | {"embed_tokens_weight": torch.zeros(6, 2, dtype=torch.uint8)})
    refused(r"embed_tokens: found torch\.uint8 \[6, 2\]")
    write({"hidden_size": 4}, **whole | {"norm_weight": torch.ones(5)})
    refused(r"norm: found torch\.float32 \[5\], want floats \[4\]")
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 30)
    refused("a damaged file")
