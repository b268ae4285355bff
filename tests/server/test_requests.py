"""What a request may add: grammars, logit bias, logprobs. What it may not: refused with a 400 that names it."""

from __future__ import annotations

import json

import pytest
import torch
import xgrammar
from cases import MARGIN, pair, random_ids
from configs import on
from harness import Server
from models import EOS, VOCAB

TOLERANCE = 1e-3
PROMPTS = [random_ids(20 + i, 5000 + i) for i in range(6)]


def adjusted_greedy(forward, model, prompts, length, adjust):
    """Greedy text whose logits pass through ``adjust(i, logits, text so far)``, a pair a prompt: text and margin.

    ``adjust`` returns None when the text is complete.
    """
    texts, margins, done = [[] for _ in prompts], [torch.inf] * len(prompts), [False] * len(prompts)
    for _ in range(length):
        rows = forward.logits(model, [p + t for p, t in zip(prompts, texts, strict=True)])
        for i, row in enumerate(rows):
            logits = None if done[i] else adjust(i, row[0], texts[i])
            if logits is None:
                done[i] = True
                continue
            best = logits.topk(2)
            margins[i] = min(margins[i], float(best.values[0] - best.values[1]))
            texts[i].append(int(best.indices[0]))
    return [(t, m) for t, m in zip(texts, margins, strict=True)]


