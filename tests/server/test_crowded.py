"""Small pools and a small context: requests reach the limit inside a block, are retracted, prefill in chunks."""

from __future__ import annotations

import pytest
from cases import limited_cases
from configs import CONTEXT, on

crowded = on("crowded-dense-page-16", "crowded-no-buffer", "crowded-lazy")
WIDTH = 32
LIMIT = CONTEXT - 2  # SGLang cuts max_new_tokens there, with or without speculation


@pytest.fixture
def to_the_limit(served):
    server, texts = served
    cases = limited_cases(texts.target.name, CONTEXT, count=16)
    server.control(truths=[c.text for c in cases])
    return cases


def check(server, cases, at_once):
    """Every answer is transformers' up to the context limit."""
    server.start_trace()
    outputs = server.generate_all([(c.prompt, CONTEXT - len(c.prompt)) for c in cases], at_once)
    for output, case in zip(outputs, cases, strict=True):
        length = LIMIT - len(case.prompt)
        assert output["output_ids"] == case.answer[:length], f"prompt of {len(case.prompt)} tokens"
        assert output["meta_info"]["completion_tokens"] == length
        assert output["meta_info"]["finish_reason"]["type"] == "length"
    return server.trace()


@crowded
def test_one_at_a_time(served, to_the_limit):
    server, _ = served
    steps = check(server, to_the_limit[:8], 1)
    assert max(len(step["path"]) for step in steps) > 8
    # Windows and accepted paths reached past the context.
    assert sum(step["prefix"] + WIDTH > CONTEXT for step in steps) >= 8
    assert any(step["prefix"] + len(step["path"]) >= LIMIT for step in steps)


@crowded
@pytest.mark.parametrize("at_once", [4, 8])
def test_many_at_once(served, to_the_limit, at_once):
    server, _ = served
    server.flush()
    # The shortest first: eight of the longest do not fit together.
    steps = check(server, sorted(to_the_limit, key=lambda case: len(case.prompt)), at_once)
    assert max(step["batch"] for step in steps) >= at_once - 1  # the pool may hold one of eight back


@crowded
def test_retraction(served, to_the_limit):
    server, _ = served
    for _ in range(5):
        server.flush()
        check(server, to_the_limit, 8)
        if "Retract requests" in server.log.read_text():
            break
    assert "Retract requests" in server.log.read_text()


@crowded
def test_chunked_prefill(served, to_the_limit):
    server, _ = served
    server.flush()
    before = server.log.read_text().count("Prefill batch")
    longest = [c for c in to_the_limit if len(c.prompt) > 3 * 64][:2] or to_the_limit[-2:]
    check(server, longest, 2)
    # Chunks of 64: more prefill batches than requests.
    assert server.log.read_text().count("Prefill batch") - before > len(longest)


@crowded
def test_eight_short_requests(served):
    server, texts = served
    server.flush()
    cases = [c for c in texts.cases if len(c.prompt) < 70][:8] * 2
    largest = 0
    for _ in range(6):  # whether all eight meet in one step is the machine's doing
        server.start_trace()
        outputs = server.generate_all([(c.prompt, 64) for c in cases], 8)
        assert [o["output_ids"] for o in outputs] == [c.answer for c in cases]
        largest = max(largest, *(step["batch"] for step in server.trace()))
        if largest == 8:
            break
    assert largest == 8


@crowded
def test_short_requests_beside_long_ones(served, to_the_limit):
    server, texts = served
    short = [c for c in texts.cases[:16] if len(c.prompt) < 60][:6]
    server.control(truths=[c.text for c in [*to_the_limit, *short]])
    jobs = []
    for long, brief in zip(to_the_limit, short, strict=False):
        jobs += [(long.prompt, LIMIT - len(long.prompt)), (brief.prompt, 30)]
    outputs = server.generate_all(jobs, 8)
    for output, (prompt, length) in zip(outputs, jobs, strict=True):
        case = next(c for c in [*to_the_limit, *short] if c.prompt == prompt)
        assert output["output_ids"] == case.answer[:length]


@on("crowded-no-buffer")  # started to return hidden states, and without overlap: SGLang itself does not refuse
def test_hidden_states_are_refused(served, to_the_limit):
    server, _ = served
    case = to_the_limit[0]
    body = {"input_ids": case.prompt, "sampling_params": {"max_new_tokens": 4}, "return_hidden_states": True}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert "return_hidden_states" in answer.text
    assert server.generate(case.prompt, 8)["output_ids"] == case.answer[:8]
