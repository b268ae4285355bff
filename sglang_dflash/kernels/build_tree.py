"""Best-first draft-tree construction as one Triton launch; the naive twin is `tree.naive_build_draft_tree`.

One program (one warp) a request. The lazy frontier of DDTree (arXiv 2604.12989) holds, for every row popped
so far, its best child that is not yet popped, so it has one slot a row and lives in registers. A pop costs
two one-instruction reductions and two scalar loads; links and ancestor sets follow, for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dflash.tree import DraftTree, naive_build_draft_tree, validate_candidates


@dataclass(frozen=True, eq=False)
class TreeBuffers:
    """Static home of the trees of up to `max_bs` requests: fixed addresses for CUDA graphs.

    `build_tree_into` fills the first bs requests of every field; fields as in `DraftTree`, max_bs for bs.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    next_token: Tensor
    next_sibling: Tensor
    ancestors: Tensor
    is_chain: Tensor

    @classmethod
    def allocate(cls, max_bs: int, num_nodes: int, device: torch.device | str) -> TreeBuffers:
        """Buffers that hold lone roots (every node unused) until they are first filled."""
        rows = (max_bs, num_nodes + 1)
        node_bit = torch.zeros((num_nodes + 1, 2), dtype=torch.int64, device=device)
        for row in range(1, num_nodes + 1):
            node_bit[row, (row - 1) // 64] = -(1 << 63) if row % 64 == 0 else 1 << (row - 1) % 64
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(
            tokens=zeros,
            parents=torch.full_like(zeros, -1),
            depths=torch.zeros_like(zeros),
            next_token=torch.full_like(zeros, -1),
            next_sibling=torch.full_like(zeros, -1),
            ancestors=node_bit.repeat(max_bs, 1, 1),
            is_chain=torch.ones(max_bs, dtype=torch.bool, device=device),
        )

    @property
    def max_bs(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1] - 1

    def view(self, bs: int) -> DraftTree:
        """The trees of the first `bs` requests; shares memory, valid until the next fill."""
        return DraftTree(**{name: buffer[:bs] for name, buffer in vars(self).items()})


def build_tree_into(
    token_ids: Tensor, log_probs: Tensor, root_tokens: Tensor | None, out: TreeBuffers, num_nodes: int
) -> None:
    """Fill `out.view(bs)` with `tree.build_draft_tree(token_ids, log_probs, num_nodes, root_tokens)`.

    token_ids: [bs, D, K] int32 or int64; log_probs: [bs, D, K] float32; root_tokens: [bs] int32 or int64, or
    None. All contiguous. Every depth must already be sorted by descending log-prob: this is not checked, and
    an unsorted depth gives a tree that is legal but not the best. On CUDA it neither synchronises nor
    allocates, so a graph may capture it. Raises ValueError on a wrong shape, dtype, device, stride or size.
    """
    if token_ids.is_cuda:
        launch_build_tree(token_ids, log_probs, root_tokens, out, num_nodes)
        return
    _validate(token_ids, log_probs, root_tokens, out, num_nodes)
    tree = naive_build_draft_tree(token_ids, log_probs, num_nodes, root_tokens)
    for name, field in vars(out.view(token_ids.shape[0])).items():
        field.copy_(getattr(tree, name))


def launch_build_tree(
    token_ids: Tensor, log_probs: Tensor, root_tokens: Tensor | None, out: TreeBuffers, num_nodes: int
) -> None:
    """`build_tree_into` by the kernel: for CUDA tensors, or for any under Triton's interpreter."""
    _validate(token_ids, log_probs, root_tokens, out, num_nodes)
    bs, depth, width = token_ids.shape
    if bs == 0:
        return
    build_tree_kernel[(bs,)](
        token_ids,
        log_probs,
        token_ids if root_tokens is None else root_tokens,
        out.tokens,
        out.parents,
        out.depths,
        out.next_token,
        out.next_sibling,
        out.ancestors,
        out.is_chain.view(torch.uint8),
        HAS_ROOT=root_tokens is not None,
        D=depth,
        K=width,
        N=num_nodes,
        BLOCK=block_size(num_nodes),
        num_warps=1,
    )


def block_size(num_nodes: int) -> int:
    """Frontier slots: at least a full warp, as only a full warp reduces in one instruction (redux.sync)."""
    return max(32, triton.next_power_of_2(num_nodes))


def _validate(
    token_ids: Tensor, log_probs: Tensor, root_tokens: Tensor | None, out: TreeBuffers, num_nodes: int
) -> None:
    validate_candidates(token_ids, log_probs, num_nodes, root_tokens)
    if num_nodes != out.num_nodes:
        raise ValueError(f"num_nodes is {num_nodes}, expected the buffers' {out.num_nodes}: allocate others")
    if token_ids.shape[0] > out.max_bs:
        raise ValueError(
            f"bs is {token_ids.shape[0]}, expected at most the buffers' {out.max_bs}: allocate larger ones"
        )
    if out.tokens.device != token_ids.device:
        raise ValueError(f"out is on {out.tokens.device}, expected token_ids' {token_ids.device}: allocate it there")
    for name, tensor in (("token_ids", token_ids), ("log_probs", log_probs), ("root_tokens", root_tokens)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous: call .contiguous() on it")


# A frontier entry's key is two int32: the score in an order-preserving form, then the tie key
#   31-depth : 5 | 255-parent : 8 | 15-rank : 4 | previous sibling's row : 8
# The largest pair is next. Depth, parent and rank identify the entry; the last byte only rides along.
# One int64 would need a single reduction, but of ten shuffles; two int32 ones are two instructions.
_DEAD: tl.constexpr = tl.constexpr(-(2**31))  # below the image of every score, -inf included


@triton.jit
def _clean(lp):  # type: ignore[no-untyped-def]
    """NaN and -inf -> -inf, above 0 -> 0; as `tree._clean`."""
    return tl.where(lp < 0, lp, tl.where(lp >= 0, 0.0, -float("inf")))


@triton.jit
def _score_to_int(score):  # type: ignore[no-untyped-def]
    """Order-preserving fp32 -> int32; -inf becomes _DEAD."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(score == -float("inf"), _DEAD, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _int_to_score(key):  # type: ignore[no-untyped-def]
    """Inverse of `_score_to_int` for finite scores."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tie_key(depth, parent, rank, previous):  # type: ignore[no-untyped-def]
    return ((31 - depth) << 20) | ((255 - parent) << 12) | ((15 - rank) << 8) | previous


@triton.jit
def build_tree_kernel(  # type: ignore[no-untyped-def]
    p_token_ids,  # [bs, D, K] int32 or int64
    p_log_probs,  # [bs, D, K] float32, each depth descending
    p_root_tokens,  # [bs] int32 or int64; not read unless HAS_ROOT
    p_tokens,  # out [bs, N+1] int64, and so the next four
    p_parents,
    p_depths,
    p_next_token,
    p_next_sibling,
    p_ancestors,  # out [bs, N+1, 2] int64
    p_is_chain,  # out [bs] uint8
    HAS_ROOT: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    p_token_ids += i_b * (D * K)
    p_log_probs += i_b * (D * K)
    slots = tl.arange(0, BLOCK)  # slot s serves the children of row s
    rows = slots + 1  # the row whose pop is recorded in b_popped

    first = _clean(tl.load(p_log_probs))
    b_score = tl.where(slots == 0, _score_to_int(first), _DEAD)
    b_tie = tl.where(slots == 0, _tie_key(1, 0, 0, 0), 0)
    b_parent_score = tl.zeros([BLOCK], dtype=tl.float32)
    b_popped = tl.full([BLOCK], -1, dtype=tl.int32)  # tie keys of the popped entries, in row order

    for t in range(1, N + 1):
        best_score = tl.max(b_score, axis=0)
        best_tie = tl.max(tl.where(b_score == best_score, b_tie, 0), axis=0)
        live = best_score > _DEAD
        depth = 31 - ((best_tie >> 20) & 31)
        parent = 255 - ((best_tie >> 12) & 255)
        rank = 15 - ((best_tie >> 8) & 15)
        score = _int_to_score(best_score)
        p_rank = p_log_probs + (depth - 1) * K + rank
        sibling_lp = tl.load(p_rank + 1, mask=live & (rank + 1 < K), other=-float("inf"))
        child_lp = tl.load(p_log_probs + depth * K, mask=live & (depth < D), other=-float("inf"))

        b_popped = tl.where((rows == t) & live, best_tie, b_popped)
        # The sibling takes the popped entry's slot, the first child the new row's own.
        hit = (slots == parent) & live
        b_score = tl.where(hit, _score_to_int(b_parent_score + _clean(sibling_lp)), b_score)
        b_tie = tl.where(hit, _tie_key(depth, parent, rank + 1, t), b_tie)
        fresh = (slots == t) & live
        b_score = tl.where(fresh, _score_to_int(score + _clean(child_lp)), b_score)
        b_tie = tl.where(fresh, _tie_key(depth + 1, t, 0, 0), b_tie)
        b_parent_score = tl.where(fresh, score, b_parent_score)

    in_tree = rows <= N
    used = b_popped >= 0
    depths = tl.where(used, 31 - ((b_popped >> 20) & 31), 0)
    parents = tl.where(used, 255 - ((b_popped >> 12) & 255), -1)
    ranks = 15 - ((b_popped >> 8) & 15)
    previous = b_popped & 255
    tokens = tl.load(p_token_ids + (depths - 1) * K + ranks, mask=used & in_tree, other=0)

    o_root = i_b * (N + 1)
    o_rows = o_root + rows
    root = tl.full((), -1, dtype=tl.int64)
    if HAS_ROOT:
        root = tl.load(p_root_tokens + i_b).to(tl.int64)
    tl.store(p_tokens + o_root, root)
    tl.store(p_parents + o_root, tl.full((), -1, dtype=tl.int64))
    tl.store(p_depths + o_root, tl.full((), 0, dtype=tl.int64))
    tl.store(p_next_token + o_root, tl.full((), -1, dtype=tl.int64))
    tl.store(p_next_sibling + o_root, tl.full((), -1, dtype=tl.int64))
    tl.store(p_tokens + o_rows, tokens.to(tl.int64), mask=in_tree)
    tl.store(p_parents + o_rows, parents.to(tl.int64), mask=in_tree)
    tl.store(p_depths + o_rows, depths.to(tl.int64), mask=in_tree)
    none = tl.full([BLOCK], -1, dtype=tl.int64)
    tl.store(p_next_token + o_rows, none, mask=in_tree)
    tl.store(p_next_sibling + o_rows, none, mask=in_tree)
    broken = tl.max(tl.where(used & (parents != slots), 1, 0), axis=0)
    tl.store(p_is_chain + i_b, (1 - broken).to(tl.uint8))
    # Other lanes read the parents below and overwrite the links' -1.
    tl.debug_barrier()

    tl.store(p_next_token + o_root + parents, rows.to(tl.int64), mask=used & (ranks == 0))
    tl.store(p_next_sibling + o_root + previous, rows.to(tl.int64), mask=used & (ranks > 0))

    cursor = tl.where(in_tree, rows, 0).to(tl.int64)
    low = tl.zeros([BLOCK], dtype=tl.int64)
    high = tl.zeros([BLOCK], dtype=tl.int64)
    one = tl.full([BLOCK], 1, dtype=tl.int64)
    for _ in range(D):
        bit = one << ((cursor - 1) & 63)
        low |= tl.where((cursor > 0) & (cursor <= 64), bit, 0)
        high |= tl.where(cursor > 64, bit, 0)
        above = tl.load(p_parents + o_root + cursor, mask=cursor > 0, other=0)
        cursor = tl.maximum(above, 0)
    p_words = p_ancestors + o_rows * 2
    tl.store(p_words, low, mask=in_tree)
    tl.store(p_words + 1, high, mask=in_tree)
    zero = tl.full((), 0, dtype=tl.int64)
    tl.store(p_ancestors + o_root * 2, zero)
    tl.store(p_ancestors + o_root * 2 + 1, zero)