def grammar(compiled, count):
    """An ``adjust`` that masks by a compiled grammar."""
    matchers = [xgrammar.GrammarMatcher(compiled) for _ in range(count)]
    bits = xgrammar.allocate_token_bitmask(1, VOCAB)

    def adjust(i, logits, text):
        if text:
            assert matchers[i].accept_token(text[-1])
        if matchers[i].is_terminated():
            return None
        matchers[i].fill_next_token_bitmask(bits)
        allowed = (bits[0, torch.arange(VOCAB) // 32] >> (torch.arange(VOCAB) % 32)) & 1
        return torch.where(allowed.bool(), logits, -torch.inf)

    return adjust


SCHEMA = {
    "type": "object",
    "properties": {
        "river": {"enum": ["Rhine", "Rhone", "Danube", "Don"]},
        "length": {"type": "integer", "minimum": 100, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["river", "length", "tags"],
    "additionalProperties": False,
}


@on("hybrid", "dense")
@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_grammar(served, forward, tokenizer, kind):
    server, texts = served
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB, stop_token_ids=[EOS])
    )
    if kind == "regex":
        option = {"regex": "(ab|ac|b[0-9]{3}){20}"}
        compiled = compiler.compile_regex(option["regex"])
    else:
        option = {"json_schema": json.dumps(SCHEMA)}
        compiled = compiler.compile_json_schema(option["json_schema"])
    wanted = adjusted_greedy(forward, texts.target, PROMPTS, 100, grammar(compiled, len(PROMPTS)))
    firm = [(p, t) for p, (t, margin) in zip(PROMPTS, wanted, strict=True) if margin > MARGIN[texts.target.name]]
    assert len(firm) >= 3
    server.control(truths=[p + t for p, t in firm])
    outputs = server.generate_all([(p, 100) for p, _ in firm], 3, sampling=option | {"ignore_eos": False})
    for output, (_, text) in zip(outputs, firm, strict=True):
        assert output["output_ids"] == text
        assert output["meta_info"]["spec_verify_ct"] < 0.7 * len(text)  # trees were accepted under the mask
    free = texts.cases[8]
    server.control(truths=texts.truths)
    mixed = server.generate_all([(free.prompt, 64)], 1)  # a grammar leaves nothing behind
    assert mixed[0]["output_ids"] == free.answer


@on("dense")
def test_logit_bias(served, forward):
    server, texts = served
    bias = torch.zeros(VOCAB)
    bias[65:75] = torch.linspace(1.0, 5.0, 10)
    bias[100:200] = -30.0
    wanted = adjusted_greedy(forward, texts.target, PROMPTS, 40, lambda i, logits, text: logits + bias)
    firm = [(p, t) for p, (t, margin) in zip(PROMPTS, wanted, strict=True) if margin > MARGIN[texts.target.name]]
    assert len(firm) >= 3
    server.control(truths=[p + t for p, t in firm])
    option = {"logit_bias": {str(i): float(b) for i, b in enumerate(bias) if b}}
    outputs = server.generate_all([(p, 40) for p, _ in firm], 3, sampling=option)
    assert [o["output_ids"] for o in outputs] == [t for _, t in firm]
    plain = [server.generate(p, 40)["output_ids"] for p, _ in firm]
    assert all(a != b for (_, a), b in zip(firm, plain, strict=True))  # the bias did something


@on("hybrid", "dense")
def test_logprobs(served, forward):
    server, texts = served
    for case in texts.cases[4:16:3]:
        wanted = forward.logprobs(texts.target, case.prompt, case.answer)
        output = server.generate(case.prompt, 64, return_logprob=True, top_logprobs_num=3)
        assert output["output_ids"] == case.answer
        found = output["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in found] == case.answer
        chosen = wanted.gather(1, torch.tensor(case.answer).unsqueeze(1)).view(-1)
        torch.testing.assert_close(torch.tensor([p for p, _, _ in found]), chosen, rtol=0, atol=TOLERANCE)
        tops = torch.tensor([[p for p, _, _ in top] for top in output["meta_info"]["output_top_logprobs"]])
        torch.testing.assert_close(tops, wanted.topk(3).values, rtol=0, atol=TOLERANCE)


@on("hybrid", "dense")
def test_input_logprobs(served, forward):
    server, texts = served
    case = texts.cases[8]
    output = server.generate(case.prompt, 20, return_logprob=True, logprob_start_len=0)
    wanted = forward.logprobs(texts.target, case.prompt[:1], case.prompt[1:])
    chosen = wanted.gather(1, torch.tensor(case.prompt[1:]).unsqueeze(1)).view(-1)
    found = output["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in found] == case.prompt
    torch.testing.assert_close(torch.tensor([p for p, _, _ in found[1:]]), chosen, rtol=0, atol=TOLERANCE)
    assert output["output_ids"] == case.answer[:20]


@on("hybrid", "dense")
def test_openai_logprobs(served, forward):
    server, texts = served
    case = texts.cases[9]
    wanted = forward.logprobs(texts.target, case.prompt, case.answer[:32])
    chosen = wanted.gather(1, torch.tensor(case.answer[:32]).unsqueeze(1)).view(-1)
    body = {"model": "tiny", "prompt": case.prompt, "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    answer = server.post("/v1/completions", body | {"logprobs": 2}).json()
    found = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
    torch.testing.assert_close(found, chosen, rtol=0, atol=TOLERANCE)


# A pickled reference to one of SGLang's own.
PROCESSOR = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
REFUSED = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_new_tokens": {"min_new_tokens": 4},
    "sampling_seed": {"sampling_seed": 7, "temperature": 0.8},
}
REFUSED_BODIES = {
    "hidden states": {"return_hidden_states": True},  # SGLang's own refusal, unless started for them
    "custom_logit_processor": {"custom_logit_processor": json.dumps({"callable": PROCESSOR.hex()})},
    "lora": {"lora_path": "adapter"},
}
REFUSED_OPENAI = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_new_tokens": {"min_tokens": 4},
    "sampling_seed": {"seed": 7, "temperature": 0.8},
    "hidden states": {"return_hidden_states": True},
}


MESSAGES = [{"role": "user", "content": "Hello"}]


def assert_refused(response, words):
    """Status 400; in a stream, which has its status before a word of it is said, an error event of code 400."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in response.text.splitlines() if line]
        assert len(lines) == 2, response.text  # nothing is served before the error
        assert lines[1] == "data: [DONE]"
        assert json.loads(lines[0].removeprefix("data: "))["error"]["code"] == 400
    else:
        assert response.status_code == 400, response.text
    assert words in response.text


def check_refused(server, case, path, body, words):
    """Plain and streamed; the next request is served."""
    for stream in (False, True):
        assert_refused(server.post(path, body | {"stream": stream}), words)
        assert server.generate(case.prompt, 16)["output_ids"] == case.answer[:16]


@on("dense")
@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_BODIES])
def test_refused_by_generate(served, name):
    server, texts = served
    case = texts.cases[6]
    params = {"temperature": 0, "max_new_tokens": 16} | REFUSED.get(name, {})
    body = {"input_ids": case.prompt, "sampling_params": params} | REFUSED_BODIES.get(name, {})
    check_refused(server, case, "/generate", body, name)


@on("dense")
@pytest.mark.parametrize("name", REFUSED_OPENAI)
def test_refused_by_the_openai_endpoints(served, name):
    server, texts = served
    case = texts.cases[6]
    body = {"model": "tiny", "temperature": 0, "max_tokens": 16} | REFUSED_OPENAI[name]
    check_refused(server, case, "/v1/completions", body | {"prompt": case.prompt}, name)
    check_refused(server, case, "/v1/chat/completions", body | {"messages": MESSAGES}, name)


@on("dense")
def test_refused_beside_running_requests(served):
    server, texts = served
    case = texts.cases[7]
    wrong = {"input_ids": case.prompt, "sampling_params": {"max_new_tokens": 16, "presence_penalty": 1.0}}

    def one(i):
        return server.post("/generate", wrong) if i % 2 else server.generate(case.prompt, 64)

    outputs = server.in_parallel(one, range(8), 4)
    for i, output in enumerate(outputs):
        if i % 2:
            assert_refused(output, "presence_penalty")
        else:
            assert output["output_ids"] == case.answer


# Each of the first five ends the scheduler of a stock SGLang, and with it every request. Prompts are added below.
MALFORMED_OPTIONS = {
    "top_k": ({"top_k": 2**40, "temperature": 0.8}, "top_k: found 1099511627776, want at most 2147483647"),
    "stop_regex": ({"stop_regex": ["a", "(["]}, "stop_regex: found '([' (unterminated character set at position 1)"),
}
MALFORMED_PROMPTS = {
    "empty": ("", "prompt: found no tokens"),
    "one empty": (["Hello", ""], "prompt: found no tokens"),
    "foreign id": ([1, VOCAB], f"prompt: found the token id {VOCAB}, want 0..{VOCAB - 1}"),
    "negative id": ([1, -5], "prompt: found the token id -5"),
    "one foreign id": ([[1, 2], [1, 10**9]], "prompt: found the token id 1000000000"),
}
MALFORMED_BODIES = {
    "many logprobs": ({"return_logprob": True, "top_logprobs_num": VOCAB + 1}, f"found {VOCAB + 1}, want 0..{VOCAB}"),
    "unasked logprobs": ({"top_logprobs_num": -1}, f"found -1, want 0..{VOCAB}"),
    "start": ({"return_logprob": True, "logprob_start_len": -5}, "logprob_start_len: found -5, want 0 or more"),
    "list": ({"sampling_params": [{}]}, "sampling_params: found a list of 1, want one object"),
    "short list": (
        {"input_ids": [[1], [2]], "sampling_params": [{}]},
        "found a list of 1, want one object, or a list of 2",
    ),
    "null": ({"sampling_params": {"n": None}}, "a field is not of the documented type"),
}


@on("dense")
@pytest.mark.parametrize("name", MALFORMED_PROMPTS)
def test_malformed_prompts(served, name):
    server, texts = served
    case = texts.cases[6]
    prompt, words = MALFORMED_PROMPTS[name]
    text = isinstance(prompt, str) or isinstance(prompt[0], str)
    check_refused(server, case, "/generate", {"text" if text else "input_ids": prompt}, words)
    if prompt:  # SGLang's own refusal
        check_refused(server, case, "/v1/completions", {"model": "tiny", "prompt": prompt}, words)


@on("dense")
@pytest.mark.parametrize("name", MALFORMED_OPTIONS)
def test_malformed_options(served, name):
    server, texts = served
    case = texts.cases[6]
    option, words = MALFORMED_OPTIONS[name]
    check_refused(server, case, "/generate", {"input_ids": case.prompt, "sampling_params": option}, words)
    batch = {"input_ids": [case.prompt] * 2, "sampling_params": [{}, option]}
    check_refused(server, case, "/generate", batch, words)
    check_refused(server, case, "/v1/completions", {"model": "tiny", "prompt": case.prompt} | option, words)
    check_refused(server, case, "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES} | option, words)


@on("dense")
@pytest.mark.parametrize("name", MALFORMED_BODIES)
def test_malformed_bodies(served, name):
    server, texts = served
    case = texts.cases[6]
    body, words = MALFORMED_BODIES[name]
    check_refused(server, case, "/generate", {"input_ids": case.prompt} | body, words)


@on("dense")
def test_malformed_openai_bodies(served):
    server, texts = served
    case = texts.cases[6]
    words = f"found {VOCAB + 1}, want 0..{VOCAB}"
    check_refused(
        server, case, "/v1/completions", {"model": "tiny", "prompt": case.prompt, "logprobs": VOCAB + 1}, words
    )
    chat = {"model": "tiny", "messages": MESSAGES}
    check_refused(server, case, "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": VOCAB + 1}, words)
    check_refused(server, case, "/v1/chat/completions", chat | {"response_format": "x"}, "want an object as documented")
    assert_refused(server.post("/v1/chat/completions", [1]), "found a list, want an object as documented")
    assert server.generate(case.prompt, 16)["output_ids"] == case.answer[:16]


@on("dense")
def test_limits_are_served(served):
    server, texts = served
    case = texts.cases[6]
    output = server.generate(
        case.prompt, 16, return_logprob=True, top_logprobs_num=VOCAB, sampling={"top_k": 2**31 - 1, "stop_regex": "x+y"}
    )
    assert output["output_ids"] == case.answer[:16]
    assert {len(tops) for tops in output["meta_info"]["output_top_logprobs"]} == {VOCAB}
    server.generate([0, VOCAB - 1], 4)


def test_several_tokenizers(tmp_path):
    """They load no plugins: the scheduler refuses alone, also beside a request that wants logprobs."""
    texts = pair("dense", shared=4)
    case = texts.cases[6]
    options = ("--tokenizer-worker-num", "2")
    patience = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "200"}  # 5 s by default: a busy machine starts none
    with Server(tmp_path, texts.target, texts.drafter, *options, env=patience) as server:

        def one(i):
            if i % 2:
                return server.generate(case.prompt, 64, return_logprob=True, top_logprobs_num=2)
            body = {"input_ids": case.prompt} | bodies[i // 2 % len(bodies)][0]
            return server.post("/generate", body)

        bodies = [
            ({"sampling_params": MALFORMED_OPTIONS["top_k"][0]}, "top_k: found"),
            ({"input_ids": [1, VOCAB]}, "prompt: found the token id"),
            ({"return_logprob": True, "top_logprobs_num": VOCAB + 1}, "top_logprobs_num"),
            ({"input_ids": None, "text": ""}, "prompt: found no tokens"),
            ({"sampling_params": {"presence_penalty": 1.0}}, "presence_penalty"),
        ]
        for i, output in enumerate(server.in_parallel(one, range(20), 4)):
            if i % 2:
                assert output["output_ids"] == case.answer
            else:
                assert_refused(output, bodies[i // 2 % len(bodies)][1])
        server.assert_healthy()
