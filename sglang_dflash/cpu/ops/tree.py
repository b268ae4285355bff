"""Walking and rebuilding draft trees given as first-child / next-sibling links.

A tree has `D` nodes numbered 0..D-1, parents before children; node 0 is the root (the last committed token).
`next_token[i]` is node i's first child, `next_sibling[i]` its next sibling, -1 for none.
"""

from __future__ import annotations

import torch


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Greedy accept walk: from the root follow the child whose token is the target's argmax, else stop.

    `candidates`, `retrive_*`: int `[bs, D]` (the spelling is upstream's schema); `retrive_index` holds each
    node's row in the flat batch; `target_predict`: `[bs, D]` argmax of each node. Outputs, in place:
    `predicts` (flat) at every accepted row, `accept_index` `[bs, S]` rows of the accepted path including the
    root (entries past its end are left alone), `accept_token_num` `[bs]` accepted drafts, root not counted.
    At most `S - 1` drafts are accepted.

    Twin of `verify_tree_greedy_kernel_triton` (`kernels/ops/speculative/spec_tree.py`).
    """
    rows, tokens = retrive_index.tolist(), candidates.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    for b in range(candidates.shape[0]):
        path = [rows[b][0]]
        node = 0
        while len(path) < accept_index.shape[1]:
            child = children[b][node]
            while child != -1 and tokens[b][child] != wanted[path[-1]]:
                child = siblings[b][child]
            if child == -1:
                break
            node = child
            path.append(rows[b][node])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts[path] = torch.tensor([wanted[row] for row in path], dtype=predicts.dtype)


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recover positions and links from an ancestor mask (NGRAM drafts give only the mask).

    `tree_mask`: bool/int, `batch_size * D * D`; entry `[i, j]` says node j is node i or one of its ancestors.
    `verified_seq_len`: int `[bs]`. Outputs in place, `bs * D` each: `positions` = prefix + depth,
    `retrive_index` = flat row, links as in the module docstring. Twin of
    `sgl_kernel.speculative.reconstruct_indices_from_tree_mask`.
    """
    d = draft_token_num
    node = torch.arange(d)
    proper = tree_mask.reshape(batch_size, d, d).bool() & torch.ones(d, d, dtype=torch.bool).tril(-1)
    positions.view(batch_size, d)[:] = proper.sum(-1) + verified_seq_len.view(-1, 1)
    retrive_index.view(batch_size, d)[:] = node + d * torch.arange(batch_size).view(-1, 1)

    # Parents come before children, so a node's parent is its ancestor with the largest number.
    parent = torch.where(proper, node, -1).amax(-1)
    children, siblings = torch.full((2, batch_size, d), -1).tolist()
    for b, parents in enumerate(parent.tolist()):
        last_child: dict[int, int] = {}
        for child, p in enumerate(parents):
            if p < 0:
                continue
            if p in last_child:
                siblings[b][last_child[p]] = child
            else:
                children[b][p] = child
            last_child[p] = child
    retrive_next_token.view(batch_size, d)[:] = torch.tensor(children)
    retrive_next_sibling.view(batch_size, d)[:] = torch.tensor(siblings)
