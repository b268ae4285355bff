"""The small decode kernels on a GPU: each against its naive twin, then the builder's time.

    PYTHONPATH=<repository root> python tests/gpu/bench_kernels.py

Needs torch with CUDA and triton, not SGLang. Fails if a kernel differs from its twin or the builder misses
its target of 60 us for N=32 at any batch up to 64. Times are CUDA-graph replays, so they are GPU time without
launch overhead on the host.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import kernel_checks
from tree_reference import random_candidates, target_tokens_for

from sglang_dflash.kernels.accept_walk import AcceptedPaths, accept_walk
from sglang_dflash.kernels.build_tree import TreeBuffers, build_tree_into
from sglang_dflash.kernels.compact_kv import KVRows, compact_kv
from sglang_dflash.kernels.verify_mask import write_verify_mask
from sglang_dflash.tree import naive_build_draft_tree

DEPTH, WIDTH = 15, 8
TARGET_US = 60.0


def microseconds(launch: Callable[[], None], launches: int = 100, replays: int = 20) -> float:
    """Median over replays of a graph of `launches` back-to-back launches, a launch."""
    launch()  # compile before capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[3:])


def check_capture() -> None:
    """A captured builder follows new contents of its static inputs."""
    nodes, bs = 32, 4
    candidates = [random_candidates(bs, DEPTH, WIDTH, seed) for seed in range(3)]
    token_ids, log_probs = (tensor.cuda() for tensor in candidates[0])
    out = TreeBuffers.allocate(8, nodes, "cuda")
    build_tree_into(token_ids, log_probs, None, out, nodes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build_tree_into(token_ids, log_probs, None, out, nodes)
    for new_ids, new_log_probs in candidates[1:]:
        token_ids.copy_(new_ids)
        log_probs.copy_(new_log_probs)
        graph.replay()
        wanted = naive_build_draft_tree(new_ids, new_log_probs, nodes)
        kernel_checks.assert_same(out.view(bs), wanted, bs, "captured builder")


def bench_builder() -> bool:
    """Print the table; whether the target is met."""
    batches = (1, 8, 64)
    print(f"build_tree, depth {DEPTH}, K {WIDTH}: microseconds a launch")
    print(f"{'N':>5}" + "".join(f"{f'bs {bs}':>10}" for bs in batches))
    met = True
    for nodes in (8, 16, 32, 64, 128):
        row = []
        for bs in batches:
            token_ids, log_probs = (tensor.cuda() for tensor in random_candidates(bs, DEPTH, WIDTH, nodes))
            roots = torch.zeros(bs, dtype=torch.int64, device="cuda")
            out = TreeBuffers.allocate(bs, nodes, "cuda")
            row.append(microseconds(partial(build_tree_into, token_ids, log_probs, roots, out, nodes)))
        met &= nodes != 32 or max(row) <= TARGET_US
        print(f"{nodes:>5}" + "".join(f"{time:>10.2f}" for time in row))
    return met


def bench_mask_and_walk() -> None:
    print("N 32, microseconds a launch; prefix 8192")
    print(f"{'bs':>5}{'mask Q':>10}{'mask full':>11}{'+ prefix':>10}{'walk':>10}")
    for bs in (1, 8, 64):
        token_ids, log_probs = random_candidates(bs, DEPTH, WIDTH, bs)
        tree = naive_build_draft_tree(token_ids, log_probs, 32)
        target = target_tokens_for(tree, bs).cuda()
        tree = kernel_checks.to(tree, "cuda")
        q = 33
        prefix = torch.full((bs,), 8192, dtype=torch.int64, device="cuda")
        mask = torch.empty(bs * q * (8192 + q), dtype=torch.uint8, device="cuda")
        positions = torch.empty(bs * q, dtype=torch.int64, device="cuda")
        paths = AcceptedPaths.allocate(bs, DEPTH + 1, "cuda")
        times = []
        for full, fill in ((False, False), (True, False), (True, True)):
            write = partial(write_verify_mask, full_mask=full, fill_prefix=fill)
            times.append(microseconds(partial(write, tree, prefix, mask, positions)))
        times.append(microseconds(partial(accept_walk, tree, target, prefix, paths)))
        print(f"{bs:>5}{times[0]:>10.2f}{times[1]:>11.2f}{times[2]:>10.2f}{times[3]:>10.2f}")


def bench_compaction() -> None:
    """Qwen3.6-27B: 16 full-attention layers, 4 heads of 256, bf16, so 32 buffers of 2 KiB a slot."""
    q, block, pool_slots = 33, 16, 100_000
    buffers = [torch.zeros(pool_slots, 4, 256, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    rows = KVRows.of(buffers)
    print("KV compaction, N 32, block 16, 32 buffers of 2 KiB a slot: microseconds a launch")
    print(f"{'bs':>5}{'chains':>10}{'8 of 16':>10}{'16 of 16':>10}")
    for bs in (1, 8, 64):
        slots = torch.randperm(pool_slots)[: bs * q].cuda()
        first = torch.arange(bs, dtype=torch.int32, device="cuda").unsqueeze(1) * q
        column = torch.arange(block, dtype=torch.int32, device="cuda")
        times = []
        for length, step in ((16, 1), (8, 2), (16, 2)):
            lens = torch.full((bs,), length, dtype=torch.int32, device="cuda")
            times.append(microseconds(partial(compact_kv, rows, slots, first + column * step, lens)))
        print(f"{bs:>5}" + "".join(f"{time:>10.2f}" for time in times))


def main() -> int:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for check in (
        kernel_checks.check_build_tree,
        kernel_checks.check_verify_mask,
        kernel_checks.check_accept_walk,
        kernel_checks.check_compact_kv,
    ):
        check("cuda")
        print(check.__name__, "ok")
    check_capture()
    print("check_capture ok")
    met = bench_builder()
    bench_mask_and_walk()
    bench_compaction()
    print(f"target {TARGET_US:g} us for N=32:", "met" if met else "MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
