"""The gated delta rule (GDN, arXiv 2412.06464): chunked prefill, and the step form for decode and verify.

One step, for one value head, with state `S` `[V, K]`, log decay `g`, write strength `beta` (all fp32):

    S <- exp(g) * S;   u = beta * (v - S k);   S <- S + u k^T;   o = S q

Shapes: `q`, `k` `[1, T, H, K]`, `v` `[1, T, HV, V]` with HV a multiple of H (key head h serves value heads
h * HV/H ...), state pools `[slots, HV, V, K]`. Sequences are packed along T by `cu_seqlens` `[N + 1]`.
A negative state slot marks a padded sequence: it starts from zero and no state is written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens a chunk; SGLang's prefix-cache tracking indexes the per-chunk states by this number."""


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`g = -exp(A_log) * softplus(a + dt_bias)` and `beta = sigmoid(b)`.

    `A_log`, `dt_bias`: `[HV]`; `a`, `b`: `[T, HV]`. Returns g fp32 and beta (b's dtype), both `[1, T, HV]`.
    Twin of `fused_gdn_gating` (`kernels/ops/attention/linear/fused_gdn_gating.py`).
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l2norm: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 `[T, HV, K]`, `[T, HV, K]`, `[T, HV, V]`: heads expanded, q and k normalised, q scaled by K **
    -0.5."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]).float() for x in (q, k, v))
    if l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = v.shape[1] // q.shape[1]
    q = q * q.shape[-1] ** -0.5
    return q.repeat_interleave(group, 1), k.repeat_interleave(group, 1), v


def _pad(cu_seqlens: torch.Tensor, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Where packed tokens go in a padded `[N, T]` block: (token number `[N, T]`, is-a-token `[N, T]`)."""
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - starts
    longest = int(lengths.max()) if lengths.numel() else 0
    step = torch.arange(-(-longest // multiple) * multiple)
    real = step < lengths.unsqueeze(1)
    return torch.where(real, starts.unsqueeze(1) + step, 0), real


def _gather(x: torch.Tensor, token: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Packed `[tokens, HV, ...]` to padded `[N, HV, T, ...]`; zero in the padding, which leaves a state
    unchanged."""
    padded = x[token] * real.view(*real.shape, *[1] * (x.dim() - 1))
    return padded.transpose(1, 2)


def _initial(pool: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(state `[N, HV, V, K]` fp32, has-a-slot `[N]`)."""
    live = slots >= 0
    state = pool[slots.clamp(min=0).long()].float()
    return state * live.view(-1, 1, 1, 1), live


def _chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of C tokens at once; the writes u of all its tokens solve one triangular system.

    `state` `[N, HV, V, K]`; `q`, `k` `[N, HV, C, K]`; `v` `[N, HV, C, V]`; `g`, `beta` `[N, HV, C]`.
    Returns (outputs `[N, HV, C, V]`, state after the chunk).
    """
    total = g.cumsum(-1)
    inside = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).tril()
    # exp only where s <= t: above the diagonal the exponent is positive and may overflow.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~inside, float("-inf")).exp()
    since_start = total.exp().unsqueeze(-1)

    system = (k @ k.mT * decay).tril(-1) * beta.unsqueeze(-1)
    right = beta.unsqueeze(-1) * (v - since_start * (k @ state.mT))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)

    out = since_start * (q @ state.mT) + (q @ k.mT * decay) @ u
    to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = total[..., -1].exp()[..., None, None] * state + (u * to_end).mT @ k
    return out, state


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prefill: run every sequence from its state slot and write the final state back in place.

    `g` (log decay) and `beta`: `[1, T, HV]`; `initial_state`: the pool; `initial_state_indices`: int `[N]`.
    Returns (out `[1, T, HV, V]` in v's dtype, the pool, chunk-start states `[1, chunks, HV, V, K]` fp32): the
    state before each 64-token chunk, sequence after sequence, which SGLang copies out to track prefixes of
    hybrid models.

    Twin of `chunk_gated_delta_rule` (`kernels/ops/attention/fla/chunk.py`). Raises ValueError for
    `head_first`.
    """
    if head_first:
        raise ValueError("chunk_gated_delta_rule_cpu: head_first=True found, wanted False; pass q as [1, T, H, K]")
    token, real = _pad(cu_seqlens, CHUNK)
    qs, ks, vs = (_gather(x, token, real) for x in _prepare(q, k, v, use_qk_l2norm_in_kernel))
    gs, betas = (_gather(x.reshape(-1, x.shape[-1]).float(), token, real) for x in (g, beta))
    slots = initial_state_indices[: real.shape[0]]
    state, live = _initial(initial_state, slots)

    outs, starts = [], []
    for c in range(0, real.shape[1], CHUNK):
        part = slice(c, c + CHUNK)
        starts.append(state)
        out, state = _chunk(state, qs[:, :, part], ks[:, :, part], vs[:, :, part], gs[:, :, part], betas[:, :, part])
        outs.append(out)

    result = torch.zeros_like(v)
    if not outs:
        return result, initial_state, state.new_zeros(1, 0, *initial_state.shape[1:])
    result[0, token[real]] = torch.cat(outs, 2).transpose(1, 2)[real].to(v.dtype)
    initial_state[slots[live].long()] = state[live].to(initial_state.dtype)
    return result, initial_state, torch.stack(starts, 1)[real[:, ::CHUNK]].unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Step form: decode (one token a sequence) and target verify (a chain, or a tree when parents are given).

    `a`, `b`: `[T, HV]` gate inputs (see :func:`fused_gdn_gating_cpu`). `intermediate_states_buffer`: `[rows,
    cache_steps, HV, V, K]`, receives the state after every token at row `intermediate_state_indices[n]`.
    `retrieve_parent_token`: int `[N, D]`; token t > 0 starts from the snapshot of its parent instead of from
    t - 1. `disable_state_update` leaves the pool alone (the accepted snapshot is committed later). Returns
    `[1, T, HV, V]` in v's dtype.

    Twin of the Triton op of the same name without `_cpu`
    (`kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py`). Like it, a tree node reads its
    parent's snapshot in the buffer's precision, and a sequence without a snapshot row (index < 0) runs as a
    chain. Raises ValueError for `is_kda`, whose gate is a vector.
    """
    if is_kda:
        raise ValueError(
            "fused_sigmoid_gating_delta_rule_update_cpu: is_kda=True found, wanted False (GDN layers only)"
        )
    token, real = _pad(cu_seqlens)
    n_seqs = real.shape[0]  # index tensors may be longer: the pool's whole row range
    x = a.reshape(-1, a.shape[-1]).float() + dt_bias.float()
    g = -A_log.float().exp() * F.softplus(x, softplus_beta, softplus_threshold)
    beta = b.reshape(-1, b.shape[-1]).float().sigmoid()
    packed = (*_prepare(q, k, v, use_qk_l2norm_in_kernel), g, beta)
    qs, ks, vs, gs, betas = (_gather(t, token, real) for t in packed)
    slots = initial_state_indices[:n_seqs]
    state, live = _initial(initial_state_source, slots)
    decay = gs.exp()[..., None, None]

    snapshots = intermediate_states_buffer
    kept = torch.zeros(0, dtype=torch.long)  # sequences with a snapshot row
    rows = parents = kept
    if snapshots is not None and intermediate_state_indices is not None:
        kept = (intermediate_state_indices[:n_seqs] >= 0).nonzero().flatten()
        rows = intermediate_state_indices[kept].long()
    if retrieve_parent_token is not None:
        parents = retrieve_parent_token[kept].long()

    outs = []
    for t in range(real.shape[1]):
        if snapshots is not None and retrieve_parent_token is not None and t > 0:
            state = state.index_copy(0, kept, snapshots[rows, parents[:, t]].float())
        kt, qt = ks[:, :, t].unsqueeze(-1), qs[:, :, t].unsqueeze(-1)
        state = state * decay[:, :, t]
        u = betas[:, :, t, None] * (vs[:, :, t] - (state @ kt).squeeze(-1))
        state = state + u.unsqueeze(-1) * kt.mT
        outs.append((state @ qt).squeeze(-1))
        if snapshots is not None:
            reached = real[kept, t]
            snapshots[rows[reached], t] = state[kept[reached]].to(snapshots.dtype)

    result = torch.zeros_like(v)
    flat = result.view(-1, *v.shape[-2:])
    if outs:
        flat[token[real]] = torch.stack(outs, 1)[real].to(v.dtype)
    if not disable_state_update:
        initial_state_source[slots[live].long()] = state[live].to(initial_state_source.dtype)
    return result
