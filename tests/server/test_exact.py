"""Text equals transformers' greedy text, token for token, with trees that really branch."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter

import pytest
import torch
from configs import on

BLOCK = 8
pytestmark = on("hybrid", "dense")


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


@pytest.mark.parametrize("full_mask", [False, True], ids=["qlen_only", "full_mask"])
def test_every_node_has_the_logits_of_its_root_path(served, forward, tmp_path, full_mask):
    server, texts = served
    server.control(full_mask=full_mask, logits=str(tmp_path))
    cases = texts.cases[:16:4]
    assert_equal(answers(server, cases, 2), cases)
    server.control(logits=None)
    records = [torch.load(file) for file in sorted(tmp_path.glob("*.pt"), key=lambda f: int(f.stem))][::5]
    chains, found, depths = [], [], Counter()
    for record in records:
        text = next(c.text for c in cases if c.prompt == record["prompt"])
        committed = text[: record["prefix"] + 1]
        if len(committed) <= record["prefix"]:
            continue  # the step that overlap scheduling starts past the last token
        assert record["tokens"][0] == committed[-1]
        paths = {0: committed}
        for row, parent in enumerate(record["parents"]):
            if parent >= 0:
                paths[row] = paths[parent] + [record["tokens"][row]]
        for row, path in paths.items():
            chains.append(path)
            found.append(record["logits"][row])
            depths[len(path) - len(committed)] += 1
    assert len(chains) > 150
    assert max(depths) > 3
    assert depths[1] > 1.5 * depths[0]  # siblings
    wanted = torch.cat(forward.logits(texts.target, chains, dtype="float64"))
    error = (torch.stack(found) - wanted).abs().amax(-1)
    assert wanted.std() > 2  # so far off is a wrong path
    assert error.quantile(0.9) < 1e-3
    # At a few nodes the hybrid normalises almost nothing: transformers in fp32 is as far from float64 there.
    assert error.max() < (1e-3 if texts.target.name == "dense" else 3e-2)


@pytest.mark.parametrize("full_mask", [False, True], ids=["qlen_only", "full_mask"])
def test_a_node_is_its_root_path_and_nothing_else(served, tmp_path, full_mask):
    """The server's own pass over the root path as a chain gives the node's logits; a changed sibling moves nothing."""
    server, texts = served
    file = tmp_path / "steps.jsonl"
    server.control(full_mask=full_mask, steps=str(file))
    answers(server, [dataclasses.replace(c, answer=c.answer[:12]) for c in texts.cases[:8]], 4)
    server.control(full_mask=False, steps=None)
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(steps) > 8
    assert max(s["same"] for s in steps) < 1e-4
    assert statistics.median(s["other"] for s in steps) > 1  # what another node's logits are away
    assert max(s["others"] for s in steps) == max(s["repeat"] for s in steps) == 0
    assert min(s["leaf"] for s in steps) > 1
