"""Accept: walk each tree from its root along the tokens that the target chose.

The target draws one token at every node from its fully processed distribution. From the root on, the walk
enters the child that carries the token drawn at the current node, and stops where there is none; the token
drawn there is the bonus. The text is the target's own, whatever the tree. Same walk as SGLang's
`verify_tree_greedy_func` and the same outputs as its DFLASH `compute_dflash_accept_bonus`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.tree import DraftTree


@dataclass(frozen=True, eq=False)
class AcceptedPaths:
    """What a verify commits, a request; B = the drafter's block size, so a path has at most B rows."""

    accept_index: Tensor  # [bs, B] int32; b * Q + row of each row on the path, the root first, then -1
    accept_lens: Tensor  # [bs] int32; rows on the path = accepted drafts + 1 = tokens committed
    out_tokens: Tensor  # [bs, B] int64; the target's token at each row on the path, then 0
    bonus: Tensor  # [bs] int64; the last token committed, the next anchor
    new_seq_lens: Tensor  # [bs] int64; prefix + accept_lens

    @classmethod
    def allocate(cls, max_bs: int, block_size: int, device: torch.device | str) -> AcceptedPaths:
        """Uninitialised buffers for `accept_walk`."""
        return cls(
            accept_index=torch.empty((max_bs, block_size), dtype=torch.int32, device=device),
            accept_lens=torch.empty(max_bs, dtype=torch.int32, device=device),
            out_tokens=torch.empty((max_bs, block_size), dtype=torch.int64, device=device),
            bonus=torch.empty(max_bs, dtype=torch.int64, device=device),
            new_seq_lens=torch.empty(max_bs, dtype=torch.int64, device=device),
        )

    @property
    def block_size(self) -> int:
        return self.accept_index.shape[1]

    def view(self, bs: int) -> AcceptedPaths:
        """The first `bs` requests; shares memory, valid until the next fill."""
        return AcceptedPaths(**{name: buffer[:bs] for name, buffer in vars(self).items()})


def accept_walk(tree: DraftTree, target_tokens: Tensor, prefix_lens: Tensor, out: AcceptedPaths) -> None:
    """Fill the first bs requests of `out`.

    target_tokens: [bs, Q] int64, the target's token at every row; prefix_lens: [bs] int32 or int64; both
    contiguous. A path that would outgrow the block size B of `out` stops there, which loses speed but never
    a token. Links must lead to greater rows; one that does not ends the list, so that zero-filled buffers
    (graph capture) cannot trap the walk. No host sync and no allocation on CUDA. Raises ValueError on a wrong
    shape, dtype, stride or size.
    """
    walk = launch_accept_walk if tree.tokens.is_cuda else naive_accept_walk
    walk(tree, target_tokens, prefix_lens, out)


def naive_accept_walk(tree: DraftTree, target_tokens: Tensor, prefix_lens: Tensor, out: AcceptedPaths) -> None:
    """The reference for `accept_walk` in plain torch, all requests in step; syncs with the host."""
    _validate(tree, target_tokens, prefix_lens, out)
    bs, q = tree.tokens.shape
    out = out.view(bs)
    requests = torch.arange(bs, device=tree.tokens.device)
    cursor = torch.zeros_like(requests)
    child = tree.next_token[:, 0].clone()
    length = torch.ones_like(requests)
    out.accept_index.fill_(-1)
    out.accept_index[:, 0] = requests * q
    out.out_tokens.zero_()
    out.out_tokens[:, 0] = target_tokens[:, 0]
    while True:
        live = (child > cursor) & (length < out.block_size)
        if not live.any():
            break
        here = torch.where(live, child, 0)
        match = live & (tree.tokens[requests, here] == target_tokens[requests, cursor])
        sibling = tree.next_sibling[requests, here]
        child = torch.where(live & (sibling > here), sibling, -1)
        child = torch.where(match, tree.next_token[requests, here], child)
        cursor = torch.where(match, here, cursor)
        taken = requests[match]
        out.accept_index[taken, length[match]] = (requests * q + here)[match].to(torch.int32)
        out.out_tokens[taken, length[match]] = target_tokens[requests, here][match]
        length = length + match
    out.accept_lens.copy_(length)
    out.bonus.copy_(target_tokens[requests, cursor])
    out.new_seq_lens.copy_(prefix_lens + length)


