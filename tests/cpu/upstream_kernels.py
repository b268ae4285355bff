"""SGLang's own Triton kernels in Triton's interpreter against the CPU ops: largest differences, as JSON.

A script, because the interpreter must be chosen before Triton is imported and lasts for the process:

    TRITON_INTERPRET=1 SGLANG_USE_CPU_ENGINE=0 python upstream_kernels.py
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
from naive_gdn import random_inputs
from trees import links, random_parents

from sglang_dflash.cpu.ops import causal_conv1d, elementwise, gated_delta_rule, mamba_state, norms
from sglang_dflash.cpu.stand_in import declare_torchvision_ops

declare_torchvision_ops()
if not hasattr(torch.cpu, "device"):  # upstream enters `torch.<device type>.device(...)`
    torch.cpu.device = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]

import triton.runtime.autotuner as autotuner  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402
from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as upstream_gdn  # noqa: E402
from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_ as upstream_rope  # noqa: E402
from sglang.kernels.ops.mamba import causal_conv1d_triton as upstream_conv  # noqa: E402
from sglang.kernels.ops.mamba import mamba_state_scatter_triton as upstream_scatter  # noqa: E402
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel  # noqa: E402

_tune = autotuner.Autotuner.run


def _take_first_config(self: autotuner.Autotuner, *args: object, **kwargs: object) -> object:
    self.configs = self.configs[:1]  # timing configurations means nothing in the interpreter
    return _tune(self, *args, **kwargs)


autotuner.Autotuner.run = _take_first_config  # type: ignore[method-assign]


def _with_boolean_mask(access: Callable[..., object], mask_at: int) -> Callable[..., object]:
    """The interpreter widens a scalar comparison with int64, as in the convolution's masks, then refuses the
    mask."""

    def masked(self: object, *args: Any, **kwargs: Any) -> object:
        args[mask_at].data = args[mask_at].data.astype(bool)
        return access(self, *args, **kwargs)

    return masked


_builder: Any = interpreter.InterpreterBuilder
_builder.create_masked_load = _with_boolean_mask(_builder.create_masked_load, 1)
_builder.create_masked_store = _with_boolean_mask(_builder.create_masked_store, 2)

BATCH, NODES = 2, 8
SLOTS = torch.tensor([3, 1], dtype=torch.int32)
ROWS = torch.tensor([0, 2], dtype=torch.int32)
PARENTS = random_parents(BATCH, NODES, seed=12)


def difference(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def gdn(tree: bool) -> float:
    x = random_inputs(BATCH * NODES, seed=21)
    pool = torch.randn(5, 4, 16, 32)

    def run(op: object) -> tuple[torch.Tensor, ...]:
        snapshots, states = torch.zeros(4, NODES, 4, 16, 32), pool.clone()
        out = op(  # type: ignore[operator]
            **x._asdict(),
            initial_state_source=states,
            initial_state_indices=SLOTS,
            cu_seqlens=torch.tensor([0, NODES, 2 * NODES], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=False,
            disable_state_update=True,
            intermediate_states_buffer=snapshots,
            intermediate_state_indices=ROWS,
            cache_steps=NODES,
            retrieve_parent_token=PARENTS if tree else None,
        )
        return out, snapshots, states

    return difference(
        run(gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu),
        run(upstream_gdn.fused_sigmoid_gating_delta_rule_update),
    )


def gdn_decode() -> float:
    x = random_inputs(BATCH, seed=22)
    pool = torch.randn(5, 4, 16, 32)

    def run(op: object) -> tuple[torch.Tensor, ...]:
        states = pool.clone()
        out = op(  # type: ignore[operator]
            **x._asdict(),
            initial_state_source=states,
            initial_state_indices=SLOTS,
            cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )
        return out, states

    return difference(
        run(gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu),
        run(upstream_gdn.fused_sigmoid_gating_delta_rule_update),
    )


def conv(tree: bool) -> float:
    dim, width = 64, 4
    x = torch.randn(BATCH, NODES, dim).transpose(1, 2)
    weight, bias, states = torch.randn(dim, width), torch.randn(dim), torch.randn(5, dim, width - 1)
    child, sibling = links(PARENTS)

    def run(op: object) -> tuple[torch.Tensor, ...]:
        state, windows = states.clone(), torch.zeros(4, NODES, dim, width - 1)
        found = torch.zeros(BATCH, NODES, dtype=torch.int32)
        tree_links = {
            "retrieve_next_token": child,
            "retrieve_next_sibling": sibling,
            "retrieve_parent_token": found,
        }
        out = op(  # type: ignore[operator]
            x.clone(),
            state,
            weight,
            bias,
            "silu",
            conv_state_indices=SLOTS,
            intermediate_conv_window=windows,
            intermediate_state_indices=ROWS,
            **(tree_links if tree else {}),
        )
        return out, state, windows, found

    return difference(run(causal_conv1d.causal_conv1d_update_cpu), run(upstream_conv.causal_conv1d_update))


def murmur() -> float:
    seed = torch.tensor([0, 1, 2**40 + 7, -1])
    positions, columns = torch.tensor([0, 5, 77, 4096]), torch.arange(300)
    theirs = torch.empty(4, 300, dtype=torch.uint32)
    murmur_hash32_kernel[(4, 1)](seed, positions, columns, theirs, 4, 300, BLOCK_SIZE=512)
    return difference((elementwise.murmur_hash32_cpu(seed, positions, columns),), (theirs,))


def qk_norm_rope() -> float:
    qkv, positions = torch.randn(3, 8 * 16).bfloat16(), torch.tensor([0, 7, 3])  # upstream's is bfloat16 only
    q_weight, k_weight = torch.randn(2, 16).bfloat16()
    args = (positions, q_weight, k_weight, torch.randn(8, 16), 4, 2, 16, 1e-6)
    ours, theirs = qkv.clone(), qkv.clone()
    norms.table_qk_norm_rope_(ours, *args)
    upstream_rope(theirs, *args)
    # In units of the largest entry: the last bit of a bfloat16 is large next to fp32 noise.
    return difference((ours,), (theirs,)) / theirs.abs().max().item()


def track() -> float:
    pools = torch.randn(2, 6, 8), torch.randn(2, 6, 4, 4)
    source, target = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([5, 4, 0], dtype=torch.int64)
    mask = torch.tensor([True, False, True])
    ours, theirs = [p.clone() for p in pools], [p.clone() for p in pools]
    mamba_state.track_all_layers(*ours, source, mask, target, 3)
    upstream_scatter.track_mamba_states_all_layers(*theirs, source, mask, target, 3)
    return difference(tuple(ours), tuple(theirs))


CHECKS = {
    "gdn chain": lambda: gdn(False),
    "gdn tree": lambda: gdn(True),
    "gdn decode": gdn_decode,
    "conv chain": lambda: conv(False),
    "conv tree": lambda: conv(True),
    "murmur hash": murmur,
    "qk norm rope": qk_norm_rope,
    "track": track,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({name: check() for name, check in CHECKS.items()}))
