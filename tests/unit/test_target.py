"""Targets and rank settings that a tree would not verify exactly are refused at start-up, in one line."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite, parse_spec_tp_sync  # noqa: E402

from sglang_dflash.target import check_ranks, check_target  # noqa: E402

CHAIN = "--speculative-eagle-topk 1"


def attention(**options: Any) -> RadixAttention:
    return RadixAttention(num_heads=2, head_dim=8, scaling=1.0, num_kv_heads=1, layer_id=0, **options)


def runner(
    *layers: torch.nn.Module, arch: AttentionArch = AttentionArch.MHA, dtype: torch.dtype = torch.bfloat16
) -> Any:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2), attention(), *layers])})
    return SimpleNamespace(model=model, model_config=SimpleNamespace(attention_arch=arch), kv_cache_dtype=dtype)


def scaled() -> RadixAttention:
    layer = attention()
    layer.xai_temperature_len = 1024
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_plain_target_passes(dtype: torch.dtype) -> None:
    check_target(runner(attention(sliding_window_size=None), attention(sliding_window_size=0), dtype=dtype))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (runner(arch=AttentionArch.MLA), "found attention MLA, want MHA"),
        (runner(arch=AttentionArch.SSM), "found attention SSM, want MHA"),
        (runner(attention(sliding_window_size=128)), "found sliding_window_size 128 in layers.2, want none"),
        (runner(attention(), scaled()), "found xai_temperature_len 1024 in layers.3, want none"),
        (runner(dtype=torch.float8_e4m3fn), "found KV cache dtype torch.float8_e4m3fn, want 16 bits or more"),
        (runner(dtype=torch.float8_e5m2), "set --kv-cache-dtype bfloat16"),
        (runner(dtype=torch.uint8), "found KV cache dtype torch.uint8"),
    ],
    ids=["MLA", "SSM", "window", "temperature", "fp8", "fp8 remedy", "packed"],
)
def test_other_targets_are_refused(target: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"^DDTree target: ") as error:
        check_target(target)
    text = str(error.value)
    assert words in text
    assert CHAIN in text
    assert "\n" not in text


def sync(setting: str) -> SpecTpSync:
    """As ``SGLANG_SPEC_TP_SYNC=setting`` makes it, of two ranks."""
    made = object.__new__(SpecTpSync)
    sites = parse_spec_tp_sync(setting)
    made.enabled = lambda site: site in sites
    return made


def test_ranks_must_agree() -> None:
    check_ranks(sync("all"), 2)
    check_ranks(sync("off"), 1)  # one rank has nobody to disagree with
    with pytest.raises(ValueError, match=r"^SGLANG_SPEC_TP_SYNC: found ") as error:
        check_ranks(sync("off"), 2)
    for site in ("target", "selector", "accept-greedy", "accept-sample"):
        assert f"dflash-{site}" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="found dflash-accept-greedy switched off"):
        check_ranks(sync("rng"), 2)
    check_ranks(sync("dflash-target,dflash-selector,dflash-accept-greedy,dflash-accept-sample"), 4)
    with pytest.raises(ValueError, match="found dflash-target, dflash-accept-greedy, dflash-accept-sample switched"):
        check_ranks(sync(SpecTpSyncSite.DFLASH_SELECTOR.slug), 2)
