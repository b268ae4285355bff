"""A graph that would let steps run eagerly is an error at start-up; a chain never replays a tree's graph."""

from __future__ import annotations

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.config import TreeConfig
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402

from sglang_dflash.graph_runner import DDTreeCudaGraphRunner, check_graph  # noqa: E402
from sglang_dflash.verify_input import DDTreeVerifyInput  # noqa: E402

TREE = TreeConfig(block_size=8, topk=4, budget=20)


def runner(width: int = 21, max_bs: int = 8) -> Any:
    return SimpleNamespace(captured_req_width=width, max_bs=max_bs)


def test_a_fitting_graph_passes() -> None:
    check_graph(runner(), name="verify", width=21, max_requests=8)
    check_graph(runner(max_bs=16), name="verify", width=21, max_requests=8)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, ("verify graph: found none", "--mem-fraction-static", "--disable-cuda-graph")),
        (runner(width=8), ("verify graph: found width 8, want 21",)),
        (
            runner(max_bs=7),
            ("up to batch 7, want 8", "--cuda-graph-max-bs-decode 8", "--max-running-requests 7"),
        ),
    ],
)
def test_a_graph_that_would_fall_back_is_refused(found: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError) as error:
        check_graph(found, name="verify", width=21, max_requests=8)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def tree_runner(monkeypatch: pytest.MonkeyPatch) -> DDTreeCudaGraphRunner:
    monkeypatch.setattr(TreeConfig, "published", classmethod(lambda cls: TREE))
    monkeypatch.setattr(DecodeCudaGraphRunner, "can_run_graph", lambda self, batch: batch.fits)
    made = object.__new__(DDTreeCudaGraphRunner)
    made.buffers = SimpleNamespace(custom_mask=torch.ones(4, dtype=torch.bool))
    return made


def test_the_graph_is_captured_with_a_mask(tree_runner: DDTreeCudaGraphRunner) -> None:
    captured = tree_runner.get_spec_info(num_tokens=42)
    assert captured.custom_mask is tree_runner.buffers.custom_mask
    assert captured.draft_token_num == 21
    assert captured.tree_topk == -1
    assert captured.max_tree_depth == 8


def test_only_trees_replay_it(tree_runner: DDTreeCudaGraphRunner) -> None:
    tree, chain = DDTreeVerifyInput.dummy(TREE, None), SimpleNamespace()
    for spec_info, fits, wanted in ((tree, True, True), (tree, False, False), (chain, True, False)):
        assert tree_runner.can_run_graph(SimpleNamespace(spec_info=spec_info, fits=fits)) is wanted
