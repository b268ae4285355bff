"""Stock SGLang serving on the CPU, no trees: greedy text equals transformers', samples follow its
distribution."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import pair, random_ids
from harness import Server

HYBRID = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
HYBRID += ("--max-mamba-cache-size", "40")
STOCK = {"SGLANG_DFLASH": "off"}


@pytest.fixture(scope="module")
def hybrid():
    """Eight prompts of 1 to 150 tokens, some past the 64-token chunks in which prefixes are cached."""
    everything = pair("hybrid", count=16, new_tokens=40)
    return replace(everything, cases=everything.cases[1::2])


@pytest.fixture(scope="module")
def plain(hybrid, tmp_path_factory):
    with Server(tmp_path_factory.mktemp("plain"), hybrid.target, None, *HYBRID, env=STOCK) as server:
        yield server
        server.assert_healthy()


def check_greedy(server, pair, at_once):
    jobs = [(case.prompt, len(case.answer)) for case in pair.cases]
    for case, answer in zip(pair.cases, server.generate_all(jobs, at_once), strict=True):
        assert answer["output_ids"] == case.answer, f"prompt of {len(case.prompt)} tokens"


def test_greedy_alone_and_batched_and_from_the_prefix_cache(plain, hybrid):
    check_greedy(plain, hybrid, at_once=1)
    check_greedy(plain, hybrid, at_once=4)
    long = max(hybrid.cases, key=lambda case: len(case.prompt))
    again = plain.generate(long.prompt, len(long.answer))
    assert again["meta_info"]["cached_tokens"] >= 64
    assert again["output_ids"] == long.answer


def first_token_probabilities(server, prompt):
    """Temperature-1 distribution of the next token, from the server's own log-probabilities of every
    token."""
    answer = server.generate(prompt, 1, return_logprob=True, top_logprobs_num=512)
    (top,) = answer["meta_info"]["output_top_logprobs"]
    logits = torch.full((512,), -math.inf, dtype=torch.float64)
    for logprob, token, _ in top:
        logits[token] = logprob
    return logits


def filtered(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """The definition: scale, then keep tokens among the k best, within mass p, and at least min_p of the
    best."""
    p = torch.softmax(logits / temperature, 0)
    ranked = p.sort(descending=True)
    before = ranked.values.cumsum(0) - ranked.values
    keep = (before <= top_p) & (ranked.values >= min_p * ranked.values[0])
    if top_k > 0:
        keep &= torch.arange(512) < top_k
    kept = torch.zeros_like(p)
    kept[ranked.indices[keep]] = ranked.values[keep]
    return kept / kept.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_samples_follow_the_distribution(plain, sampling):
    prompt = random_ids(24, seed=5)
    expected = filtered(first_token_probabilities(plain, prompt), **sampling)
    params = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True} | sampling
    draws = 600

    def draw(_):
        body = {"input_ids": [prompt] * 50, "sampling_params": params}
        return [answer["output_ids"][0] for answer in plain.post("/generate", body).json()]

    with ThreadPoolExecutor(2) as pool:
        counts = Counter(token for batch in pool.map(draw, range(draws // 50)) for token in batch)

    assert sum(counts.values()) == draws
    assert not [token for token in counts if expected[token] == 0]
    # Pearson's statistic over tokens expected at least 5 times, the rest as one cell; 6 sigma above its mean.
    big = (expected * draws >= 5).nonzero().flatten().tolist()
    cells = [(counts[t], float(expected[t]) * draws) for t in big]
    rest = draws - sum(e for _, e in cells)
    if rest > 1:
        cells.append((draws - sum(c for c, _ in cells), rest))
    freedom = len(cells) - 1
    assert freedom >= 2, "a distribution too narrow to test anything"
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.fixture(scope="module")
def seeded_chain(hybrid, tmp_path_factory):
    """Stock chain DFLASH on the hybrid, with deterministic inference: both must start and serve on a CPU."""
    options = (*HYBRID, "--enable-deterministic-inference")
    with Server(tmp_path_factory.mktemp("chain"), hybrid.target, hybrid.drafter, *options, env=STOCK) as server:
        yield server
        server.assert_healthy()


def test_chain_dflash_is_exact(seeded_chain, hybrid):
    check_greedy(seeded_chain, hybrid, at_once=1)
    check_greedy(seeded_chain, hybrid, at_once=4)
    answer = seeded_chain.generate(hybrid.cases[0].prompt, 16)
    assert answer["meta_info"]["spec_verify_ct"] > 0
