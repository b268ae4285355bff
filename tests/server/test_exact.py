"""Text equals transformers' greedy text, token for token, with trees that really branch."""

from __future__ import annotations

from collections import Counter

import pytest
from cases import pair
from harness import Server

BLOCK = 8
CONFIGS = {
    "hybrid": ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64",
               "--max-mamba-cache-size", "60"),
    "dense": (),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CONFIGS))
def served(request, tmp_path_factory):
    texts = pair(request.param, block_size=BLOCK, shared=4)
    work = tmp_path_factory.mktemp(request.param)
    options = ("--speculative-ddtree-budget", "24", *CONFIGS[request.param])
    with Server(work, texts.target, texts.drafter, *options) as server:
        server.control(truths=texts.truths)
        yield server, texts
        server.assert_healthy()


def answers(server, cases, at_once):
    return server.generate_all([(c.prompt, len(c.answer)) for c in cases], at_once)


def assert_equal(outputs, cases):
    for output, case in zip(outputs, cases, strict=True):
        assert output["output_ids"] == case.answer, f"prompt of {len(case.prompt)} tokens"


def test_one_at_a_time_and_trees_branch(served):
    server, texts = served
    server.start_trace()
    assert_equal(answers(server, texts.cases[:16], 1), texts.cases[:16])
    steps = server.trace()
    lengths = Counter(len(s["path"]) for s in steps)
    assert set(lengths) == set(range(1, BLOCK + 1)), lengths
    branching = sum(max(Counter(p for p in s["parents"] if p >= 0).values()) > 1 for s in steps)
    assert branching > 0.9 * len(steps)
    assert sum(s["path"] != list(range(len(s["path"]))) for s in steps) > 0.3 * len(steps)  # real compaction


def test_four_at_once_with_different_trees(served):
    server, texts = served
    server.start_trace()
    assert_equal(answers(server, texts.cases[:16], 4), texts.cases[:16])
    steps = server.trace()
    assert max(s["batch"] for s in steps) == 4
    shapes = {tuple(s["parents"]) for s in steps if s["batch"] == 4}
    assert len(shapes) > 4


def test_full_mask_mode(served):
    server, texts = served
    server.control(full_mask=True)
    assert_equal(answers(server, texts.cases[:6], 3), texts.cases[:6])
    server.control(full_mask=False)


def test_radix_hits(served):
    server, texts = served
    shared = texts.cases[16:]
    assert_equal(answers(server, shared, 1), shared)
    outputs = answers(server, shared, 4)
    assert_equal(outputs, shared)
    assert all(o["meta_info"]["cached_tokens"] >= 64 for o in outputs)
    for case in texts.cases[10:14]:
        # continue inside a text that tree decoding committed
        for cut in (17, 40):
            output = server.generate(case.prompt + case.answer[:cut], len(case.answer) - cut)
            assert output["output_ids"] == case.answer[cut:]
