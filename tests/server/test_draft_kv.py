"""The drafter's KV after many tree steps is that of a fresh prefill; text equality cannot see a wrong one."""

from __future__ import annotations

import pytest
import torch
from configs import on

TOLERANCE = 1e-4


def draft_kv_errors(server, cases):
    """A step each: the largest difference of its raw draft log-probs from those right after prefilling as much text."""
    server.flush()
    server.start_trace()
    for case in cases:
        server.generate(case.prompt, len(case.answer))
    errors = []
    for case in cases:
        steps = [s for s in server.trace() if s["prompt"] == len(case.prompt) and s["prefix"] > s["prompt"]]
        steps = [s for s in steps if s["prefix"] < len(case.text) - 1]
        for step in steps[2::2]:  # several blocks were committed before it
            fresh = first_step(server, case.text[: step["prefix"]])
            assert fresh["prefix"] == step["prefix"]
            difference = torch.tensor(fresh["raw_log_probs"]) - torch.tensor(step["raw_log_probs"])
            errors.append(float(difference.abs().max()))
    assert len(errors) >= 10
    return torch.tensor(errors)


def assert_same_draft_kv(server, cases):
    errors = draft_kv_errors(server, cases)
    # Prefill and verify round differently; where a hybrid target amplifies that, its features differ by more.
    assert errors.quantile(0.8) < TOLERANCE, errors
    assert errors.max() < 10 * TOLERANCE, errors


def first_step(server, prompt):
    trace = server.trace_file.with_suffix(".fresh")
    trace.unlink(missing_ok=True)
    server.flush()
    server.control(trace=str(trace))
    server.generate(prompt, 2)
    server.control(trace=None)
    return server.read(trace)[0]


def wrong_texts(server, cases):
    """How many answers differ from transformers' text, half of them from the prefix cache."""
    server.flush()
    wrong = 0
    for case in cases:
        wrong += server.generate(case.prompt, len(case.answer))["output_ids"] != case.answer
        half = len(case.answer) // 2
        again = server.generate(case.prompt + case.answer[:half], len(case.answer) - half)
        wrong += again["output_ids"] != case.answer[half:]
    return wrong


def some(texts):
    return texts.cases[3:13:3]


@on("hybrid", "dense")
def test_draft_kv_equals_a_fresh_prefill(served):
    server, texts = served
    assert_same_draft_kv(server, some(texts))


def check_text_shows(served, mistake):
    server, texts = served
    assert wrong_texts(server, some(texts)) == 0
    server.control(**{"break": mistake})
    assert wrong_texts(server, some(texts)) > 0
    server.control(**{"break": None})
    assert wrong_texts(server, some(texts)) == 0


@on("hybrid", "dense")
@pytest.mark.parametrize("mistake", ["nocompact", "chainpos", "chainmask"])
def test_mistakes_that_the_text_shows(served, mistake):
    check_text_shows(served, mistake)


@on("hybrid")  # a dense target has no recurrent state
def test_a_chain_commit_of_the_recurrent_state_shows(served):
    check_text_shows(served, "chaincommit")


@on("hybrid", "dense")
@pytest.mark.parametrize("mistake", ["hidden", "draftpos"])
def test_mistakes_that_only_the_draft_kv_shows(served, mistake):
    server, texts = served
    server.control(**{"break": mistake})
    assert wrong_texts(server, some(texts)) == 0
    assert draft_kv_errors(server, some(texts)).median() > 100 * TOLERANCE
    server.control(**{"break": None})
    assert_same_draft_kv(server, some(texts))
