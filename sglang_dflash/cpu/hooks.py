"""What CPU mode changes in SGLang beside the native ops: Triton calls and CUDA assumptions left on its CPU
path.

Called from the plugin entry point in every process. SGLang only logs a hook that fails to apply, so the start
of the attention backend asserts that all of them did.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dflash.cpu import stand_in
from sglang_dflash.cpu.ops import mamba_state, norms
from sglang_dflash.cpu.platform import ENGINE_SWITCH, is_requested

BACKEND = "torch_native"


class Hook(NamedTuple):
    target: str
    """Dotted path of the hooked function or method."""
    function: Callable[..., Any]
    kind: HookType


def _pin_memory(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Pinning needs an accelerator to pin for."""
    return original(tensor, *args, **kwargs) if torch.accelerator.is_available() else tensor


def _record_stream(original: Callable[..., Any], tensor: torch.Tensor, stream: Any) -> None:
    """torch has no implementation for CPU tensors, whose memory is never reused under a running stream."""
    if tensor.device.type != "cpu":
        original(tensor, stream)


def _keep_embeds_dtype(kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Upstream casts given embeddings to bfloat16; with an fp32 model that is both a crash and a loss."""
    if kwargs.get("input_embeds") is not None and forward_batch.input_embeds is not None:
        if forward_batch.replace_embeds is not None:
            kwargs["input_embeds"] = kwargs["input_embeds"].to(runner.dtype)
        else:
            kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return kwargs


def _no_fused_conv_scatter(pairs: Any) -> bool:
    """The many-layer scatter is Triton only; the one-layer form it falls back to is hooked."""
    return False


def _no_batch_invariant_kernels(enable_bmm: bool = True) -> None:
    """Deterministic inference swaps in Triton matmuls whose result does not depend on the batch.

    They cannot run here, so on a CPU it means what the seeds mean: the same noise for the same (seed,
    position).
    """


def _multinomial_with_seed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run upstream's seeded sampler uncompiled: compiling wants a C++ compiler and cannot trace the stand-in
    hash."""
    return getattr(original, "_torchdynamo_orig_callable", original)(*args, **kwargs)


_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
HOOKS = (
    Hook("torch.Tensor.pin_memory", _pin_memory, HookType.AROUND),
    Hook("torch.Tensor.record_stream", _record_stream, HookType.AROUND),
    Hook(
        "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
        norms.rms_norm_gated_forward,
        HookType.REPLACE,
    ),
    Hook(
        "sglang.kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_",
        norms.table_qk_norm_rope_,
        HookType.REPLACE,
    ),
    Hook(_SCATTER + "fused_mamba_state_scatter_with_mask", mamba_state.scatter_with_mask, HookType.REPLACE),
    Hook(_SCATTER + "fused_conv_window_scatter_with_mask", mamba_state.scatter_with_mask, HookType.REPLACE),
    Hook(_SCATTER + "_conv_multi_eligible", _no_fused_conv_scatter, HookType.REPLACE),
    Hook(_SCATTER + "track_mamba_states_all_layers", mamba_state.track_all_layers, HookType.REPLACE),
    Hook(_SCATTER + "track_mamba_states_if_needed", mamba_state.track_one_layer, HookType.REPLACE),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        _keep_embeds_dtype,
        HookType.AFTER,
    ),
    Hook(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        _no_batch_invariant_kernels,
        HookType.REPLACE,
    ),
    Hook("sglang.srt.layers.sampler.multinomial_with_seed", _multinomial_with_seed, HookType.AROUND),
)


def _make_attention_backend(runner: Any) -> Any:
    from sglang_dflash.cpu.attention import CpuAttentionBackend

    assert_hooks_applied()
    return CpuAttentionBackend(runner)


def register_hooks() -> None:
    """Register every CPU hook and open the backend name lists. Call from the `sglang.srt.plugins` entry
    point.

    Idempotent. Raises RuntimeError if CPU mode was not asked for.
    """
    if not is_requested():
        raise RuntimeError(
            f"CPU mode: {ENGINE_SWITCH}={os.environ.get(ENGINE_SWITCH)!r} found, wanted '1'; set it before starting"
        )
    stand_in.install()
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS[BACKEND] = _make_attention_backend
    if BACKEND not in server_args.DRAFT_ATTENTION_BACKEND_CHOICES:
        server_args.add_draft_attention_backend_choices([BACKEND])
    if BACKEND not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([BACKEND])
    if BACKEND not in server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        server_args.add_radix_supported_deterministic_attention_backend_choices([BACKEND])

    for hook in HOOKS:
        if all(function is not hook.function for _, function, _ in HookRegistry._hooks[hook.target]):
            HookRegistry.register(hook.target, hook.function, hook.kind)


def _wrapped_functions(function: Any) -> Iterator[Any]:
    """Everything a chain of hook wrappers closes over (each closes over its hook and what it wraps)."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)


def assert_hooks_applied() -> None:
    """Check that every hook is in force and the attention backend is ours.

    Raises RuntimeError naming the first that is not.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if ATTENTION_BACKENDS.get(BACKEND) is not _make_attention_backend:
        raise RuntimeError(
            f"CPU mode: attention backend {BACKEND!r} is {ATTENTION_BACKENDS.get(BACKEND)!r}, "
            "wanted this package's; unload the plugin that re-registered it (SGLANG_PLUGINS selects)"
        )
    for hook in HOOKS:
        try:
            current = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"CPU mode: hook target {hook.target} is absent ({error}), wanted SGLang 0.5.23; install that version"
            ) from error
        if not any(function is hook.function for function in _wrapped_functions(current)):
            raise RuntimeError(
                f"CPU mode: hook on {hook.target} is not in force (found {current!r}), wanted it applied; "
                "see the log for 'Failed to apply hooks' and install SGLang 0.5.23"
            )
