"""Requests that end inside an accepted path: length, stop tokens, stop strings, end of text, hang-ups."""

from __future__ import annotations

import threading

import models
from cases import MARGIN, random_ids
from configs import on
from reference import greedy

pytestmark = on("hybrid", "dense")


def long_path_ends(server, cases):
    """For each case, positions of its answer that are not the last of the path that committed them."""
    inside = {}
    for step in server.trace():
        case = next(c for c in cases if len(c.prompt) == step["prompt"])
        first = step["prefix"] + 1 - step["prompt"]  # the answer's index of the step's first token
        found = inside.setdefault(len(case.prompt), set())
        found.update(range(first, first + len(step["path"]) - 1))
    return inside


def test_length_limit(served):
    server, texts = served
    case = texts.cases[8]
    server.start_trace()
    for length in range(1, 25):
        output = server.generate(case.prompt, length)
        assert output["output_ids"] == case.answer[:length]
        assert output["meta_info"]["completion_tokens"] == length
        assert output["meta_info"]["finish_reason"] == {"type": "length", "length": length}
    # Where a path ran past the limit, its end was cut off.
    assert sum(step["prefix"] + len(step["path"]) > step["prompt"] for step in server.trace()) > 24


def test_stop_tokens(served):
    server, texts = served
    cases = texts.cases[:16]
    server.start_trace()
    ended = []
    for case in cases:
        for position in (5, 22, 43):
            stop = case.answer[position]
            end = next(i for i, token in enumerate(case.answer) if token in (stop, models.EOS))
            sampling = {"stop_token_ids": [stop], "ignore_eos": False}
            output = server.generate(case.prompt, 64, sampling=sampling)
            assert output["output_ids"] == case.answer[: end + 1]
            assert output["meta_info"]["completion_tokens"] == end + 1
            matched = {"type": "stop", "matched": case.answer[end]}
            assert output["meta_info"]["finish_reason"] == matched
            ended.append((len(case.prompt), end))
    inside = long_path_ends(server, cases)
    assert sum(end in inside.get(prompt, ()) for prompt, end in ended) > 10


def test_stop_strings(served, tokenizer):
    server, texts = served
    cases = texts.cases[:16]
    server.start_trace()
    ended = []
    for case in cases:
        for position in (7, 30):
            # Fillers are ASCII tokens of their own, so the stop string is exact whatever bytes surround it.
            end = next((i for i in range(position, 64) if case.answer[i] >= 260), None)
            if end is None:
                continue
            stop = tokenizer.decode(case.answer[end : end + 1])
            first = case.answer.index(case.answer[end])
            output = server.generate(case.prompt, 64, sampling={"stop": stop})
            assert output["text"] == tokenizer.decode(case.answer[:first])
            assert output["meta_info"]["completion_tokens"] == first + 1
            assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            ended.append((len(case.prompt), first))
    inside = long_path_ends(server, cases)
    assert sum(end in inside.get(prompt, ()) for prompt, end in ended) > 5


def test_end_of_text(served):
    server, texts = served
    prompts = [random_ids(3 + i, 7000 + i) for i in range(60)]
    finished = [
        (prompt, text.tokens)
        for prompt, text in zip(prompts, greedy(texts.target, prompts, 64), strict=True)
        if models.EOS in text.tokens[2:60] and text.margin > MARGIN[texts.target.name]
    ]
    assert len(finished) >= 2
    server.control(truths=[prompt + answer for prompt, answer in finished])
    for prompt, answer in finished:
        end = answer.index(models.EOS)
        output = server.generate(prompt, 64, sampling={"ignore_eos": False})
        assert output["output_ids"] == answer[: end + 1]
        assert output["meta_info"]["completion_tokens"] == end + 1
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": models.EOS}
        assert server.generate(prompt, 64)["output_ids"] == answer


def test_clients_that_hang_up(served):
    server, texts = served
    cases = texts.cases[:12]
    kept, jobs = [], [(c.prompt, 64) for c in cases[:6]]
    others = threading.Thread(target=lambda: kept.extend(server.generate_all(jobs, 2)))
    server.start_trace()
    others.start()
    for i, case in enumerate(cases):
        # Long enough that the request cannot end by itself before the server notices.
        params = {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}
        server.abandon({"input_ids": case.prompt, "sampling_params": params}, after_chunks=i % 4)
    others.join()
    assert [o["output_ids"] for o in kept] == [c.answer for c in cases[:6]]
    outputs = server.generate_all([(c.prompt, 64) for c in cases], 4)
    assert [o["output_ids"] for o in outputs] == [c.answer for c in cases]
    server.flush()  # refused while a request is still running
    last = {step["rid"]: step["prefix"] - step["prompt"] for step in server.trace()}
    assert len(last) >= len(jobs) + len(cases) + 6, "too few of the abandoned requests had begun"
    assert max(last.values()) < 500, "an abandoned request ran on"
