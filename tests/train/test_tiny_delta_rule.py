"""The training path of the tiny target's delta net against transformers' step-by-step reference."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.cpu.stand_in import declare_torchvision_ops
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.recipes import delta_rule

declare_torchvision_ops()
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling  # noqa: E402

CONV = modeling.causal_conv1d_fn


def inputs(length, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, 3, 16, generator=g, dtype=dtype) for _ in range(3))
    decay = -torch.rand(2, length, 3, generator=g, dtype=dtype) * 0.3
    beta = torch.rand(2, length, 3, generator=g, dtype=dtype)
    return [x.float().requires_grad_() for x in (q, k, v, decay, beta)]


def grads_of(function, arguments):
    q, k, v, g, beta = arguments
    out, state = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=False)
    assert state is None
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return out, torch.autograd.grad((out * weight).sum(), arguments)


@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_chunked_rule_equals_the_recurrence(length):
    arguments = inputs(length)
    expected, expected_grads = grads_of(modeling.torch_recurrent_gated_delta_rule, arguments)
    found, found_grads = grads_of(delta_rule.chunk_gated_delta_rule, arguments)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for a, b in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_equal_keys_do_not_blow_up():
    """The hardest system: every key the same, nothing forgotten, everything overwritten."""
    q, k, v, g, beta = (x.detach() for x in inputs(128))
    k, g, beta = k[:, :1].expand_as(k).contiguous(), torch.zeros_like(g), torch.ones_like(beta)
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
    expected, _ = modeling.torch_recurrent_gated_delta_rule(
        q, k, v, initial_state=None, output_final_state=False, **options
    )
    found, _ = delta_rule.chunk_gated_delta_rule(q, k, v, **options)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_inverse_and_its_gradient():
    lower = torch.randn(3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tril(-1) * 0.3
    inverse = delta_rule.UnitLowerInverse.apply(lower)
    torch.testing.assert_close(inverse, torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower))
    other, weight = lower.clone().requires_grad_(), torch.randn_like(lower)
    mine = lower.clone().requires_grad_()
    (expected,) = torch.autograd.grad((torch.linalg.inv(torch.eye(64) + other.tril(-1)) * weight).sum(), other)
    (found,) = torch.autograd.grad((delta_rule.UnitLowerInverse.apply(mine) * weight).sum(), mine)
    torch.testing.assert_close(found, expected)


def test_convolution_equals_the_reference():
    x = torch.randn(2, 5, 9, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    expected, found = CONV(x, weight, None, activation="silu"), delta_rule.causal_conv1d(x, weight, activation="silu")
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (x, weight)), torch.autograd.grad(expected.sum(), (x, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_cache_is_refused():
    q, k, v, g, beta = inputs(4)
    with pytest.raises(TrainError, match="use_cache"):
        delta_rule.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True)
