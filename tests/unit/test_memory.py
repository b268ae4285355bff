"""The state-memory formula of hybrid targets, the hooks that print it, and the KV slots a step reserves."""

from __future__ import annotations

import ast
import inspect
import logging
import os
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import allocation, memory
from sglang_dflash.config import TreeConfig
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

import torch  # noqa: E402
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.mamba_utils import (  # noqa: E402
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.attention import verify_mask  # noqa: E402
from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402

TREE = TreeConfig(block_size=16, topk=8, budget=32)
RECURRENT = 48 * 48 * 128 * 128 * 4  # layers x value heads x head x head, fp32
CONV = 48 * (48 * 128 + 2 * 16 * 128) * 3 * 2  # layers x channels x (kernel - 1), bf16


def qwen_27b() -> Mamba2CacheParams:
    """Qwen3.6-27B: 48 gated-delta-net layers, 16 key and 48 value heads of 128, kernel 4."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=48 * 128,
        n_groups=16,
        num_heads=48,
        head_dim=128,
        state_size=128,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, dtype=dtype, layers=list(range(48)))


class Configurator:
    """What the hooks and upstream's `resolve_max_num_reqs` read."""

    def __init__(self, hybrid: bool = True, draft: bool = False):
        self.mambaish_config = SimpleNamespace(mamba2_cache_params=qwen_27b()) if hybrid else None
        self.model_config = SimpleNamespace(context_len=4096)
        self.attn_dp_size = 1
        self.is_draft_worker = draft

    def _calculate_mamba_ratio(self) -> int:
        return 5


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Publish a tree (None: no tree), the wish for running requests and the state slots."""

    def publish(tree: TreeConfig | None = TREE, *, wish: int | None = None, slots: int | None = 40) -> None:
        monkeypatch.setattr(TreeConfig, "published", classmethod(lambda cls: tree))
        schedule = SimpleNamespace(max_running_requests=wish, max_mamba_cache_size=slots)
        for module in (runtime_context, kv_cache_configurator):
            monkeypatch.setattr(module, "get_schedule", lambda: schedule)

    return publish


def resolve(configurator: Configurator, tokens: int = 100_000) -> int:
    original = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
    original = getattr(original, "__wrapped__", original)
    return memory.resolve_max_num_reqs(original, configurator, tokens)


def test_the_formula_for_qwen_27b() -> None:
    state = memory.StateMemory(
        state_bytes=qwen_27b().mamba_cache_per_req, width=TREE.width, slots=40, slots_per_request=5
    )
    assert RECURRENT == 144 << 20
    assert state.state_bytes == RECURRENT + CONV
    assert state.requests == 8
    assert state.snapshot_bytes == 9 * 33 * (RECURRENT + CONV)
    assert state.committed_bytes == 41 * (RECURRENT + CONV)
    text = str(state)
    assert text.startswith("state slots 40 // 5 a request = 8 requests, 8 run; committed states ")
    assert "(40 + 1) x 146.81 MiB = 6019 MiB" in text
    assert "(8 + 1) requests x 33 rows x 146.81 MiB = 43603 MiB" in text


def test_snapshots_follow_the_requests_that_run() -> None:
    """Slots for a prefix cache do not multiply the snapshots."""
    state = memory.StateMemory(state_bytes=1 << 20, width=33, slots=60, slots_per_request=5, limit=4)
    assert state.requests == 4
    assert state.snapshot_bytes == 5 * 33 << 20
    assert state.committed_bytes == 61 << 20
    text = str(state)
    assert "state slots 60 // 5 a request = 12 requests, 4 run; " in text
    assert "(4 + 1) requests x 33 rows x 1.00 MiB = 165 MiB" in text


def test_the_printed_snapshots_are_those_that_run(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    served(wish=4, slots=60)
    with caplog.at_level(logging.INFO, "sglang_dflash.memory"):
        assert resolve(Configurator()) == 4
    assert "12 requests, 4 run" in caplog.text
    assert "verify snapshots (4 + 1) requests x 33 rows" in caplog.text


def test_lowered_wishes_are_warned_about(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    served(wish=12)
    with caplog.at_level(logging.INFO, "sglang_dflash.memory"):
        assert resolve(Configurator()) == 8
    (formula, warning) = [r for r in caplog.records if r.name == "sglang_dflash.memory"]
    assert formula.levelno == logging.INFO
    assert "33 rows x 146.81 MiB" in formula.getMessage()
    assert warning.levelno == logging.WARNING
    assert "lowered from 12 to 8" in warning.getMessage()
    assert "lower --speculative-ddtree-budget" in warning.getMessage()


@pytest.mark.parametrize("wish", [8, 3, None])
def test_a_fulfilled_wish_is_no_warning(wish: int | None, served: Any, caplog: pytest.LogCaptureFixture) -> None:
    served(wish=wish)
    with caplog.at_level(logging.INFO, "sglang_dflash.memory"):
        assert resolve(Configurator()) == (wish or 8)
    assert [record.levelname for record in caplog.records if record.name == "sglang_dflash.memory"] == ["INFO"]


@pytest.mark.parametrize("slots", [4, 0, -7])
def test_not_even_one_request(slots: int, served: Any) -> None:
    served(slots=slots)
    with pytest.raises(RuntimeError, match=r"DDTree: not even one request fits: state slots ") as error:
        resolve(Configurator())
    text = str(error.value)
    assert f"state slots {max(slots, 0)} // 5 a request = 0 requests, 0 run" in text
    assert "lower --speculative-ddtree-budget" in text
    assert "\n" not in text
    assert "SGLang: Hybrid (mamba/linear-attention) state cache is too small" in text


def test_silent_without_a_tree_a_hybrid_or_a_target(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sglang_dflash.memory"):
        served(None, wish=12)
        assert resolve(Configurator()) == 8
        served(TREE, wish=12)
        assert resolve(Configurator(draft=True)) == 8
        assert resolve(Configurator(hybrid=False)) == 12
        served(None, slots=0)
        with pytest.raises(RuntimeError, match=r"^Hybrid"):
            resolve(Configurator())
    assert [record for record in caplog.records if record.name == "sglang_dflash.memory"] == []


def test_the_state_cache_error(served: Any) -> None:
    def fails(configurator: Any, rest: float) -> float:
        raise RuntimeError(f"no room in {rest}")

    served(slots=None)
    with pytest.raises(RuntimeError, match=r"not even one request fits: no state slots; .* SGLang: no room in 1.5"):
        memory.handle_max_mamba_cache(fails, Configurator(), 1.5)
    served(None)
    with pytest.raises(RuntimeError, match=r"^no room in 1.5"):
        memory.handle_max_mamba_cache(fails, Configurator(), 1.5)
    assert memory.handle_max_mamba_cache(lambda c, rest: rest / 2, Configurator(), 1.5) == 0.75


@pytest.mark.parametrize(("page", "columns"), [(1, 66), (16, 81)])
def test_a_row_holds_two_windows(page: int, columns: int, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served()
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: page)
    assert allocation.extra_context_len(4) == columns
    assert allocation.extra_context_len(500) == 500
    assert allocation.alloc_len_per_decode(8 * 15) == 33
    served(None)
    assert allocation.extra_context_len(4) == 4
    assert allocation.alloc_len_per_decode(120) == 120


def test_a_mask_reaches_past_the_context_limit(served: Any) -> None:
    """By upstream's own call: all keywords, the drafter's left alone."""
    call = {
        "is_draft_runner": False,
        "skip_prefill": False,
        "max_bs": 3,
        "max_context_len": 100,
        "num_draft_tokens": 33,
        "device": "cpu",
        "is_read": True,
    }

    def columns(**changed: Any) -> int | None:
        seen = []

        def original(**kwargs: Any) -> str:
            assert kwargs == call | changed | {"max_context_len": kwargs["max_context_len"]}
            seen.append(kwargs["max_context_len"])
            return "mask"

        assert allocation.verify_mask_context(original, **call | changed) == "mask"
        return seen[0]

    served()
    assert columns() == 100 + 2 * TREE.width
    assert columns(is_draft_runner=True) == 100
    served(None)
    assert columns() == 100


def test_upstream_calls_it_with_keywords_and_through_the_hook() -> None:
    """A positional argument would not reach the hook, nor a call by a name the registry cannot patch."""
    parameters = inspect.signature(verify_mask.maybe_create_verify_mask).parameters.values()
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
    source = Path(verify_mask.__file__).with_name("triton_backend.py").read_text()
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("maybe_create_verify_mask")
    ]
    assert calls
    for call in calls:
        assert ast.unparse(call.func) == "maybe_create_verify_mask"  # the module's own binding, patched with the rest
        assert not call.args
        assert {"is_draft_runner", "max_context_len"} <= {keyword.arg for keyword in call.keywords}


def test_the_hook_sizes_the_buffer_of_a_backend(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered and applied by SGLang, in a module that imported the name before."""
    importer = types.ModuleType("importer_of_the_mask")
    importer.maybe_create_verify_mask = verify_mask.maybe_create_verify_mask
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    restored = [m for m in list(sys.modules.values()) if vars(m).get("maybe_create_verify_mask") is not None]
    for module in restored:
        monkeypatch.setattr(module, "maybe_create_verify_mask", verify_mask.maybe_create_verify_mask)
    target = "sglang.srt.layers.attention.verify_mask.maybe_create_verify_mask"
    monkeypatch.setattr(HookRegistry, "_hooks", {target: [(HookType.AROUND, allocation.verify_mask_context, None)]})
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry.apply_hooks()
    served()
    monkeypatch.setattr(verify_mask, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK)
    mask = importer.maybe_create_verify_mask(
        is_draft_runner=False, skip_prefill=False, max_bs=2, max_context_len=50, num_draft_tokens=33, device="cpu",
        is_read=True,
    )  # fmt: skip
    assert mask.buffer.numel() == 2 * 33 * (50 + 2 * 33 + 33)
