"""The draft tree of DDTree (arXiv 2604.12989): its shape, its rules, and the plain torch builder.

The drafter proposes, for each depth d = 1..D, K candidate tokens with log-probs. A *prefix* is one candidate
a depth for depths 1..d; its score is the fp32 sum of its log-probs, added from the root outward. The N best
prefixes form a tree, because no prefix outscores its own prefix.

The order is total, so that every rank and every device builds the same tree:
score descending, then depth ascending, then the parent's row ascending, then the candidate's rank ascending.
Parents therefore precede their children and siblings stand in rank order, which is what SGLang's tree links
(`EagleVerifyInput.retrieve_next_token` / `retrieve_next_sibling`) and its GDN kernels require.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 128  # ancestor sets are 128-bit
MAX_CANDIDATES = 16
MAX_DEPTH = 31
WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees; Q = N + 1 rows, row 0 is the root, rows 1..N are nodes in best-first order.

    When fewer than N prefixes have a finite score, the last rows are *unused*: token 0, parent -1, depth 0,
    no links, unreachable from the root. All fields live on the device of the drafter's candidates.
    """

    tokens: Tensor  # [bs, Q] int64; column 0 is the anchor (the last committed token), or -1 if not given
    parents: Tensor  # [bs, Q] int64; -1 for the root and for unused rows
    depths: Tensor  # [bs, Q] int64; 0 for the root and for unused rows
    next_token: Tensor  # [bs, Q] int64; the first child's row, or -1
    next_sibling: Tensor  # [bs, Q] int64; the next sibling's row (always a greater one), or -1
    ancestors: Tensor  # [bs, Q, 2] int64; bit i-1 of the 128 = row i is this row or above it (root implied)
    is_chain: Tensor  # [bs] bool; every used row's parent is the row before it

    def __post_init__(self) -> None:
        rows = self.tokens.shape
        assert len(rows) == 2
        for links in (self.parents, self.depths, self.next_token, self.next_sibling):
            assert links.shape == rows
        assert self.ancestors.shape == (*rows, 2)
        assert self.is_chain.shape == rows[:1]

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """N: nodes a tree, the root not counted, unused rows counted."""
        return self.tokens.shape[1] - 1

    @property
    def used(self) -> Tensor:
        """Rows that are in the tree, the root included. -> [bs, Q] bool."""
        used = self.depths > 0
        used[:, 0] = True
        return used

    def mask(self) -> Tensor:
        """Which rows (last axis) each row attends to: itself and its ancestors. -> [bs, Q, Q] bool.

        An unused row sees itself alone: a softmax over no key at all would be NaN.
        """
        node = torch.arange(self.num_nodes, device=self.tokens.device)
        words = self.ancestors[:, :, node // WORD_BITS]
        sees_node = ((words >> (node % WORD_BITS)) & 1).bool()
        return torch.cat((self.used.unsqueeze(-1), sees_node), dim=-1)

    def positions(self, prefix_lens: Tensor) -> Tensor:
        """Sequence position of every row: `prefix_lens` [bs] + depth. -> [bs, Q] int64."""
        return prefix_lens.to(torch.int64).unsqueeze(1) + self.depths


def build_draft_tree(
    token_ids: Tensor, log_probs: Tensor, num_nodes: int, root_tokens: Tensor | None = None
) -> DraftTree:
    """Keep the `num_nodes` best prefixes of the drafter's candidates.

    token_ids: [bs, D, K] int32 or int64; log_probs: [bs, D, K] float32, in any order within a depth;
    root_tokens: [bs] int32 or int64, the anchors. Sizes: bs >= 0, D 1..31, K 1..16, num_nodes 1..128.
    A log-prob above 0 (rounding of a normaliser) counts as 0; -inf and NaN mean "impossible". Ranks follow a
    stable descending sort of each depth.

    Runs the Triton kernel on CUDA tensors and `naive_build_draft_tree` elsewhere. It allocates; inside a CUDA
    graph use `kernels.build_tree.build_tree_into`. Raises ValueError on a wrong shape, dtype, device or size.
    """
    validate_candidates(token_ids, log_probs, num_nodes, root_tokens)
    token_ids, log_probs = _sort_candidates(token_ids, log_probs)
    if not token_ids.is_cuda:
        return _build_from_sorted(token_ids, log_probs, num_nodes, root_tokens)
    from sglang_dflash.kernels.build_tree import TreeBuffers, build_tree_into

    bs = token_ids.shape[0]
    buffers = TreeBuffers.allocate(bs, num_nodes, token_ids.device)
    build_tree_into(token_ids, log_probs, root_tokens, buffers, num_nodes)
    return buffers.view(bs)


def naive_build_draft_tree(
    token_ids: Tensor, log_probs: Tensor, num_nodes: int, root_tokens: Tensor | None = None
) -> DraftTree:
    """The reference for `build_draft_tree`, same arguments and result, in plain torch on any device.

    Level by level instead of best-first: keep the N best prefixes of every depth, then the N best of all of
    them. Exact, since whatever outranks a prefix's ancestor outranks the prefix: an ancestor of one of the N
    best is itself among the N best of its depth.
    """
    validate_candidates(token_ids, log_probs, num_nodes, root_tokens)
    token_ids, log_probs = _sort_candidates(token_ids, log_probs)
    return _build_from_sorted(token_ids, log_probs, num_nodes, root_tokens)


def validate_candidates(token_ids: Tensor, log_probs: Tensor, num_nodes: int, root_tokens: Tensor | None) -> None:
    """Raise ValueError, or TypeError, unless the arguments are what `build_draft_tree` documents. Reads no values."""
    for name, value in (("token_ids", token_ids), ("log_probs", log_probs), ("root_tokens", root_tokens)):
        if not isinstance(value, Tensor) and not (name == "root_tokens" and value is None):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor: pass torch.as_tensor of it")
    if token_ids.ndim != 3:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)}, expected three axes [bs, depth, K]: reshape it"
        )
    if log_probs.shape != token_ids.shape:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)}, expected token_ids' {tuple(token_ids.shape)}: "
            "pass one log-prob a candidate"
        )
    bs, depth, width = token_ids.shape
    for name, size, most in (
        ("depth (token_ids.shape[1])", depth, MAX_DEPTH),
        ("K (token_ids.shape[2])", width, MAX_CANDIDATES),
        ("num_nodes", num_nodes, MAX_NODES),
    ):
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise ValueError(f"{name} is {size!r}, expected an int in 1..{most}: choose a size in that range")
    if log_probs.dtype != torch.float32:
        raise ValueError(f"log_probs has dtype {log_probs.dtype}, expected torch.float32: call .float() on it")
    ids = [("token_ids", token_ids)]
    if root_tokens is not None:
        ids.append(("root_tokens", root_tokens))
        if root_tokens.shape != (bs,):
            raise ValueError(f"root_tokens has shape {tuple(root_tokens.shape)}, expected ({bs},): pass one a request")
    for name, tensor in ids:
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} has dtype {tensor.dtype}, expected torch.int32 or torch.int64: call .long() on it"
            )
        if tensor.device != log_probs.device:
            raise ValueError(f"{name} is on {tensor.device}, expected log_probs' {log_probs.device}: move it there")


