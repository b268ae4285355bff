"""Requests that a tree would not serve exactly, or that would end the server, are refused with a 400 that says so.

``refuse_tokenized`` judges before the scheduler sees a request, so that a stream begins with the error. SGLang loads no
plugins where several processes tokenize (``--tokenizer-worker-num``), so ``validate_request`` judges again in the
scheduler, where all requests come past. ``normalize_request`` and ``chat_request`` are about what upstream answers with
status 500.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_dflash.config import TreeConfig

_RETRY = "send it to a server without speculation, or drop the option"
_NOT_FOR_IT = (AttributeError, IndexError, KeyError, TypeError)  # what upstream's code makes of a foreign type
_MAX_TOP_K = 2**31 - 1  # the sampler's tensor of them is int32


def refuse_tokenized(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of ``TokenizerManager._create_tokenized_object``, whose ValueErrors every entry turns into a 400."""
    if TreeConfig.published() is None:
        return
    ids = result.input_ids
    if result.mm_inputs is not None or (result.session_params is not None and not ids):
        ids = None  # upstream completes the prompt, from images or from the session's history
    reason = reason_malformed(
        ids,
        vocab_size=manager.model_config.vocab_size,
        top_k=result.sampling_params.top_k,
        top_logprobs=result.top_logprobs_num,
    )
    reason = reason or reason_to_refuse(result, deterministic=_deterministic())
    if reason is not None:
        raise ValueError(reason)


def validate_request(result: str | None, req: Any, enable_overlap: bool) -> str | None:
    """AFTER hook of ``validate_dflash_request``: the error text for a request we refuse, else upstream's answer."""
    if result is not None or TreeConfig.published() is None:
        return result
    reason = reason_malformed(
        # A session's images have left ids outside the vocabulary in its history, which SGLang put there.
        req.origin_input_ids if req.multimodal_inputs is None else None,
        vocab_size=req.vocab_size,
        top_k=req.sampling_params.top_k,
        top_logprobs=req.logprob.top_logprobs_num,
    )
    reason = reason or reason_to_refuse(req, deterministic=_deterministic())
    if reason is not None:
        _neutralise(req)
    return reason


def _deterministic() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def normalize_request(original: Callable, obj: Any) -> Any:
    """AROUND hook of ``GenerateReqInput.normalize_batch_and_arguments``: raises ValueError, which every entry turns
    into a 400, for what upstream would answer with status 500, or not survive."""
    if TreeConfig.published() is None:
        return original(obj)
    obj.is_single = True  # what ends a stream reads it, also of a request that fails before upstream has set it
    check_fields(obj)
    try:
        return original(obj)
    except _NOT_FOR_IT as error:
        raise ValueError(f"request: a field is not of the documented type ({error}); correct it.") from error


def check_fields(obj: Any) -> None:
    """Raise ValueError for ``sampling_params`` of another number than the prompts, a ``stop_regex`` that is none, or a
    ``logprob_start_len`` that the scheduler asserts against.

    ``obj`` is a ``GenerateReqInput`` as it came in: one prompt is a text or a flat list of ids, several a list of them.
    """
    given = obj.sampling_params
    prompts = obj.text if obj.text is not None else obj.input_ids
    several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    if isinstance(given, list) and not (several and len(given) == len(prompts)):
        want = f"one object, or a list of {len(prompts)}, one a prompt" if several else "one object"
        raise ValueError(f"sampling_params: found a list of {len(given)}, want {want}; correct it.")
    for params in given if isinstance(given, list) else [given or {}]:
        patterns = params.get("stop_regex") or ()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"stop_regex: found {pattern!r} ({error}), want a regular expression of Python's re; correct it."
                ) from None
    starts = obj.logprob_start_len if isinstance(obj.logprob_start_len, list) else [obj.logprob_start_len]
    for start in starts:
        if start is not None and start < -1:
            raise ValueError(
                f"logprob_start_len: found {start}, want 0 or more, or -1 for the output alone; correct it."
            )


def chat_request() -> type:
    """A ``ChatCompletionRequest`` that refuses a body whose fields are of other types, or that is no JSON object:
    upstream's own validators rely on them and would answer with status 500. To be put in the place of upstream's."""
    from pydantic import model_validator
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest as Upstream

    class ChatCompletionRequest(Upstream):
        @model_validator(mode="wrap")
        @classmethod
        def _readable(cls, body: Any, validate: Callable[[Any], Any]) -> Any:
            try:
                return validate(body)
            except _NOT_FOR_IT as error:
                if TreeConfig.published() is None:
                    raise
                raise ValueError(f"found a {type(body).__name__}, want an object as documented ({error})") from error

    return ChatCompletionRequest


