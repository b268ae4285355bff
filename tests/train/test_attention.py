"""Who sees whom, through a whole drafter: invariants 11 to 18 of the recipe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import drafter_spec, inputs, make_drafter, run_blocks
from torch.nn.attention.flex_attention import create_mask

from sglang_dflash.train.attention import Layout, attend, dense_mask, flex_mask, visible

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
CASES = [{}, SLIDING]


def brute_force(layout: Layout, window: int | None) -> torch.Tensor:
    """The rule of the recipe, cell by cell."""
    b, n = layout.anchors.shape
    size, context = layout.block_size, layout.context
    mask = torch.zeros(b, 1, n * size, context + n * size, dtype=torch.bool)
    for row in range(b):
        for q in range(n * size):
            j, o = divmod(q, size)
            a = int(layout.anchors[row, j])
            for k in range(context):
                seen = k < a and layout.documents[row, k] == layout.documents[row, a]
                if window is not None:
                    seen = seen and k >= a + o - (window - 1)
                mask[row, 0, q, k] = seen
            for k in range(n * size):
                jk, ok = divmod(k, size)
                seen = jk == j
                if window is not None:
                    seen = seen and ok <= o and o - ok < window
                mask[row, 0, q, context + k] = seen
    return mask


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_invariant_18_dense_and_flex_masks_are_the_rule(data: st.DataObject) -> None:
    b, length, n = data.draw(st.integers(1, 2)), data.draw(st.integers(2, 24)), data.draw(st.integers(1, 3))
    size, window = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([None, 1, 2, 5, 100]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    anchors = torch.randint(-1, length, (b, n), generator=generator)
    documents = torch.randint(0, 2, (b, length), generator=generator).cumsum(1)
    layout = Layout(anchors, documents, size)
    wanted = brute_force(layout, window)
    assert torch.equal(dense_mask(layout, window), wanted)
    flex = create_mask(visible(layout, window), b, None, layout.queries, length + layout.queries, device="cpu")
    assert torch.equal(flex, wanted)


@pytest.mark.parametrize("window", [None, 5])
def test_invariant_18_flex_equals_sdpa_and_softmax(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = Layout(torch.tensor([[3, 9, 20], [0, 7, -1]]), torch.arange(24).expand(2, 24) // 12, 4)
    q = torch.randn(2, 4, layout.queries, 16, generator=generator)
    k, v = (torch.randn(2, 2, 24 + layout.queries, 16, generator=generator) for _ in range(2))
    dense = dense_mask(layout, window)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 4
    plain = scores.masked_fill(~dense, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(attend(q, k, v, dense), plain, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(attend(q, k, v, flex_mask(layout, window)), plain, atol=2e-6, rtol=1e-5)
    wrong = Layout(layout.anchors + 1, layout.documents, 4)
    assert not torch.allclose(attend(q, k, v, dense_mask(wrong, window)), plain, atol=1e-3)


@pytest.mark.parametrize("case", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 40}])
def test_invariant_18_a_drafter_on_flex_blocks_equals_the_dense_one(case: dict) -> None:
    """Long enough that FlexAttention's 128-wide blocks are empty, partial and full."""
    drafter = make_drafter(block_size=16, head_dim=16, **case)
    features, tokens, embedding = inputs(2, 420, drafter)
    documents = torch.tensor([[0] * 420, [0] * 190 + [1] * 200 + [-1] * 30])
    generator = torch.Generator().manual_seed(0)
    anchors = torch.stack([torch.randperm(380, generator=generator)[:20].sort().values for _ in range(2)])
    anchors[1, 18:] = -1
    layout, window = Layout(anchors, documents, 16), case.get("sliding_window")
    masks = {"full_attention": flex_mask(layout), "sliding_attention": flex_mask(layout, window)}
    for kind, mask in masks.items():
        wanted = dense_mask(layout, window if kind == "sliding_attention" else None)
        covered = cells(mask.kv_num_blocks, mask.kv_indices, wanted) & wanted  # partly visible blocks apply the rule
        covered |= cells(mask.full_kv_num_blocks, mask.full_kv_indices, wanted)  # full ones are taken whole
        assert torch.equal(covered, wanted)
    blocks = masks["full_attention"]
    assert blocks.full_kv_num_blocks.sum() > 0
    assert blocks.to_dense().float().mean() < 1  # some are skipped
    with torch.no_grad():  # FlexAttention has no backward on CPU
        flex = run_blocks(drafter, features, tokens, embedding, anchors, documents, masks)
        dense = run_blocks(drafter, features, tokens, embedding, anchors, documents)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


def cells(counts: torch.Tensor, indices: torch.Tensor, like: torch.Tensor, size: int = 128) -> torch.Tensor:
    """The cells of the blocks that a BlockMask lists, as a bool mask of the shape of ``like``."""
    out = torch.zeros_like(like)
    for b in range(counts.shape[0]):
        for row in range(counts.shape[-1]):
            for block in indices[b, 0, row, : int(counts[b, 0, row])].tolist():
                out[b, 0, row * size : (row + 1) * size, block * size : (block + 1) * size] = True
    return out


