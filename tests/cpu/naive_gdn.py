"""The gated delta rule token by token in float64, straight from its definition."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GdnInputs(NamedTuple):
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


def random_inputs(tokens: int, seed: int, heads: int = 2, value_heads: int = 4, width: int = 32) -> GdnInputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return GdnInputs(
        torch.rand(value_heads, generator=g),
        torch.rand(value_heads, generator=g),
        normal(1, tokens, heads, width),
        normal(1, tokens, heads, width),
        normal(1, tokens, value_heads, width // 2),
        normal(tokens, value_heads) - 2,
        normal(tokens, value_heads),
    )


def gates(x: GdnInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """log decay and write strength, float64 `[tokens, value_heads]`."""
    softplus = torch.log1p(torch.exp(x.a.double() + x.dt_bias.double()))
    return -torch.exp(x.A_log.double()) * softplus, 1 / (1 + torch.exp(-x.b.double()))


def step(state: torch.Tensor, x: GdnInputs, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(state after token t, output of token t); state float64 `[value_heads, V, K]`."""
    decay, strength = gates(x)
    value_heads, heads = x.v.shape[2], x.q.shape[2]
    after, outs = torch.empty_like(state), []
    for h in range(value_heads):
        q, k = (y[0, t, h // (value_heads // heads)].double() for y in (x.q, x.k))
        q = q / torch.sqrt((q * q).sum() + 1e-6) / q.shape[0] ** 0.5
        k = k / torch.sqrt((k * k).sum() + 1e-6)
        s = state[h] * torch.exp(decay[t, h])
        s = s + strength[t, h] * torch.outer(x.v[0, t, h].double() - s @ k, k)
        after[h] = s
        outs.append(s @ q)
    return after, torch.stack(outs)


def run(state: torch.Tensor, x: GdnInputs, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """States before each listed token and after the last, and the outputs `[len(tokens), value_heads, V]`."""
    states, outs = [state.double()], []
    for t in tokens:
        after, out = step(states[-1], x, t)
        states.append(after)
        outs.append(out)
    return states, torch.stack(outs)
