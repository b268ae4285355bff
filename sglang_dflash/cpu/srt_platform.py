"""The platform class named by :func:`sglang_dflash.cpu.platform.activate`.

A file of its own, because SGLang must not be imported while its platform is still being resolved.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.interface import PlatformCapabilities


class DFlashCpuPlatform(CpuSRTPlatform):
    """SGLang's CPU platform, out of tree, with DFLASH, NGRAM and hybrid (`extra_buffer`) prefix caching
    opened."""

    # No graph capture: the CPU "graph" is torch.compile, which buys nothing on models this small.
    capabilities = PlatformCapabilities()

    def is_out_of_tree(self) -> bool:
        return True

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # Unset, upstream has already made it intel_amx, whose kernels are absent here and which deterministic
        # inference refuses.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = "torch_native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() in ("DFLASH", "NGRAM")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True
