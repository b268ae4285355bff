"""KV compaction: which pools the kernel may touch, what it moves, and when nothing has to move."""

from __future__ import annotations

import logging
import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.cpu import stand_in
from sglang_dflash.kernels.accept_walk import AcceptedPaths
from sglang_dflash.kernels.compact_kv import KVRows, compact_kv

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt.mem_cache import memory_pool  # noqa: E402

from sglang_dflash import commit  # noqa: E402

WIDTH = 6


def plain_pool(layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    pool = memory_pool.MHATokenToKVPool(
        size=48,
        page_size=4,
        dtype=dtype,
        head_num=2,
        head_dim=16,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,
    )
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer.copy_((torch.arange(buffer.shape[0]) + 0.25 * number).view(-1, 1, 1))
    for name, value in settings.items():
        setattr(pool, name, value)
    return pool


def hybrid_pool(full: Any) -> Any:
    pool = object.__new__(memory_pool.HybridLinearKVPool)
    pool.full_kv_pool = full
    return pool


def accepted(*paths: list[int], width: int = WIDTH, block: int = 4) -> AcceptedPaths:
    out = AcceptedPaths.allocate(len(paths), block, "cpu")
    out.accept_index.fill_(-1)
    for b, path in enumerate(paths):
        out.accept_index[b, : len(path)] = b * width + torch.tensor(path)
        out.accept_lens[b] = len(path)
    return out


def batch_of(slots: torch.Tensor, requests: int) -> Any:
    return SimpleNamespace(out_cache_loc=slots, seq_lens=torch.zeros(requests, dtype=torch.int64))


def allocator_of(pool: Any) -> Any:
    return SimpleNamespace(get_kvcache=lambda: pool)


@pytest.mark.parametrize("wrap", [lambda pool: pool, hybrid_pool], ids=["dense", "hybrid"])
def test_the_plain_pool_is_ours(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = plain_pool()
    with caplog.at_level(logging.INFO, "sglang_dflash.commit"):
        rows = commit.kv_rows(wrap(plain))
    assert rows is not None
    assert [b.data_ptr() for b in rows.buffers] == plain.data_ptrs.tolist()
    assert (rows.row_words * 8).tolist() == plain.data_strides.tolist()
    assert "own torch code, 4 buffers" in caplog.text


def quantized() -> Any:
    pool = plain_pool()
    pool.quant_method = SimpleNamespace(name="nvfp4")
    return pool


def odd_rows() -> Any:
    pool = plain_pool()
    pool.k_buffer = [torch.zeros(52, 1, 3)]
    return pool


def subclass() -> Any:
    pool = plain_pool()
    pool.__class__ = type("PagesInPieces", (memory_pool.MHATokenToKVPool,), {})
    return pool


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (subclass, "not the plain pool"),
        (lambda: hybrid_pool(subclass()), "not the plain pool"),
        (lambda: plain_pool(kv_cache_layout="hnd"), "layout hnd"),
        (lambda: plain_pool(kv_cache_layout="vectorized_5d"), "layout vectorized_5d"),
        (lambda: plain_pool(use_native_move_kv_cache=True), "SGLANG_NATIVE_MOVE_KV_CACHE"),
        (quantized, "quantized by nvfp4"),
        (lambda: plain_pool(layers=0), "no layers"),
        (odd_rows, "rows of 12 bytes"),
    ],
)
def test_other_pools_are_left_to_sglang(make: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sglang_dflash.commit"):
        assert commit.kv_rows(make()) is None
    assert "SGLang's move_kv_cache" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_accepted_path_moves_to_the_front(dtype: torch.dtype) -> None:
    pool = plain_pool(dtype=dtype)
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    slots = torch.randperm(51, generator=torch.Generator().manual_seed(0))[: 3 * WIDTH] + 1
    paths = [0, 2, 3, 5], [0, 1], [0, 4]
    commit.compact_target_kv(batch_of(slots, 3), accepted(*paths), allocator_of(pool))
    wanted_slot = torch.arange(52)
    for b, path in enumerate(paths):
        for j, row in enumerate(path):
            wanted_slot[slots[b * WIDTH + j]] = slots[b * WIDTH + row]
    assert (wanted_slot != torch.arange(52)).sum() == 4
    for buffer, old in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), old.view(torch.uint8)[wanted_slot])


def test_sglang_moves_the_same_rows() -> None:
    """Ours and upstream's `move_accept_tokens_to_target_kvcache` leave the same pool behind."""
    slots = torch.randperm(51, generator=torch.Generator().manual_seed(1))[: 3 * WIDTH] + 1
    paths = accepted([0, 2, 3, 5], [0, 1, 2], [0, 5])
    ours, theirs = plain_pool(), plain_pool(use_native_move_kv_cache=True)
    commit.compact_target_kv(batch_of(slots, 3), paths, allocator_of(ours))
    commit.compact_target_kv(batch_of(slots, 3), paths, allocator_of(theirs))
    for a, b in zip((*ours.k_buffer, *ours.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True):
        assert torch.equal(a, b)


def test_chains_move_nothing_and_ask_no_pool() -> None:
    chains = accepted([0, 1, 2], [0], [0, 1, 2, 3])
    commit.compact_target_kv(batch_of(torch.arange(3 * WIDTH), 3), chains, allocator=None)
    assert commit.follows_window(chains, 3 * WIDTH)
    assert not commit.follows_window(accepted([0, 1, 2], [0, 1, 3]), 2 * WIDTH)
    assert not commit.follows_window(chains, 3 * (WIDTH + 1))  # rows counted in another width


def test_hidden_rows_follow_the_path() -> None:
    hidden = torch.arange(2 * WIDTH, dtype=torch.float32).view(-1, 1)
    rows = commit.compact_hidden(hidden, accepted([0, 2, 5], [0]))
    assert rows.view(2, 4).tolist() == [[0, 2, 5, 0], [6, 0, 0, 0]]


def test_refusals_name_what_was_found() -> None:
    rows = KVRows.of(plain_pool().k_buffer)
    slots, paths = torch.arange(2 * WIDTH), accepted([0, 1], [0])
    index, lens = paths.accept_index, paths.accept_lens
    for words, call in (
        ("buffers is empty", lambda: KVRows.of([])),
        ("buffers[1] has strides", lambda: KVRows.of([torch.zeros(4, 4), torch.zeros(4, 8).mT])),
        ("buffers[1] is on meta", lambda: KVRows.of([torch.zeros(4, 4), torch.zeros(4, 4, device="meta")])),
        ("accept_index is torch.int64", lambda: compact_kv(rows, slots, index.long(), lens)),
        ("accept_lens is torch.int32 of shape (1,)", lambda: compact_kv(rows, slots, index, lens[:1])),
        ("slots is torch.int64 of shape (11,)", lambda: compact_kv(rows, slots[1:], index, lens)),
        ("slots is torch.int64 of shape (6,)", lambda: compact_kv(rows, slots[:6], index, lens)),
        ("accept_index has strides", lambda: compact_kv(rows, slots, index.mT.contiguous().mT, lens)),
        ("accept_lens is on meta", lambda: compact_kv(rows, slots, index, lens.to("meta"))),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are matched below
            call()
        assert words in str(error.value)
