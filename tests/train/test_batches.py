"""Batches: every text once an epoch, the same batch at the same place, whole texts in rows, prefetch that ends."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_data import MASK_ID, write_data

from sglang_dflash.train.batches import Batch, Batches, pack
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.shards import Dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(write_data(tmp_path_factory.mktemp("data"), samples=23, uneven=True))


def batches(dataset: Dataset, *, rank: int = 0, world: int = 1, mask_token_id: int = MASK_ID) -> Batches:
    return Batches(
        dataset, row_length=48, rows=2, seed=3, epochs=6, rank=rank, world=world, mask_token_id=mask_token_id
    )


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("features", "token_ids", "documents"))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 4), st.randoms())
def test_packing_keeps_every_sample_once_and_every_row_within_its_length(lengths, rows, random) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    packed = pack(lengths, order, 20, rows)
    assert sorted(i for batch in packed for row in batch for i in row) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= rows for batch in packed)
    assert all(sum(lengths[i] for i in row) <= 20 for batch in packed for row in batch)


def test_a_text_longer_than_a_row_is_refused_not_cut() -> None:
    with pytest.raises(TrainError, match="sample 1: found 21 tokens, want at most max_length 20"):
        pack([3, 21], [0, 1], 20, 1)


def test_every_epoch_has_every_sample_once_over_all_ranks(dataset: Dataset) -> None:
    ranks = [batches(dataset, rank=rank, world=3) for rank in range(3)]
    assert len({tuple(rank.per_epoch) for rank in ranks}) == 1  # or a rank would wait for ever
    for epoch, steps in enumerate(ranks[0].per_epoch):
        seen = Counter(i for rank in ranks for step in range(steps) for row in rank.indices(epoch, step) for i in row)
        assert seen == Counter(range(len(dataset)))
    orders = [[i for row in ranks[0].indices(epoch, 0) for i in row] for epoch in range(2)]
    assert orders[0] != orders[1]


def test_rows_hold_whole_texts_and_zeros(dataset: Dataset) -> None:
    source = batches(dataset)
    for step in range(source.per_epoch[0]):
        batch, rows = source.at(0, step), source.indices(0, step)
        assert batch.features.shape == (2, 48, 96)
        for r, row in enumerate(rows):
            samples = [dataset[i] for i in row]
            used = sum(len(s.token_ids) for s in samples)
            assert torch.equal(batch.token_ids[r, :used], torch.cat([s.token_ids for s in samples]).long())
            assert torch.equal(batch.features[r, :used], torch.cat([s.features for s in samples]))
            assert torch.equal(batch.loss_mask[r, :used], torch.cat([s.loss_mask for s in samples]))
            documents = [d for d, s in enumerate(samples) for _ in s.token_ids]
            assert batch.documents[r].tolist() == documents + [-1] * (48 - used)
            assert not batch.features[r, used:].any()
            assert not batch.loss_mask[r, used:].any()


def test_a_rank_past_the_end_gets_padding_only(dataset: Dataset) -> None:
    last = batches(dataset, rank=49, world=50)
    batch = last.at(0, last.per_epoch[0] - 1)
    assert (batch.documents == -1).all()
    assert not batch.features.any()


def test_the_stream_is_the_batches_from_any_place(dataset: Dataset) -> None:
    source = batches(dataset)
    places = [(epoch, step) for epoch, steps in enumerate(source.per_epoch) for step in range(steps)]
    assert len(set(source.per_epoch)) > 1  # an epoch's number of batches depends on its order
    first = places.index((2, 3))
    streamed = list(batches(dataset).stream(2, 3))
    assert len(streamed) == len(places) - first
    assert all(same(a, source.at(*place)) for a, place in zip(streamed, places[first:], strict=True))


def test_the_prefetch_thread_ends_with_its_reader(dataset: Dataset) -> None:
    stream = batches(dataset).stream(0, 0, ahead=1)
    next(stream)
    stream.close()
    for thread in threading.enumerate():
        if thread.name == "batches":
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_an_error_while_reading_reaches_the_trainer(tmp_path: Path) -> None:
    dataset = Dataset(write_data(tmp_path / "data", samples=23, uneven=True))
    shard = sorted((tmp_path / "data").glob("shard-*"))[-1]
    stream = batches(dataset).stream(0, 0)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(TrainError, match="the file is truncated or damaged"):
        list(stream)


def test_invariant_25_a_mask_token_in_any_text_stops_the_run(dataset: Dataset) -> None:
    """The first samples are checked before the run, the others when their batch is made."""
    token = int(dataset[22].token_ids[-1])
    with pytest.raises(TrainError, match=f"found the mask token {token} in its text"):
        list(batches(dataset, mask_token_id=token).stream(0, 0))
