"""CUDA graphs of the target's verify pass, captured for a tree."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_dflash.config import TreeConfig
from sglang_dflash.verify_input import DDTreeVerifyInput


class DDTreeCudaGraphRunner(DecodeCudaGraphRunner):
    """Captures with a mask: upstream's DFLASH capture has none, and its graph would verify a tree as a chain."""

    def get_spec_info(self, num_tokens: int) -> DDTreeVerifyInput:
        tree = TreeConfig.published()
        assert tree is not None, "the tree graph runner is installed only where a tree is served"
        return DDTreeVerifyInput.dummy(tree, self.buffers.custom_mask)

    def can_run_graph(self, forward_batch: Any) -> bool:
        # A chain input must never replay a graph captured for trees.
        return isinstance(forward_batch.spec_info, DDTreeVerifyInput) and super().can_run_graph(forward_batch)


def check_graph(runner: Any, *, name: str, width: int, max_requests: int) -> None:
    """Raise RuntimeError when ``runner`` (None: nothing captured) would send steps to the eager path.

    ``can_run_graph`` falls back without a word on another width or a larger batch.
    """
    if runner is None:
        raise RuntimeError(
            f"DDTree {name} graph: found none, want one captured: the GPU had no memory left for it; lower "
            "--mem-fraction-static, or pass --disable-cuda-graph to run eagerly on purpose."
        )
    if runner.captured_req_width != width:
        raise RuntimeError(
            f"DDTree {name} graph: found width {runner.captured_req_width}, want {width}: every step would run "
            "eagerly; report this with the server's command line."
        )
    if runner.max_bs < max_requests:
        raise RuntimeError(
            f"DDTree {name} graph: found captures up to batch {runner.max_bs}, want {max_requests} "
            f"(max running requests): larger batches would run eagerly; set --cuda-graph-max-bs-decode {max_requests} "
            f"or --max-running-requests {runner.max_bs}."
        )
