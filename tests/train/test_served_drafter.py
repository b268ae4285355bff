"""The trained module against the served one: a real server's drafts of a text, and the training blocks of that text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from cases import model, random_ids
from harness import Server
from safetensors import safe_open

from sglang_dflash.capture import FOLDER, PREFIX, file_stem
from sglang_dflash.train.attention import Layout, make_masks
from sglang_dflash.train.blocks import document_positions, make_blocks
from sglang_dflash.train.drafter_model import Drafter
from sglang_dflash.train.head import top_candidates
from sglang_dflash.train.target_weights import load_target_weights

WINDOW, TOP = 24, 8
OPTIONS = ("--disable-radix-cache", "--chunked-prefill-size", "64", "--disable-prefill-cuda-graph",
           "--speculative-ddtree-budget", "24")  # fmt: skip
PROMPTS = [random_ids(n, 8000 + n) for n in (3, 17, 65, 150)]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[tuple[Any, ...]]]:
    """Target, drafter, and for each text its tokens, its captured features, and the server's steps on it."""
    target, folder = model("dense"), tmp_path_factory.mktemp("captured")
    drafter = models.make_drafter(tmp_path_factory.mktemp("sliding"), target, num_layers=3, sliding_window=WINDOW)
    texts = []
    with Server(tmp_path_factory.mktemp("server"), target, drafter, *OPTIONS, env={FOLDER: str(folder)}) as server:
        for i, prompt in enumerate(PROMPTS):
            server.start_trace()
            answer = server.generate(prompt, NEW_TOKENS)["output_ids"]
            trace = server.trace()
            text = prompt + answer
            server.generate(text, 1, rid=f"{PREFIX}{i}")
            texts.append((text, read(folder / f"{file_stem(f'{PREFIX}{i}')}.safetensors"), trace))
        server.assert_healthy()
    return target, drafter, texts


def read(file: Path) -> torch.Tensor:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.05)
    with safe_open(str(file), framework="pt") as opened:
        return opened.get_tensor("features")


@torch.no_grad()
def draft(target: Path, drafter: Path, text: list[int], features: torch.Tensor, anchors: list[int], **changes: Any):
    """Ids and log-probs ``[N, B-1, 8]`` of the training blocks at ``anchors``."""
    module, weights = Drafter.from_dir(drafter).eval(), load_target_weights(target)
    spec = module.spec
    tokens = torch.tensor([text])
    documents = torch.zeros_like(tokens)
    at = torch.tensor([anchors])
    blocks = make_blocks(tokens, torch.ones_like(tokens).bool(), documents, at, spec.block_size, spec.mask_token_id)
    flat = blocks.input_ids.view(1, -1)
    layout = Layout(at + changes.get("shift", 0), documents, spec.block_size)
    hidden = module(
        features.unsqueeze(0),
        weights.embed(flat),
        blocks.positions.view(1, -1) + changes.get("late", 0),
        document_positions(documents),
        make_masks(layout, module.layer_types, changes.get("window", spec.sliding_window)),
    )
    slots = hidden.view(len(anchors), spec.block_size, -1)[:, 1:].flatten(0, 1)
    ids, log_probs = top_candidates(slots, weights.lm_head, TOP)
    return ids.view(len(anchors), -1, TOP), log_probs.view(len(anchors), -1, TOP)


def errors(steps: Any, **changes: Any) -> torch.Tensor:
    """Largest log-prob difference of each of the server's drafts from its training block."""
    target, drafter, texts = steps
    worst = []
    for text, features, trace in texts:
        assert features.shape[0] == len(text)
        assert len(trace) >= 4
        anchors = [step["prefix"] for step in trace if step["prefix"] < len(text)]
        assert anchors[0] == trace[0]["prompt"]
        _, log_probs = draft(target, drafter, text, features, anchors, **changes)
        for step, got in zip(trace, log_probs, strict=False):
            wanted = torch.tensor(step["raw_log_probs"]).view(-1, TOP)
            worst.append((got - wanted).abs().max())
    return torch.stack(worst)


def test_invariant_19_the_servers_draft_at_length_s_is_the_training_block_at_s(steps: Any) -> None:
    found = errors(steps)
    assert len(found) >= 20
    assert found.max() < 1e-3, found
    target, drafter, texts = steps
    for text, features, trace in texts:
        anchors = [step["prefix"] for step in trace if step["prefix"] < len(text)]
        ids, log_probs = draft(target, drafter, text, features, anchors)
        firm = log_probs[..., 0] - log_probs[..., 1] > 2e-3
        wanted = torch.tensor([step["raw_ids"] for step in trace[: len(anchors)]])
        assert firm.float().mean() > 0.8
        assert torch.equal(ids[..., 0][firm], wanted[firm])


@pytest.mark.parametrize(
    "mistake",
    [{"window": WINDOW - 1}, {"window": WINDOW + 1}, {"shift": 1}, {"shift": -1}, {"late": 1}],
    ids=["window-1", "window+1", "sees its anchor", "misses the last token", "position+1"],
)
def test_invariant_19_a_block_that_is_off_by_one_is_not_the_servers(steps: Any, mistake: dict[str, int]) -> None:
    assert errors(steps, **mistake).median() > 1e-2
