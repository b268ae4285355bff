"""A stand-in for the native `sgl_kernel` package, built from :mod:`sglang_dflash.cpu.ops`.

SGLang's CPU path imports `sgl_kernel` unconditionally, and its wheel does not load without libcuda. Only what
that path reaches is provided. `convert_weight_packed` stays absent on purpose: SGLang takes its absence to
mean "no AMX kernels" and then stays on its plain torch code.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import library as operators

from sglang_dflash.cpu.ops import cache_locs, causal_conv1d, elementwise, gated_delta_rule, norms, tree

_MODULES: dict[str, tuple[Callable[..., Any], ...]] = {
    "sgl_kernel": (
        cache_locs.assign_req_to_token_pool_cpu,
        cache_locs.assign_extend_cache_locs_cpu,
        cache_locs.fill_accept_out_cache_loc_cpu,
        cache_locs.copy_all_layer_kv_cache_cpu,
        tree.verify_tree_greedy_cpu,
    ),
    "sgl_kernel.mamba": (
        causal_conv1d.causal_conv1d_fn_cpu,
        causal_conv1d.causal_conv1d_update_cpu,
        gated_delta_rule.chunk_gated_delta_rule_cpu,
    ),
    "sgl_kernel.speculative": (tree.reconstruct_indices_from_tree_mask,),
}

_TORCH_OPS: tuple[Callable[..., Any], ...] = (
    gated_delta_rule.fused_gdn_gating_cpu,
    gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
    norms.fused_qk_gemma_rmsnorm_cpu,
    norms.fused_qk_gemma_rmsnorm_with_gate_cpu,
    elementwise.fused_sigmoid_mul_cpu,
    elementwise.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    elementwise.murmur_hash32_cpu,
)

_EAGLE_ONLY = (
    "assign_draft_cache_locs_contiguous_cpu",
    "build_tree_kernel_efficient_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
)
"""Imported by name at module level in SGLang, called only by EAGLE drafting."""

_libraries: list[operators.Library] = []


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: EAGLE drafting found, wanted DFLASH, NGRAM or no speculation in CPU mode"
        )

    return refuse


def declare_torchvision_ops() -> None:
    """Declare `torchvision::nms` and `qnms` so that a CUDA build of torchvision imports beside a CPU build of
    torch.

    Its compiled part does not load there, and its import then fails registering shape functions for ops that
    do not exist. SGLang and transformers only use its image transforms. Harmless where the ops exist;
    idempotent.
    """
    if torch.version.cuda or _libraries or "torchvision" in sys.modules:
        return
    library = operators.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def install() -> None:
    """Publish the stand-in as `sgl_kernel` in `sys.modules` and its torch ops under `torch.ops.sgl_kernel`.

    Must run before the first SGLang module that imports `sgl_kernel`; a real one already imported is
    replaced. Idempotent.
    """
    if getattr(sys.modules.get("sgl_kernel"), "__stand_in__", False):
        return
    declare_torchvision_ops()
    for name in [m for m in sys.modules if m == "sgl_kernel" or m.startswith("sgl_kernel.")]:
        del sys.modules[name]

    for name, functions in _MODULES.items():
        module: Any = ModuleType(name, "CPU stand-in from sglang_dflash")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "sgl_kernel")
        for function in functions:
            setattr(module, function.__name__, function)
        sys.modules[name] = module
    root: Any = sys.modules["sgl_kernel"]
    root.__path__ = []
    root.__version__ = "0.0.0+sglang.dflash.cpu"
    root.__stand_in__ = True
    root.mamba, root.speculative = sys.modules["sgl_kernel.mamba"], sys.modules["sgl_kernel.speculative"]
    for name in _EAGLE_ONLY:
        setattr(root, name, _refusal(name))

    for function in _TORCH_OPS:
        # SGLang reaches some ops through their default overload.
        function.default = function  # type: ignore[attr-defined]
        setattr(torch.ops.sgl_kernel, function.__name__, function)
