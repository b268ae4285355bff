"""Targets whose attention a tree pass would compute otherwise than plain decoding does are refused at start-up."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

_CHAIN = "set --speculative-eagle-topk 1 for the upstream chain"
_AGREE = (
    SpecTpSyncSite.DFLASH_TARGET,
    SpecTpSyncSite.DFLASH_SELECTOR,
    SpecTpSyncSite.DFLASH_ACCEPT_GREEDY,
    SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE,
)


def check_target(model_runner: Any) -> None:
    """Raise ValueError for a target that a tree does not verify exactly; call once its KV pool is laid out."""
    arch = model_runner.model_config.attention_arch
    if arch != AttentionArch.MHA:
        raise ValueError(
            f"DDTree target: found attention {arch.name}, want MHA: its tree masks are unchecked; {_CHAIN}."
        )
    for name, layer in model_runner.model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        # Both are applied by row number in SGLang's verify kernel; rows of a tree are not positions.
        for rule in ("sliding_window_size", "xai_temperature_len"):
            if (getattr(layer, rule, None) or -1) > 0:
                raise ValueError(
                    f"DDTree target: found {rule} {getattr(layer, rule)} in {name}, want none: verification applies it "
                    f"by row, not by a node's position; {_CHAIN}."
                )
    dtype = model_runner.kv_cache_dtype
    if dtype.itemsize < 2:
        raise ValueError(
            f"DDTree target: found KV cache dtype {dtype}, want 16 bits or more: verify reads the step's own keys "
            f"unquantised where plain decoding reads them back; set --kv-cache-dtype bfloat16, or {_CHAIN}."
        )


def check_ranks(tp_sync: SpecTpSync, tp_size: int) -> None:
    """Raise ValueError when SGLANG_SPEC_TP_SYNC leaves tensor-parallel ranks free to disagree."""
    off = [site.slug for site in _AGREE if tp_size > 1 and not tp_sync.enabled(site)]
    if off:
        raise ValueError(
            f"SGLANG_SPEC_TP_SYNC: found {', '.join(off)} switched off, want them on with DDTree: ranks that grow or "
            "accept different trees corrupt their caches; unset it."
        )
