"""Depthwise causal convolution of GDN layers: varlen prefill, and the step form for decode and verify.

Shapes: `weight` `[dim, K]`, `bias` `[dim]` or None, states `[slots, dim, K-1]` holding the last K-1 inputs,
oldest first. A negative slot marks a padded sequence: its output is zero and no state is touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _activate(y: torch.Tensor, activation: str | bool | None) -> torch.Tensor:
    if activation in (None, False):
        return y
    if activation in ("silu", "swish", True):
        return F.silu(y)
    raise ValueError(f"causal conv1d: activation {activation!r} found, wanted 'silu', 'swish' or None")


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | bool | None = "silu",
    conv_states: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    **_unused: Any,
) -> torch.Tensor:
    """Prefill over packed sequences; `conv_states` is read where `has_initial_state` and always written.

    `x`: `[dim, T]`; `query_start_loc`: int `[N + 1]`; `cache_indices`: int `[N]`; `has_initial_state`: bool
    `[N]`. Returns `[dim, T]` in x's dtype. Twin of `causal_conv1d_fn`
    (`kernels/ops/mamba/causal_conv1d_triton.py`).
    """
    if conv_states is None or cache_indices is None or query_start_loc is None:
        raise ValueError("causal_conv1d_fn_cpu: conv_states, cache_indices and query_start_loc are all needed")
    dim, history = x.shape[0], weight.shape[1] - 1
    kernel, offset = weight.float().unsqueeze(1), None if bias is None else bias.float()
    out = torch.zeros_like(x)
    bounds, slots = query_start_loc.tolist(), cache_indices.tolist()
    resumed = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    for start, end, slot, resume in zip(bounds, bounds[1:], slots, resumed, strict=False):
        if end <= start or slot < 0:
            continue
        state = conv_states[slot, :, :history]
        past = state.to(x.dtype) if resume else x.new_zeros(dim, history)
        window = torch.cat([past, x[:, start:end]], 1)
        y = F.conv1d(window.float(), kernel, offset, groups=dim)
        out[:, start:end] = _activate(y, activation).to(out.dtype)
        state.copy_(window[:, -history:])
    return out


def tree_parents(next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Parent of every node of one tree from its first-child / next-sibling links (-1 = none); 0 for unlinked
    nodes."""
    parent = [0] * len(next_token)
    for node, (child, sibling) in enumerate(zip(next_token, next_sibling, strict=True)):
        if child != -1:
            parent[child] = node
        if sibling != -1:
            parent[sibling] = parent[node]
    return parent


def _tree_columns(parent: torch.Tensor, width: int) -> torch.Tensor:
    """Columns of `[history | tokens]` each node convolves, oldest first: `[B, T, width]` from parents `[B,
    T]`.

    Past the root the walk steps back through the history, one column at a time.
    """
    node = torch.arange(parent.shape[1]).expand_as(parent)
    columns = [node]
    for _ in range(width - 1):
        node = torch.where(node > 0, parent.gather(1, node.clamp(min=0)), node - 1)
        columns.append(node)
    return torch.stack(columns[::-1], -1) + width - 1


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **_unused: Any,
) -> torch.Tensor:
    """Step form: `T` new tokens a sequence, as a chain, or as a tree when links are given.

    `x`: `[B, dim]` or `[B, dim, T]`; `conv_state_indices`: int `[B]`. `intermediate_conv_window` `[rows,
    steps, dim, K-1]` receives, at row `intermediate_state_indices[i]`, the window after each token.
    `retrieve_next_token`, `retrieve_next_sibling`: int `[B, T]` links; with them `retrieve_parent_token` `[B,
    T]` is filled for the GDN op that follows. The pool state always rolls forward over all T tokens, tree or
    not, as upstream's does. Returns x's shape and dtype.

    Hazard: the output keeps x's strides, because the caller views its transpose (`gdn_backend.py`).

    Twin of `causal_conv1d_update` (`kernels/ops/mamba/causal_conv1d_triton.py`).
    """
    out = torch.zeros_like(x)
    steps = x if x.dim() == 3 else x.unsqueeze(-1)
    batch, dim, n_tokens = steps.shape
    width = weight.shape[1]
    slots = torch.arange(batch) if conv_state_indices is None else conv_state_indices[:batch].long()
    live = (slots >= 0).nonzero().flatten()
    if live.numel() == 0:
        return out
    slots, new = slots[live], steps[live]

    inputs = torch.cat([conv_state[slots][:, :, : width - 1].to(x.dtype), new], -1)
    if retrieve_next_token is None or retrieve_next_sibling is None:
        columns = (torch.arange(n_tokens).unsqueeze(1) + torch.arange(width)).expand(live.numel(), -1, -1)
    else:
        links = zip(retrieve_next_token[live].tolist(), retrieve_next_sibling[live].tolist(), strict=True)
        parent = torch.tensor([tree_parents(c[:n_tokens], s[:n_tokens]) for c, s in links])
        columns = _tree_columns(parent, width)
        if retrieve_parent_token is not None:
            retrieve_parent_token[live, :n_tokens] = parent.to(retrieve_parent_token.dtype)

    index = columns.reshape(live.numel(), 1, -1).expand(-1, dim, -1)
    windows = inputs.gather(2, index).view(live.numel(), dim, n_tokens, width)
    y = (windows.float() * weight.float().unsqueeze(1)).sum(-1)
    if bias is not None:
        y = y + bias.float().unsqueeze(1)
    steps_out = out if x.dim() == 3 else out.unsqueeze(-1)
    steps_out[live] = _activate(y, activation).to(out.dtype)

    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        rows = intermediate_state_indices[live].tolist()
        kept = windows[..., 1:].permute(0, 2, 1, 3).to(intermediate_conv_window.dtype)
        # A row at a time: without a tree the destination is an overlapping view (memory_pool.py), where the
        # windows of neighbouring steps share elements and hold equal values.
        for row, window in zip(rows, kept, strict=True):
            if row >= 0:
                intermediate_conv_window[row, :n_tokens] = window
    conv_state[slots, :, : width - 1] = inputs[..., 1 - width :].to(conv_state.dtype)
    return out
