"""The decode kernels: in Triton's interpreter against their naive twins, compiled for sm90, and the twins
themselves against plain python."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tree_reference import python_walk, random_candidates, target_tokens_for

from sglang_dflash.kernels.accept_walk import AcceptedPaths, accept_walk
from sglang_dflash.kernels.build_tree import TreeBuffers, build_tree_into
from sglang_dflash.kernels.verify_mask import write_verify_mask
from sglang_dflash.tree import DraftTree, build_draft_tree

HERE = Path(__file__).parent


@pytest.mark.parametrize("check", ["build_tree", "verify_mask", "accept_walk", "compact_kv", "compile"])
def test_kernel(check: str, tmp_path: Path) -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment["TRITON_INTERPRET"] = "0" if check == "compile" else "1"
    command = [sys.executable, str(HERE / "kernel_checks.py"), check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"checked {check}" in done.stdout


def tree_of(bs: int = 3, depth: int = 5, width: int = 3, nodes: int = 12, seed: int = 0) -> DraftTree:
    return build_draft_tree(*random_candidates(bs, depth, width, seed, levels=3, dead=0.1), nodes)


def test_static_buffers_follow_the_builder() -> None:
    out = TreeBuffers.allocate(4, 12, "cpu")
    lone_roots = build_draft_tree(torch.zeros(4, 1, 1, dtype=torch.int64), torch.full((4, 1, 1), -torch.inf), 12)
    assert torch.equal(out.view(4).mask(), lone_roots.mask())
    addresses = {name: field.data_ptr() for name, field in vars(out).items()}
    for seed in (1, 2):
        token_ids, log_probs = random_candidates(3, 5, 3, seed)
        build_tree_into(token_ids, log_probs, torch.tensor([7, 8, 9]), out, 12)
        wanted = build_draft_tree(token_ids, log_probs, 12, torch.tensor([7, 8, 9]))
        for name, field in vars(out.view(3)).items():
            assert torch.equal(field, getattr(wanted, name))
            assert field.data_ptr() == addresses[name]


def test_mask_layouts() -> None:
    tree = tree_of()
    bs, q = tree.tokens.shape
    prefix = torch.tensor([4, 0, 9])
    positions = torch.zeros(bs, q, dtype=torch.int64)

    square = torch.zeros(bs * q * q + 5, dtype=torch.bool)
    write_verify_mask(tree, prefix, square, positions, full_mask=False)
    assert torch.equal(square[:-5].view(bs, q, q), tree.mask())
    assert not square[-5:].any()
    assert torch.equal(positions, prefix[:, None] + tree.depths)

    for fill, prefix_cell in ((False, 7), (True, 1)):
        full = torch.full((q * (13 + 3 * q),), 7, dtype=torch.uint8)
        write_verify_mask(tree, prefix, full, positions, full_mask=True, fill_prefix=fill)
        start = 0
        for b, length in enumerate(prefix.tolist()):
            request = full[start : start + q * (length + q)].view(q, length + q)
            assert (request[:, :length] == prefix_cell).all()
            assert torch.equal(request[:, length:].bool(), tree.mask()[b])
            start += request.numel()
        assert start == full.numel()


def test_accept_follows_the_target() -> None:
    prefix = torch.tensor([5, 0, 77, 1000], dtype=torch.int32)
    lengths = set()
    for seed, block in itertools.product(range(8), (7, 16, 2)):
        tree = tree_of(bs=4, depth=6, width=3, nodes=30, seed=seed)
        target = target_tokens_for(tree, seed)
        out = AcceptedPaths.allocate(6, block, "cpu")
        accept_walk(tree, target, prefix, out)
        for b in range(4):
            path = python_walk(tree, target, b)[:block]
            padding = block - len(path)
            drawn = target[b, path].tolist()
            lengths.add(len(path))
            assert out.accept_index[b].tolist() == [b * 31 + row for row in path] + [-1] * padding
            assert out.out_tokens[b].tolist() == drawn + [0] * padding
            assert out.accept_lens[b] == len(path)
            assert out.bonus[b] == drawn[-1]
            assert out.new_seq_lens[b] == prefix[b] + len(path)
    assert lengths >= {1, 2, 3, 4}, "the targets drawn here must exercise short and long paths"


def test_accept_needs_the_child_not_just_a_row_with_the_token() -> None:
    """Token 20 stands below 10 and not below 11: after 11 the target's 20 ends the walk."""
    log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    tree = build_draft_tree(torch.tensor([[[10, 11], [20, 21]]]), log_probs, 3, torch.tensor([1]))
    assert tree.tokens.tolist() == [[1, 10, 20, 11]]
    out = AcceptedPaths.allocate(1, 4, "cpu")
    accept_walk(tree, torch.tensor([[11, 20, 5, 20]]), torch.tensor([8]), out)
    assert out.accept_index.tolist() == [[0, 3, -1, -1]]
    assert out.out_tokens.tolist() == [[11, 20, 0, 0]]


