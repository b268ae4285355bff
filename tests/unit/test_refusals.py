"""Requests that a tree would not serve exactly get one line that says what to change; all others pass."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import inspect
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import refusals
from sglang_dflash.config import TreeConfig
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
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
        "origin_input_ids": array("q", [1, 2, 3]),
        "vocab_size": 500,
        "multimodal_inputs": None,
        "logprob": SimpleNamespace(top_logprobs_num=0),
    }
    return SimpleNamespace(sampling_params=params, **(plain | options))


def tokenized(sampling: dict[str, Any] | None = None, **options: Any) -> Any:
    """The same before the scheduler has made a ``Req`` of it."""
    own = {"input_ids": array("q", [1, 2, 3]), "mm_inputs": None, "session_params": None, "top_logprobs_num": 0}
    return request(sampling, **(own | options))


def test_the_options_are_those_of_a_request() -> None:
    """A misspelt name would never refuse."""
    parameters = inspect.signature(Req.__init__).parameters
    attributes = {"sampling_params", "multimodal_inputs", "logprob"}  # set by it; the contract has rows for them
    options = set(vars(request())) - attributes - {"origin_input_ids", "vocab_size"}
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
    req = request(asked, custom_logit_processor="code", logprob=SimpleNamespace(top_logprobs_num=9))
    assert refusals.validate_request(None, req, True) is not None
    assert req.custom_logit_processor is None
    assert req.logprob.top_logprobs_num == 0
    params = req.sampling_params
    assert (params.top_k, params.min_p, params.sampling_seed, params.min_new_tokens) == (1, 0.0, None, 0)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert refusals.reason_to_refuse(req, deterministic=True) is None
    served = request({"temperature": 0.7, "sampling_seed": 7})
    assert refusals.validate_request(None, served, True) is None
    assert (served.sampling_params.sampling_seed, served.sampling_params.temperature) == (7, 0.7)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> list[TreeConfig | None]:
    """What the server publishes, a tree unless changed; not deterministic."""
    published: list[TreeConfig | None] = [TREE]
    monkeypatch.setattr(TreeConfig, "published", classmethod(lambda cls: published[0]))
    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: execution)
    return published


MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=500))


def test_only_where_a_tree_is_served(tree: list) -> None:
    penalised = request({"frequency_penalty": 0.5})
    assert "frequency_penalty" in refusals.validate_request(None, penalised, True)
    assert refusals.validate_request("upstream's", penalised, True) == "upstream's"
    assert refusals.validate_request(None, request(), True) is None
    penalised, odd = tokenized({"frequency_penalty": 0.5}), GenerateReqInput(text="a", sampling_params=[])
    with pytest.raises(ValueError, match="frequency_penalty"):
        refusals.refuse_tokenized(penalised, MANAGER)
    with pytest.raises(ValueError, match="found a list of 0"):
        refusals.normalize_request(lambda obj: None, odd)
    assert refusals.refuse_tokenized(tokenized(), MANAGER) is None
    tree[0] = None
    assert refusals.validate_request(None, request({"frequency_penalty": 0.5}), True) is None
    assert refusals.refuse_tokenized(penalised, MANAGER) is None
    assert refusals.normalize_request(lambda obj: "upstream's", odd) == "upstream's"


MALFORMED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"ids": []}, "prompt: found no tokens, want at least one"),
    ({}, {"ids": [1, 500]}, "prompt: found the token id 500, want 0..499"),
    ({}, {"ids": [-1, 1]}, "prompt: found the token id -1, want 0..499"),
    ({}, {"logprobs": 501}, "found 501, want 0..500, the vocabulary's size"),
    ({}, {"logprobs": -1}, "found -1, want 0..500"),
    ({"top_k": 2**31}, {}, "top_k: found 2147483648, want at most 2147483647"),
]


@pytest.mark.parametrize(("sampling", "options", "words"), MALFORMED)
def test_what_would_end_the_scheduler(sampling: dict, options: dict, words: str, tree: list) -> None:
    """Refused before it, and by it."""
    ids, logprobs = array("q", options.get("ids", [0, 499])), options.get("logprobs", 500)
    req = request(sampling, origin_input_ids=ids, logprob=SimpleNamespace(top_logprobs_num=logprobs))
    early = tokenized(sampling, input_ids=ids, top_logprobs_num=logprobs)
    reason = refusals.validate_request(None, req, True)
    with pytest.raises(ValueError, match="found") as error:
        refusals.refuse_tokenized(early, MANAGER)
    assert reason == str(error.value)
    assert words in reason
    assert "\n" not in reason
    assert req.logprob.top_logprobs_num == 0
    assert req.sampling_params.top_k == 1


def test_the_limits_are_served(tree: list) -> None:
    sampling, ids = {"top_k": 2**31 - 1}, array("q", [0, 499])
    req = request(sampling, origin_input_ids=ids, logprob=SimpleNamespace(top_logprobs_num=500))
    assert refusals.validate_request(None, req, True) is None
    assert refusals.refuse_tokenized(tokenized(sampling, input_ids=ids, top_logprobs_num=500), MANAGER) is None


def test_prompts_that_upstream_completes_are_not_judged(tree: list) -> None:
    """By images, whose ids in a session lie outside the vocabulary, or by a session's history."""
    empty = array("q")
    assert refusals.refuse_tokenized(tokenized(input_ids=empty, session_params="session"), MANAGER) is None
    assert refusals.refuse_tokenized(tokenized(input_ids=array("q", [10**9]), mm_inputs="image"), MANAGER) is None
    seen = request(origin_input_ids=array("q", [10**9]), multimodal_inputs="image")
    assert refusals.validate_request(None, seen, True) is None
    with pytest.raises(ValueError, match="token id 500"):
        refusals.refuse_tokenized(tokenized(input_ids=array("q", [500]), session_params="session"), MANAGER)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": "a", "sampling_params": [{}]}, "sampling_params: found a list of 1, want one object; correct it."),
        ({"input_ids": [1, 2], "sampling_params": [{}] * 2}, "found a list of 2, want one object; correct it."),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "found a list of 1, want one object, or a list of 2, one a"),
        ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex: found '(' (missing ), "),
        ({"text": ["a"], "sampling_params": [{"stop_regex": ["b", "*"]}]}, "stop_regex: found '*' (nothing to repeat"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len: found -2, want 0 or more"),
        ({"text": ["a", "b"], "logprob_start_len": [0, -2]}, "logprob_start_len: found -2"),
        ({"text": "a", "sampling_params": {"n": None}}, "request: a field is not of the documented type ('>' not"),
        ({"input_embeds": []}, "request: a field is not of the documented type (list index out of range)"),
    ],
)
def test_fields_of_foreign_types(fields: dict[str, Any], words: str, tree: list) -> None:
    obj = GenerateReqInput(**fields)
    with pytest.raises(ValueError, match=r"found|documented") as error:
        refusals.normalize_request(GenerateReqInput.normalize_batch_and_arguments, obj)
    assert words in str(error.value)
    assert obj.is_single  # the end of a stream reads it


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a"},
        {"text": ["a", "b"], "sampling_params": [{}, {"stop_regex": ["x+", "y"]}]},
        {"input_ids": [1, 2], "sampling_params": {"stop_regex": "x+"}, "logprob_start_len": -1},
        {"input_ids": [[1], [2]], "sampling_params": {"n": 2}, "logprob_start_len": 0},
    ],
)
def test_sound_fields_are_upstreams(fields: dict[str, Any], tree: list) -> None:
    ours, upstream = GenerateReqInput(**fields), GenerateReqInput(**fields)
    refusals.normalize_request(GenerateReqInput.normalize_batch_and_arguments, ours)
    upstream.normalize_batch_and_arguments()
    assert vars(ours) | {"rid": None} == vars(upstream) | {"rid": None}  # a random one


def test_chat_bodies(tree: list) -> None:
    chat = refusals.chat_request()
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert chat.model_validate(body).messages[0].content == "a"
    assert chat.__name__ == "ChatCompletionRequest"  # its name in the API's schema
    with pytest.raises(ValueError, match="Field required"):
        chat.model_validate({"model": "m"})
    for odd, name in (([1], "list"), ("a", "str"), (body | {"response_format": "x"}, "dict")):
        with pytest.raises(ValueError, match=f"found a {name}, want an object as documented"):
            chat.model_validate(odd)
    tree[0] = None
    with pytest.raises(AttributeError):
        chat.model_validate([1])
