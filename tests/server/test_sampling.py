"""Sampled text of a tree server: its distribution is the target's, and a seed gives plain decoding's text."""

from __future__ import annotations

from collections import Counter

import pytest
from cases import pair
from configs import SEEDED, on
from harness import Server
from statistics_checks import excess

DRAWS, BATCH = 3000, 100


@on("dense")
def test_joint_distribution(served, forward):
    server, texts = served
    case = texts.cases[8]
    length, sampling = 3, {"temperature": 1.0, "top_k": 3}
    wanted = forward.joint(texts.target, case.prompt, length, **sampling)
    params = sampling | {"max_new_tokens": length, "ignore_eos": True}
    server.control(miss=0.01)
    server.start_trace()

    def draw(_):
        body = {"input_ids": [case.prompt] * BATCH, "sampling_params": params}
        return [tuple(answer["output_ids"]) for answer in server.post("/generate", body).json()]

    batches = server.in_parallel(draw, range(DRAWS // BATCH), 2)
    counts = Counter(text for batch in batches for text in batch)
    assert sum(counts.values()) == DRAWS
    assert sum(len(step["path"]) > 1 for step in server.trace()) > DRAWS / 10  # not only roots were sampled
    assert excess(counts, wanted) < 6


SAMPLINGS = (
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
)
SEEDS = (0, 1, 123456789)


@pytest.fixture(scope="module")
def seeded_texts(tmp_path_factory):
    """(setting, seed, prompt) -> text: of a server without speculation, and of a tree server alone and in batches."""
    texts = pair("dense", shared=4)
    prompts = [texts.cases[i].prompt for i in (2, 7, 9)]

    def ask(server, at_once):
        found = {}
        # One setting at a time: in a batch with top-k requests, SGLang draws the others with other noise as well.
        for sampling in SAMPLINGS:
            jobs = [(seed, prompt) for seed in SEEDS for prompt in prompts]
            answers = server.in_parallel(
                lambda job, s=sampling: server.generate(job[1], 40, sampling=s | {"sampling_seed": job[0]}),
                jobs,
                at_once,
            )
            for (seed, prompt), answer in zip(jobs, answers, strict=True):
                found[str(sampling), seed, tuple(prompt)] = tuple(answer["output_ids"])
        return found

    with Server(tmp_path_factory.mktemp("plain"), texts.target, None, *SEEDED) as server:
        plain = ask(server, 4)
        server.assert_healthy()
    tree = ("--speculative-ddtree-budget", "24")
    with Server(tmp_path_factory.mktemp("tree"), texts.target, texts.drafter, *SEEDED, *tree) as server:
        server.control(truths=texts.truths)
        alone, batched = ask(server, 1), ask(server, 4)
        # SGLang prefills a refused request too, and its seeded sampler asserts on min_p: the server must outlive it.
        refused = {"temperature": 1.0, "min_p": 0.2, "max_new_tokens": 4}
        answer = server.post("/generate", {"input_ids": prompts[0], "sampling_params": refused})
        assert answer.status_code == 400
        assert "min_p" in answer.text
        assert server.generate(prompts[0], 8)["output_ids"] == texts.cases[2].answer[:8]
        server.assert_healthy()
    return plain, alone, batched


def test_a_seed_gives_the_text_of_plain_decoding(seeded_texts):
    plain, alone, _ = seeded_texts
    assert alone == plain


def test_a_seed_gives_the_same_text_in_a_batch(seeded_texts):
    _, alone, batched = seeded_texts
    assert batched == alone


def test_seeds_differ(seeded_texts):
    plain, _, _ = seeded_texts
    assert len(set(plain.values())) == len(plain)