def _neutralise(req: Any) -> None:
    """SGLang prefills one token of a refused request with all it asked for; what raises there ends the server:
    a custom processor, min_p beside seeds, or more top logprobs than tokens. (The prompt is replaced upstream.)"""
    req.custom_logit_processor = None
    req.logprob.top_logprobs_num = 0  # read for the whole batch where any request wants logprobs
    params = req.sampling_params
    params.top_k, params.min_p, params.sampling_seed, params.min_new_tokens = 1, 0.0, None, 0
    params.frequency_penalty, params.presence_penalty, params.repetition_penalty = 0.0, 0.0, 1.0


def reason_to_refuse(req: Any, *, deterministic: bool) -> str | None:
    """One line naming the option, the value found and what to do, or None when the request is served exactly."""
    params = req.sampling_params
    penalties = (("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0))
    for name, neutral in penalties:
        if (value := getattr(params, name)) != neutral:
            return f"DDTree does not serve {name} yet: found {value}, want {neutral}; {_RETRY}."
    if params.min_new_tokens > 0:
        return f"DDTree does not serve min_new_tokens yet: found {params.min_new_tokens}, want 0; {_RETRY}."
    if params.sampling_seed is not None and not _greedy(params) and not deterministic:
        return (
            f"sampling_seed: found {params.sampling_seed}, want none: this server runs without "
            "--enable-deterministic-inference and would ignore it; start it with that flag, or drop the seed."
        )
    if deterministic and params.min_p > 0:
        # SGLang's seeded sampler asserts against min_p, for every request of the batch.
        return f"min_p under --enable-deterministic-inference: found {params.min_p}, want 0; {_RETRY}."
    if getattr(req, "custom_logit_processor", None):
        return f"DDTree does not serve custom_logit_processor yet: found one, want none; {_RETRY}."
    if getattr(req, "lora_id", None) is not None:
        return f"DDTree does not serve LoRA adapters yet: found {req.lora_id!r}, want none; {_RETRY}."
    if getattr(req, "return_hidden_states", False):
        return f"DDTree does not serve return_hidden_states yet: found True, want False; {_RETRY}."
    if getattr(req, "return_sampling_mask", False):
        return f"DDTree does not serve return_sampling_mask yet: found True, want False; {_RETRY}."
    # Captured a KV slot, and compaction moves the KV alone (state_capturer/base.py).
    for name in ("return_routed_experts", "return_indexer_topk"):
        if getattr(req, name, False):
            return f"DDTree does not serve {name} yet: found True, want False; {_RETRY}."
    if getattr(req, "input_embeds", None) is not None:
        return f"DDTree does not serve input_embeds yet: found some, want input_ids; {_RETRY}."
    return None


def reason_malformed(ids: array[int] | None, *, vocab_size: int, top_k: int, top_logprobs: int | None) -> str | None:
    """One line for a request that would raise in the model or the sampler, which ends SGLang's scheduler and with it
    every request; None for a sound one. ``ids`` is the prompt, an ``array("q")``, or None where it is not known yet."""
    if ids is not None and not ids:
        return "prompt: found no tokens, want at least one; give it some text or token ids."
    if ids is not None:
        values = np.frombuffer(ids, dtype=np.int64)
        for token_id in (int(values.min()), int(values.max())):
            if not 0 <= token_id < vocab_size:
                return (
                    f"prompt: found the token id {token_id}, want 0..{vocab_size - 1}; "
                    "encode it with this model's tokenizer."
                )
    if not 0 <= (top_logprobs or 0) <= vocab_size:
        return (
            f"top_logprobs_num (logprobs, top_logprobs): found {top_logprobs}, want 0..{vocab_size}, the vocabulary's "
            "size; lower it."
        )
    if top_k > _MAX_TOP_K:
        return f"top_k: found {top_k}, want at most {_MAX_TOP_K}, or -1 for all; lower it."
    return None


def _greedy(params: Any) -> bool:
    # SamplingParams turns temperature 0 into top_k 1.
    return params.top_k == 1
