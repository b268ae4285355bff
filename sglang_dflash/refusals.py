"""Requests that a tree would not serve exactly are refused with a 400 that says so."""

from __future__ import annotations

from typing import Any

from sglang_dflash.config import TreeConfig

_RETRY = "send it to a server without speculation, or drop the option"


def validate_request(result: str | None, req: Any, enable_overlap: bool) -> str | None:
    """AFTER hook of ``validate_dflash_request``: the error text for a request we refuse, else upstream's answer."""
    if result is not None or TreeConfig.published() is None:
        return result
    from sglang.srt.runtime_context import get_exec

    reason = reason_to_refuse(req, deterministic=bool(get_exec().deterministic.enable_deterministic_inference))
    if reason is not None:
        _neutralise(req)
    return reason


def _neutralise(req: Any) -> None:
    """SGLang prefills one token of a refused request with all it asked for; what raises there ends the server:
    a custom processor, or min_p beside seeds."""
    req.custom_logit_processor = None
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


def _greedy(params: Any) -> bool:
    # SamplingParams turns temperature 0 into top_k 1.
    return params.top_k == 1