def test_no_requests() -> None:
    token_ids, log_probs = torch.zeros(0, 2, 2, dtype=torch.int64), torch.zeros(0, 2, 2)
    none = torch.zeros(0, dtype=torch.int64)
    buffers = TreeBuffers.allocate(2, 3, "cpu")
    build_tree_into(token_ids, log_probs, None, buffers, 3)
    tree = buffers.view(0)
    write_verify_mask(tree, none, torch.zeros(4, dtype=torch.bool), none, full_mask=True)
    accept_walk(tree, none.view(0, 4), none, AcceptedPaths.allocate(2, 3, "cpu"))


def test_refusals_name_what_was_found() -> None:
    tree = tree_of()
    lens, bools = torch.zeros(3, dtype=torch.int64), torch.zeros(3 * 13 * 13, dtype=torch.bool)
    positions = torch.zeros(39, dtype=torch.int64)
    ids, lps = torch.zeros(3, 5, 3, dtype=torch.int64), torch.zeros(3, 5, 3)
    buffers, paths = TreeBuffers.allocate(3, 12, "cpu"), AcceptedPaths.allocate(3, 6, "cpu")

    def mask(*arguments: torch.Tensor, full: bool = False, fill: bool = False) -> None:
        write_verify_mask(tree, *arguments, full_mask=full, fill_prefix=fill)

    for words, call in (
        ("num_nodes is 11", lambda: build_tree_into(ids, lps, None, buffers, 11)),
        ("bs is 6", lambda: build_tree_into(ids.repeat(2, 1, 1), lps.repeat(2, 1, 1), None, buffers, 12)),
        ("token_ids has strides", lambda: build_tree_into(ids.mT.contiguous().mT, lps, None, buffers, 12)),
        ("out is on cpu", lambda: build_tree_into(ids.to("meta"), lps.to("meta"), None, buffers, 12)),
        ("prefix_lens is torch.float32", lambda: mask(lens.float(), bools, positions)),
        ("mask has dtype torch.int32", lambda: mask(lens, bools.int(), positions)),
        ("positions has 38 elements", lambda: mask(lens, bools, positions[1:])),
        ("mask has 506 cells", lambda: mask(lens, bools[1:], positions)),
        ("mask has 507 cells", lambda: mask(lens + 1, bools, positions, full=True)),
        ("fill_prefix is True", lambda: mask(lens, bools, positions, fill=True)),
        (
            "target_tokens is torch.int64 of shape (3, 12)",
            lambda: accept_walk(tree, tree.tokens[:, 1:], lens, paths),
        ),
        ("prefix_lens is torch.int64 of shape (2,)", lambda: accept_walk(tree, tree.tokens, lens[:2], paths)),
        ("bs is 3", lambda: accept_walk(tree, tree.tokens, lens, paths.view(2))),
        ("target_tokens is on meta", lambda: accept_walk(tree, tree.tokens.to("meta"), lens, paths)),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are matched below
            call()
        assert words in str(error.value)
