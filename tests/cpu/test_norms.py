from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.cpu.ops import elementwise, norms

EPS = 1e-6


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


def rms(x):
    x = x.double()
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + EPS)


def silu(z):
    return z.double() / (1 + torch.exp(-z.double()))


def test_gemma_qk_norm():
    q, k, wq, wk = random(3, 16), random(3, 8, seed=1), random(4, seed=2), random(4, seed=3)
    new_q, new_k = norms.fused_qk_gemma_rmsnorm_cpu(q, k, wq, wk, EPS, 4)
    close(new_q, rms(q.view(12, 4)) * (1 + wq.double()))
    close(new_k, rms(k.view(6, 4)) * (1 + wk.double()))


def test_gemma_qk_norm_with_gate():
    q_gate, k, wq, wk = random(3, 4 * 8), random(3, 8, seed=1), random(4, seed=2), random(4, seed=3)
    new_q, new_k, gate = norms.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, wq, wk, EPS, 4, 4)
    heads = q_gate.view(3, 4, 8)
    close(new_q, rms(heads[..., :4]).view(12, 4) * (1 + wq.double()))
    close(new_k, rms(k.view(6, 4)) * (1 + wk.double()))
    assert torch.equal(gate, heads[..., 4:].reshape(3, 16))


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("name", "act"), [("swish", silu), ("sigmoid", lambda z: torch.sigmoid(z.double()))])
def test_gated_norm(gate_first, name, act):
    x, z, weight = random(2, 3, 8), random(6, 8, seed=1), random(8, seed=2)
    layer = SimpleNamespace(
        group_size=None, bias=None, eps=EPS, weight=weight, activation=name, norm_before_gate=not gate_first
    )
    gate = act(z).view(2, 3, 8)
    expected = rms(x.double() * gate) * weight if gate_first else rms(x) * weight * gate
    close(norms.rms_norm_gated_forward(layer, x, z), expected)
    close(norms.rms_norm_gated_forward(layer, x), rms(x) * weight)


def test_gated_norm_refuses_groups():
    layer = SimpleNamespace(group_size=4)
    with pytest.raises(ValueError, match="group_size 4"):
        norms.rms_norm_gated_forward(layer, random(1, 8))


def test_qk_norm_rope_in_place():
    tokens, q_heads, k_heads, d = 5, 4, 2, 8
    qkv, wq, wk = random(tokens, (q_heads + 2 * k_heads) * d), random(d, seed=1), random(d, seed=2)
    positions = torch.tensor([0, 3, 3, 9, 1])
    angle = torch.outer(torch.arange(10).double(), 10000 ** (-torch.arange(d // 2).double() / (d // 2)))
    table = torch.cat([angle.cos(), angle.sin()], 1).float()
    before = qkv.clone()
    norms.table_qk_norm_rope_(qkv, positions, wq, wk, table, q_heads, k_heads, d, EPS)
    for t in range(tokens):
        # neox pairs (i, i + d/2) as complex numbers; rotating is multiplying by e^(i angle)
        turn = torch.polar(torch.ones(d // 2).double(), angle[positions[t]])
        for head in range(q_heads + k_heads):
            part = slice(head * d, (head + 1) * d)
            y = rms(before[t, part]) * (wq if head < q_heads else wk).double()
            z = torch.complex(y[: d // 2], y[d // 2 :]) * turn
            close(qkv[t, part], torch.cat([z.real, z.imag]))
    assert torch.equal(qkv[:, (q_heads + k_heads) * d :], before[:, (q_heads + k_heads) * d :])


def test_sigmoid_mul_and_split():
    x, gate = random(3, 8), random(3, 2, 4, seed=1)
    expected = x.double() / (1 + torch.exp(-gate.double().view(3, 8)))
    elementwise.fused_sigmoid_mul_cpu(x, gate)
    close(x, expected)

    k_heads, v_heads, k, v = 2, 4, 3, 5
    q_, k_, v_, z_ = random(2, 6), random(2, 6, seed=1), random(2, 20, seed=2), random(2, 20, seed=3)
    b_, a_ = random(2, 4, seed=4), random(2, 4, seed=5)
    parts = elementwise.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat([q_, k_, v_, z_], 1), torch.cat([b_, a_], 1), k_heads, v_heads, k, v
    )
    for found, wanted in zip(parts, (torch.cat([q_, k_, v_], 1), z_.view(2, 4, 5), b_, a_), strict=True):
        assert torch.equal(found, wanted)