def launch_accept_walk(tree: DraftTree, target_tokens: Tensor, prefix_lens: Tensor, out: AcceptedPaths) -> None:
    """`accept_walk` by the kernel: for CUDA tensors, or for any under Triton's interpreter."""
    _validate(tree, target_tokens, prefix_lens, out)
    bs, q = tree.tokens.shape
    if bs == 0:
        return
    accept_walk_kernel[(bs,)](
        tree.tokens,
        tree.next_token,
        tree.next_sibling,
        target_tokens,
        prefix_lens,
        out.accept_index,
        out.accept_lens,
        out.out_tokens,
        out.bonus,
        out.new_seq_lens,
        Q=q,
        B=out.block_size,
        BLOCK_B=triton.next_power_of_2(out.block_size),
        num_warps=1,
    )


def _validate(tree: DraftTree, target_tokens: Tensor, prefix_lens: Tensor, out: AcceptedPaths) -> None:
    bs, q = tree.tokens.shape
    if target_tokens.shape != (bs, q) or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens is {target_tokens.dtype} of shape {tuple(target_tokens.shape)}, expected "
            f"torch.int64 of shape {(bs, q)}: pass one token a tree row"
        )
    if prefix_lens.shape != (bs,) or prefix_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"prefix_lens is {prefix_lens.dtype} of shape {tuple(prefix_lens.shape)}, expected int32 or "
            f"int64 of shape ({bs},): pass one length a tree"
        )
    if bs > out.accept_index.shape[0]:
        raise ValueError(f"bs is {bs}, expected at most the buffers' {out.accept_index.shape[0]}: allocate larger ones")
    for name, tensor in (
        ("target_tokens", target_tokens),
        ("prefix_lens", prefix_lens),
        ("tree.tokens", tree.tokens),
        ("tree.next_token", tree.next_token),
        ("tree.next_sibling", tree.next_sibling),
        ("out.accept_index", out.accept_index),
    ):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous: call .contiguous() on it")
        if tensor.device != tree.tokens.device:
            raise ValueError(f"{name} is on {tensor.device}, expected tree's {tree.tokens.device}: move it there")


@triton.jit
def accept_walk_kernel(  # type: ignore[no-untyped-def]
    p_tokens,  # [bs, Q] int64, and so the next three
    p_next_token,
    p_next_sibling,
    p_target,
    p_prefix_lens,  # [bs] int32 or int64
    p_accept_index,  # out [bs, B] int32
    p_accept_lens,  # out [bs] int32
    p_out_tokens,  # out [bs, B] int64
    p_bonus,  # out [bs] int64
    p_new_seq_lens,  # out [bs] int64
    Q: tl.constexpr,
    B: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_root = i_b * Q
    cols = tl.arange(0, BLOCK_B)

    cursor = tl.full((), 0, dtype=tl.int64)
    length = tl.full((), 1, dtype=tl.int32)
    child = tl.load(p_next_token + o_root)
    target = tl.load(p_target + o_root)
    b_index = tl.where(cols == 0, o_root, -1)
    b_out = tl.where(cols == 0, target, 0)
    while (child > cursor) & (length < B):
        match = tl.load(p_tokens + o_root + child) == target
        sibling = tl.load(p_next_sibling + o_root + child)
        below = tl.load(p_next_token + o_root + child)
        drawn = tl.load(p_target + o_root + child)
        b_index = tl.where((cols == length) & match, o_root + child, b_index)
        b_out = tl.where((cols == length) & match, drawn, b_out)
        cursor = tl.where(match, child, cursor)
        target = tl.where(match, drawn, target)
        length += match.to(tl.int32)
        child = tl.where(match, below, tl.where(sibling > child, sibling, -1))

    in_block = cols < B
    tl.store(p_accept_index + i_b * B + cols, b_index.to(tl.int32), mask=in_block)
    tl.store(p_out_tokens + i_b * B + cols, b_out, mask=in_block)
    tl.store(p_accept_lens + i_b, length)
    tl.store(p_bonus + i_b, target)
    tl.store(p_new_seq_lens + i_b, tl.load(p_prefix_lens + i_b).to(tl.int64) + length)
