"""Requests that a tree would not serve exactly get one line that says what to change; all others pass."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import refusals
from sglang_dflash.config import TreeConfig
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

TREE = TreeConfig(block_size=8, topk=4, budget=20)


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1] * len(text)


def request(sampling: dict[str, Any] | None = None, **options: Any) -> Any:
    params = SamplingParams(**(sampling or {}))
    params.normalize(Tokenizer())
    plain = {
        "custom_logit_processor": None,
        "lora_id": None,
        "return_hidden_states": False,
        "return_sampling_mask": False,
        "return_routed_experts": False,
        "return_indexer_topk": False,
        "input_embeds": None,
    }
    return SimpleNamespace(sampling_params=params, **(plain | options))


def test_the_options_are_those_of_a_request() -> None:
    """A misspelt name would never refuse."""
    parameters = inspect.signature(Req.__init__).parameters
    options = set(vars(request())) - {"sampling_params"}
    assert options <= parameters.keys()
    source = inspect.getsource(refusals)
    assert all(f'"{name}"' in source for name in options)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"stop": ["x"], "ignore_eos": True, "max_new_tokens": 3},
        {"json_schema": "{}"},
        {"logit_bias": {"5": 1.0}},
        {"temperature": 0, "sampling_seed": 7},
    ],
)
def test_served(sampling: dict[str, Any]) -> None:
    assert refusals.reason_to_refuse(request(sampling), deterministic=False) is None
    assert refusals.reason_to_refuse(request(sampling), deterministic=True) is None


@pytest.mark.parametrize(
    ("sampling", "options", "words"),
    [
        ({"frequency_penalty": 0.5}, {}, "frequency_penalty yet: found 0.5, want 0.0"),
        ({"presence_penalty": -0.5}, {}, "presence_penalty yet: found -0.5, want 0.0"),
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty yet: found 1.1, want 1.0"),
        ({"min_new_tokens": 3}, {}, "min_new_tokens yet: found 3, want 0"),
        ({}, {"custom_logit_processor": "code"}, "custom_logit_processor yet"),
        ({}, {"lora_id": "abc"}, "LoRA adapters yet: found 'abc'"),
        ({}, {"return_hidden_states": True}, "return_hidden_states yet"),
        ({}, {"return_sampling_mask": True}, "return_sampling_mask yet"),
        ({}, {"return_routed_experts": True}, "return_routed_experts yet"),
        ({}, {"return_indexer_topk": True}, "return_indexer_topk yet"),
        ({}, {"input_embeds": [[0.0]]}, "input_embeds yet"),
    ],
)
def test_refused(sampling: dict[str, Any], options: dict[str, Any], words: str) -> None:
    for deterministic in (False, True):
        reason = refusals.reason_to_refuse(request(sampling, **options), deterministic=deterministic)
        assert reason is not None
        assert words in reason
        assert reason.endswith("send it to a server without speculation, or drop the option.")
        assert "\n" not in reason


def test_seeds_need_a_deterministic_server() -> None:
    seeded = request({"temperature": 0.7, "sampling_seed": 7})
    assert refusals.reason_to_refuse(seeded, deterministic=True) is None
    reason = refusals.reason_to_refuse(seeded, deterministic=False)
    assert "sampling_seed: found 7, want none" in reason
    assert "--enable-deterministic-inference" in reason


def test_min_p_needs_an_unseeded_server() -> None:
    """Greedy requests too: one of them would bring min_p to the whole batch, and SGLang's seeded sampler asserts."""
    for temperature in (0, 0.7):
        req = request({"temperature": temperature, "min_p": 0.1})
        assert refusals.reason_to_refuse(req, deterministic=False) is None
        assert "min_p under --enable-deterministic-inference: found 0.1" in refusals.reason_to_refuse(
            req, deterministic=True
        )


def test_a_refused_request_can_raise_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang still prefills one token of it, in a batch with requests that are served."""
    monkeypatch.setattr(TreeConfig, "published", classmethod(lambda cls: TREE))
    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: execution)
    asked = {
        "temperature": 0.7,
        "top_k": 20,
        "min_p": 0.1,
        "sampling_seed": 7,
        "min_new_tokens": 3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
    }
    req = request(asked, custom_logit_processor="code")
    assert refusals.validate_request(None, req, True) is not None
    assert req.custom_logit_processor is None
    params = req.sampling_params
    assert (params.top_k, params.min_p, params.sampling_seed, params.min_new_tokens) == (1, 0.0, None, 0)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert refusals.reason_to_refuse(req, deterministic=True) is None
    served = request({"temperature": 0.7, "sampling_seed": 7})
    assert refusals.validate_request(None, served, True) is None
    assert (served.sampling_params.sampling_seed, served.sampling_params.temperature) == (7, 0.7)


def test_only_where_a_tree_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    penalised, tree = request({"frequency_penalty": 0.5}), [TREE]
    monkeypatch.setattr(TreeConfig, "published", classmethod(lambda cls: tree[0]))
    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: execution)
    assert "frequency_penalty" in refusals.validate_request(None, penalised, True)
    assert refusals.validate_request("upstream's", penalised, True) == "upstream's"
    assert refusals.validate_request(None, request(), True) is None
    tree[0] = None
    assert refusals.validate_request(None, penalised, True) is None
