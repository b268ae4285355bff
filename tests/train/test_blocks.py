"""Anchors, labels and which slots count: invariants 20, 21 and 23."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.train.blocks import document_positions, make_blocks, sample_anchors


def make(loss_mask: list[int], documents: list[int] | None = None, anchors: tuple[int, ...] = (0,), size: int = 4):
    length = len(loss_mask)
    return make_blocks(
        torch.arange(100, 100 + length).unsqueeze(0),
        torch.tensor([loss_mask]).bool(),
        torch.tensor([documents or [0] * length]),
        torch.tensor([anchors]),
        size,
        999,
    )


def test_labels_and_inputs() -> None:
    blocks = make([1] * 6, anchors=(1, -1))
    assert blocks.input_ids[0, 0].tolist() == [101, 999, 999, 999]
    assert blocks.labels[0, 0].tolist() == [0, 102, 103, 104]
    assert blocks.valid[0].tolist() == [[False, True, True, True], [False] * 4]
    assert blocks.positions[0, 0].tolist() == [1, 2, 3, 4]


def test_invariant_21_labels_stop_at_a_mask_gap() -> None:
    # The token behind the gap is an assistant's again and must not count.
    assert make([1, 1, 0, 1, 1, 1]).valid[0, 0].tolist() == [False, True, False, False]


def test_invariant_21_labels_stop_at_the_document_end() -> None:
    assert make([1] * 6, [0, 0, 0, 1, 1, 1], anchors=(1,)).valid[0, 0].tolist() == [False, True, False, False]


def test_invariant_21_labels_stop_at_the_sequence_end() -> None:
    blocks = make([1] * 6, anchors=(4,))
    assert blocks.valid[0, 0].tolist() == [False, True, False, False]
    assert blocks.labels[0, 0].tolist() == [0, 105, 0, 0]


def test_positions_count_from_the_document_start() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [5, 5, 7, 7, 7, 7]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    assert make([1] * 6, [0, 0, 0, 1, 1, 1], anchors=(4,)).positions[0, 0].tolist() == [1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_invariant_23_anchors_are_valid_unique_and_sorted(data: st.DataObject) -> None:
    length, count = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 40))
    bits = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = torch.tensor([data.draw(bits), data.draw(bits)])
    documents = torch.tensor([data.draw(bits), data.draw(bits)]).long().cumsum(1) - 1
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    anchors = sample_anchors(mask, documents, count, generator)
    assert anchors.shape == (2, count)
    for row in range(2):
        good = [
            p
            for p in range(length - 1)
            if mask[row, p] and mask[row, p + 1] and documents[row, p] == documents[row, p + 1] >= 0
        ]
        real = [a for a in anchors[row].tolist() if a >= 0]
        assert len(real) == min(count, len(good))
        assert set(real) <= set(good)
        assert real == sorted(set(real))
        assert anchors[row].tolist() == real + [-1] * (count - len(real))


def test_invariant_23_anchors_are_uniform_and_reproducible() -> None:
    mask, documents = torch.ones(1, 11, dtype=torch.bool), torch.zeros(1, 11, dtype=torch.int64)
    counts = torch.zeros(10)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        counts[sample_anchors(mask, documents, 3, generator)[0]] += 1
    expected = torch.full((10,), 4000 * 3 / 10)
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees, p 0.001
    draw = [sample_anchors(mask, documents, 3, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*draw)


def test_invariant_23_an_empty_row_has_no_anchors() -> None:
    anchors = sample_anchors(torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.int64), 3)
    assert anchors.tolist() == [[-1, -1, -1]]
    assert not make([0] * 5, anchors=(-1,)).valid.any()