@pytest.mark.parametrize("case", CASES)
def test_invariant_11_only_the_context_before_the_anchor_counts(case: dict) -> None:
    drafter = make_drafter(**case)
    features, tokens, embedding = inputs(1, 20, drafter)
    anchors = torch.tensor([[5, 12]])
    base = run_blocks(drafter, features, tokens, embedding, anchors)
    changed = features.clone()
    changed[:, 12:] += 3
    assert torch.equal(run_blocks(drafter, changed, tokens, embedding, anchors), base)
    changed = features.clone()
    changed[:, 11] += 3
    moved = run_blocks(drafter, changed, tokens, embedding, anchors)
    assert torch.equal(moved[:, 0], base[:, 0])
    assert (moved[:, 1] - base[:, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_invariant_12_no_gradient_reaches_the_context_from_the_anchor_on(case: dict) -> None:
    drafter = make_drafter(**case)
    features, tokens, embedding = inputs(1, 20, drafter)
    features.requires_grad_(True)
    anchors = torch.tensor([[9, 15]])
    run_blocks(drafter, features, tokens, embedding, anchors)[:, 0].square().sum().backward()
    assert features.grad is not None
    assert torch.count_nonzero(features.grad[:, 9:]) == 0
    assert torch.count_nonzero(features.grad[:, 8]) > 0


@pytest.mark.parametrize("case", CASES)
def test_invariant_13_blocks_are_isolated_also_when_they_overlap(case: dict) -> None:
    drafter = make_drafter(**case)
    features, tokens, embedding = inputs(1, 20, drafter)
    together = run_blocks(drafter, features, tokens, embedding, torch.tensor([[8, 9, 10]]))
    for i, anchor in enumerate((8, 9, 10)):
        alone = run_blocks(drafter, features, tokens, embedding, torch.tensor([[anchor]]))
        torch.testing.assert_close(together[:, i], alone[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_invariant_14_packed_documents_are_isolated_and_padding_adds_nothing(case: dict) -> None:
    drafter = make_drafter(**case)
    features, tokens, embedding = inputs(1, 24, drafter)
    documents = torch.tensor([[0] * 10 + [1] * 9 + [-1] * 5])
    packed = run_blocks(drafter, features, tokens, embedding, torch.tensor([[6, 15]]), documents)
    first = run_blocks(drafter, features[:, :10], tokens[:, :10], embedding, torch.tensor([[6]]))
    second = run_blocks(drafter, features[:, 10:19], tokens[:, 10:19], embedding, torch.tensor([[5]]))
    torch.testing.assert_close(packed[:, 0], first[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 1], second[:, 0], atol=1e-5, rtol=1e-5)
    one_document = run_blocks(drafter, features, tokens, embedding, torch.tensor([[6, 15]]))
    assert (one_document[:, 1] - packed[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_invariant_15_later_tokens_reach_a_block_only_through_features(case: dict) -> None:
    drafter = make_drafter(**case)
    features, tokens, embedding = inputs(1, 20, drafter)
    anchors = torch.tensor([[7]])
    base = run_blocks(drafter, features, tokens, embedding, anchors)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 40
    assert torch.equal(run_blocks(drafter, features, changed, embedding, anchors), base)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    assert not torch.allclose(run_blocks(drafter, features, changed, embedding, anchors), base)


def test_invariant_16_a_full_layer_sees_later_slots_and_a_sliding_one_does_not() -> None:
    for kind, sees in (("full_attention", True), ("sliding_attention", False)):
        drafter = make_drafter(num_layers=1, layer_types=(kind,), sliding_window=6)
        features, _, _ = inputs(1, 20, drafter)
        spec = drafter.spec
        layout = Layout(torch.tensor([[7]]), torch.zeros(1, 20, dtype=torch.int64), spec.block_size)
        window = 6 if kind == "sliding_attention" else None
        x = torch.randn(1, 4, spec.hidden_size, generator=torch.Generator().manual_seed(1))
        positions, places = torch.arange(7, 11).unsqueeze(0), torch.arange(20).unsqueeze(0)
        masks = {kind: dense_mask(layout, window)}
        base = drafter(features, x, positions, places, masks)
        later = x.clone()
        later[:, 3] += 2
        moved = drafter(features, later, positions, places, masks)
        assert torch.allclose(base[:, :3], moved[:, :3], atol=1e-6) is not sees


def test_invariant_17_the_window_ends_at_w_minus_1_for_every_offset() -> None:
    window, anchor = 6, 12
    drafter = make_drafter(num_layers=1, layer_types=("sliding_attention",), sliding_window=window)
    features, tokens, embedding = inputs(1, 20, drafter)
    anchors = torch.tensor([[anchor]])
    base = run_blocks(drafter, features, tokens, embedding, anchors)
    for offset in range(drafter.spec.block_size):
        for distance, sees in ((window - 1, True), (window, False)):
            token = anchor + offset - distance
            if token >= anchor:
                continue
            changed = features.clone()
            changed[:, token] += 3
            moved = run_blocks(drafter, changed, tokens, embedding, anchors)
            same = torch.allclose(moved[0, 0, offset], base[0, 0, offset], atol=1e-6)
            assert same is not sees, (offset, distance)


def test_layer_types_default_to_full() -> None:
    assert make_drafter(layer_types=None).layer_types == ("full_attention",) * 2
    assert drafter_spec().layer_types == ("full_attention",) * 2
