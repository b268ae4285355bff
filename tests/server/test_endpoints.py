"""The HTTP endpoints answer with exactly the text of plain decoding, whole or streamed."""

from __future__ import annotations

import pytest
from cases import MARGIN
from configs import on
from reference import greedy

pytestmark = on("hybrid", "dense")
QUESTIONS = ("Name three rivers.", "Why is the sky blue?", "7 * 6 =", "Hello", "Sing.", "Who are you?", "A b c", "No.")
MESSAGES = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": q}] for q in QUESTIONS]
MESSAGES += [m[1:] for m in MESSAGES]
OPTIONS = {"model": "tiny", "temperature": 0, "max_tokens": 48, "ignore_eos": True}


def some(texts):
    return [c for c in texts.cases[:16] if len(c.prompt) in (5, 17, 64, 150)]


def usage(prompt, answer):
    return {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "total_tokens": len(prompt) + len(answer)}


@pytest.fixture
def chats(served, tokenizer):
    """Messages, their prompt ids, and transformers' answer."""
    server, texts = served
    prompts = [list(tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"]) for m in MESSAGES]
    answers = greedy(texts.target, prompts, 48)
    found = [
        (messages, prompt, list(answer.tokens))
        for messages, prompt, answer in zip(MESSAGES, prompts, answers, strict=True)
        if answer.margin > MARGIN[texts.target.name]
    ]
    assert len(found) >= 3
    server.control(truths=[prompt + answer for _, prompt, answer in found])
    return found


def test_generate(served, tokenizer):
    server, texts = served
    for case in some(texts):
        body = {"input_ids": case.prompt}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        whole = server.post("/generate", body).json()
        assert whole["text"] == tokenizer.decode(case.answer)
        assert whole["meta_info"]["prompt_tokens"] == len(case.prompt)
        assert whole["meta_info"]["completion_tokens"] == len(case.answer)
        assert whole["meta_info"]["spec_verify_ct"] < len(case.answer)
        chunks = server.events("/generate", body)
        assert len(chunks) > 3
        assert chunks[-1]["text"] == whole["text"]
        assert chunks[-1]["output_ids"] == case.answer


def test_completions(served, tokenizer):
    server, texts = served
    for case in some(texts):
        body = OPTIONS | {"prompt": case.prompt, "max_tokens": 64}
        whole = server.post("/v1/completions", body).json()
        assert whole["choices"][0]["text"] == tokenizer.decode(case.answer)
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"].items() >= usage(case.prompt, case.answer).items()
        chunks = server.events("/v1/completions", body)
        assert len(chunks) > 3
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]


def test_chat(served, chats, tokenizer):
    server, _ = served
    for messages, prompt, answer in chats:
        whole = server.post("/v1/chat/completions", OPTIONS | {"messages": messages}).json()
        assert whole["choices"][0]["message"]["content"] == tokenizer.decode(answer)
        assert whole["usage"].items() >= usage(prompt, answer).items()


def test_chat_stream(served, chats, tokenizer):
    server, _ = served
    for messages, prompt, answer in chats:
        body = OPTIONS | {"messages": messages, "stream_options": {"include_usage": True}}
        chunks = server.events("/v1/chat/completions", body)
        deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
        assert sum(map(bool, deltas)) > 3
        assert "".join(deltas) == tokenizer.decode(answer)
        assert chunks[-1]["usage"].items() >= usage(prompt, answer).items()