def _clean(log_probs: Tensor) -> Tensor:
    """Log-probs with NaN as -inf and values above 0 as 0 (never -0.0, so equal scores have equal bits)."""
    clamped = torch.where(log_probs >= 0, 0.0, -torch.inf)
    return torch.where(log_probs < 0, log_probs, clamped)


def _sort_candidates(token_ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Clean the log-probs and order each depth's candidates by them: descending and stable."""
    log_probs, order = torch.sort(_clean(log_probs), dim=-1, descending=True, stable=True)
    return torch.gather(token_ids, -1, order), log_probs


def _build_from_sorted(token_ids: Tensor, log_probs: Tensor, num_nodes: int, root_tokens: Tensor | None) -> DraftTree:
    """`naive_build_draft_tree` for candidates that `_sort_candidates` has ordered."""
    bs, max_depth, width = token_ids.shape
    device = token_ids.device
    beam = log_probs.new_zeros((bs, 1))
    scores, depths, beam_parents, ranks = [], [], [], []
    # Prefixes of all depths side by side, the root in column 0; a depth's columns start at `start`.
    parent_start, start = 0, 1
    for depth in range(1, max_depth + 1):
        # Flattened parent-major and stably sorted: equal scores stay in (parent, rank) order.
        extended = (beam.unsqueeze(-1) + log_probs[:, depth - 1].unsqueeze(1)).flatten(1)
        beam, flat = torch.sort(extended, dim=-1, descending=True, stable=True)
        beam, flat = beam[:, :num_nodes], flat[:, :num_nodes]
        scores.append(beam)
        depths.append(torch.full_like(flat, depth))
        beam_parents.append(parent_start + flat // width)
        ranks.append(flat % width)
        parent_start, start = start, start + beam.shape[1]
    # Concatenated by depth and stably sorted: equal scores stay in (depth, parent, rank) order.
    best, chosen = torch.sort(torch.cat(scores, dim=1), dim=-1, descending=True, stable=True)
    best, chosen = best[:, :num_nodes], chosen[:, :num_nodes]
    used = best > -torch.inf

    count = chosen.shape[1]
    row_of = torch.zeros((bs, start), dtype=torch.int64, device=device)
    row_of.scatter_(1, chosen + 1, torch.arange(1, count + 1, device=device).expand(bs, count))
    node_depths = torch.cat(depths, dim=1).gather(1, chosen)
    node_parents = row_of.gather(1, torch.cat(beam_parents, dim=1).gather(1, chosen))
    candidate = (node_depths - 1) * width + torch.cat(ranks, dim=1).gather(1, chosen)
    node_tokens = token_ids.to(torch.int64).flatten(1).gather(1, candidate)

    tokens = torch.zeros((bs, num_nodes + 1), dtype=torch.int64, device=device)
    tokens[:, 0] = -1 if root_tokens is None else root_tokens
    tokens[:, 1 : count + 1] = torch.where(used, node_tokens, 0)
    parents = torch.full_like(tokens, -1)
    parents[:, 1 : count + 1] = torch.where(used, node_parents, -1)
    row_depths = torch.zeros_like(tokens)
    row_depths[:, 1 : count + 1] = torch.where(used, node_depths, 0)
    return _link(tokens, parents, row_depths)


def _link(tokens: Tensor, parents: Tensor, depths: Tensor) -> DraftTree:
    """Derive child and sibling links, ancestor bits and the chain flag from the parents."""
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    none = tokens.shape[1]
    is_child = parents.unsqueeze(1) == rows.unsqueeze(1)  # [bs, row, child]
    next_token = torch.where(is_child, rows, none).amin(-1)
    is_sibling = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (parents.unsqueeze(2) >= 0)
    next_sibling = torch.where(is_sibling & (rows > rows.unsqueeze(1)), rows, none).amin(-1)

    ancestors = tokens.new_zeros((*tokens.shape, 2))
    cursor = rows.expand_as(parents)
    for _ in range(MAX_DEPTH):
        bit = torch.where(cursor > 0, 1 << ((cursor - 1) % WORD_BITS), 0)
        for word in range(2):
            ancestors[:, :, word] |= torch.where((cursor - 1) // WORD_BITS == word, bit, 0)
        cursor = parents.gather(1, cursor).clamp_min(0)
    follows = (parents == rows - 1) | (depths == 0)
    return DraftTree(
        tokens=tokens,
        parents=parents,
        depths=depths,
        next_token=torch.where(next_token == none, -1, next_token),
        next_sibling=torch.where(next_sibling == none, -1, next_sibling),
        ancestors=ancestors,
        is_chain=follows.all(dim=1),
    )
