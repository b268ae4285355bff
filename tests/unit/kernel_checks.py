"""Checks of the small decode kernels that need an environment of their own: a script, and the GPU bench's.

    TRITON_INTERPRET=1 python kernel_checks.py build_tree|verify_mask|accept_walk|compact_kv   interpreted
    python kernel_checks.py compile                                                 all kernels, to sm90 code

`test_kernels.py` runs all five; `tests/gpu/bench_kernels.py` calls the first four on CUDA tensors. Every
kernel must equal its naive twin bit for bit, and must not touch memory that is not its own.
"""

from __future__ import annotations

import itertools
import sys

import torch
import triton
from tree_reference import random_candidates, target_tokens_for

from sglang_dflash.kernels import accept_walk, build_tree, compact_kv, verify_mask
from sglang_dflash.kernels.accept_walk import AcceptedPaths, launch_accept_walk, naive_accept_walk
from sglang_dflash.kernels.build_tree import TreeBuffers, launch_build_tree
from sglang_dflash.kernels.compact_kv import KVRows, launch_compact_kv, naive_compact_kv
from sglang_dflash.kernels.verify_mask import launch_verify_mask, naive_write_verify_mask
from sglang_dflash.tree import DraftTree, naive_build_draft_tree

# (bs, depth, K, N, distinct log-probs or None for random, share of -inf)
SHAPES: list[tuple[int, int, int, int, int | None, float]] = [
    (1, 1, 1, 1, None, 0.0),
    (2, 1, 16, 20, None, 0.3),
    (2, 15, 8, 32, None, 0.0),
    (2, 15, 8, 33, 3, 0.1),
    (3, 3, 2, 40, 2, 0.2),
    (2, 7, 1, 16, 2, 0.1),
    (2, 31, 16, 128, None, 0.0),
    (1, 31, 16, 128, 2, 0.05),
    (1, 31, 2, 65, 1, 0.0),
    (2, 4, 16, 64, None, 1.0),
    (5, 6, 4, 8, 4, 0.2),
]


def to(tree: DraftTree, device: str) -> DraftTree:
    return DraftTree(**{name: field.to(device) for name, field in vars(tree).items()})


def assert_same(found: object, wanted: object, bs: int, what: object) -> None:
    """Every tensor of two dataclasses, the first `bs` requests."""
    for name, field in vars(wanted).items():
        assert torch.equal(vars(found)[name][:bs].cpu(), field[:bs].cpu()), f"{what}: {name} differs"


def check_build_tree(device: str) -> None:
    for number, (bs, depth, width, nodes, levels, dead) in enumerate(SHAPES):
        token_ids, log_probs = random_candidates(bs, depth, width, number, levels, dead)
        if number % 2:  # a rounded normaliser, a negative zero, and a bad logit, where the order allows them
            log_probs[0, 0, 0], log_probs[-1, -1, -1] = 0.25, float("nan")
            log_probs[log_probs == 0] = -0.0
            token_ids = token_ids.int()
        roots = torch.arange(bs) + 5 if number % 3 else None
        wanted = naive_build_draft_tree(token_ids, log_probs, nodes, roots)
        out = TreeBuffers.allocate(bs + 2, nodes, device)
        assert_same(out, naive_build_draft_tree(token_ids[:1], log_probs[:1] - torch.inf, nodes), 0, "shape")
        for field in vars(out).values():
            field.fill_(77)
        roots = None if roots is None else roots.to(device)
        launch_build_tree(token_ids.to(device), log_probs.to(device), roots, out, nodes)
        assert_same(out.view(bs), wanted, bs, SHAPES[number])
        for name, field in vars(out).items():
            assert (field[bs:] == (1 if field.dtype == torch.bool else 77)).all(), f"{name}: wrote beyond bs"


def check_verify_mask(device: str) -> None:
    trees = [
        naive_build_draft_tree(*random_candidates(bs, depth, width, bs, levels, dead), nodes)
        for bs, depth, width, nodes, levels, dead in SHAPES
    ]
    trees.append(naive_build_draft_tree(*random_candidates(300, 2, 2, 1), 2))  # more than one block of lengths
    for number, (tree, (full, fill)) in enumerate(
        itertools.product(trees, [(False, False), (True, False), (True, True)])
    ):
        bs, q = tree.tokens.shape
        generator = torch.Generator().manual_seed(number)
        prefix = torch.randint(0, 600 if bs < 9 else 9, (bs,), generator=generator)
        if number % 2:
            prefix = prefix.int()
        cells = int(q * (prefix.sum() + bs * q)) if full else bs * q * q
        kind = torch.uint8 if number % 5 else torch.bool
        wanted_mask = torch.full((cells + 64,), 7, dtype=torch.uint8)
        mask = wanted_mask.clone().to(device)
        wanted_positions = torch.zeros(bs * q, dtype=torch.int64)
        positions = torch.full((bs * q,), 77).to(device)
        modes = {"full_mask": full, "fill_prefix": fill}
        naive_write_verify_mask(tree, prefix, wanted_mask.view(kind), wanted_positions, **modes)
        launch_verify_mask(to(tree, device), prefix.to(device), mask.view(kind), positions, **modes)
        assert torch.equal(mask.cpu(), wanted_mask), f"mask differs: bs {bs}, Q {q}, {modes}"
        assert torch.equal(positions.cpu(), wanted_positions), f"positions differ: bs {bs}, Q {q}, {modes}"


def check_accept_walk(device: str) -> None:
    for number, (bs, depth, width, nodes, levels, dead) in enumerate(SHAPES):
        tree = naive_build_draft_tree(*random_candidates(bs, depth, width, number, levels, dead), nodes)
        target = target_tokens_for(tree, number)
        prefix = torch.arange(bs) * 100 + 3
        if number % 2:
            prefix = prefix.int()
        for block in (depth + 1, 16, 2, 1):
            wanted, found = (
                AcceptedPaths.allocate(bs, block, "cpu"),
                AcceptedPaths.allocate(bs + 1, block, device),
            )
            for field in vars(found).values():
                field.fill_(77)
            naive_accept_walk(tree, target, prefix, wanted)
            launch_accept_walk(to(tree, device), target.to(device), prefix.to(device), found)
            assert_same(found, wanted, bs, (SHAPES[number], block))
            assert all((field[bs:] == 77).all() for field in vars(found).values()), "wrote beyond bs"
    for fill in (0, 1, -1):  # what a graph may be captured with: links that lead nowhere or in circles
        junk = DraftTree(**{name: torch.full_like(field, fill) for name, field in vars(tree).items()})
        wanted, found = AcceptedPaths.allocate(bs, 16, "cpu"), AcceptedPaths.allocate(bs, 16, device)
        naive_accept_walk(junk, junk.tokens, prefix, wanted)
        launch_accept_walk(to(junk, device), junk.tokens.to(device), prefix.to(device), found)
        assert_same(found, wanted, bs, f"links filled with {fill}")


def random_paths(bs: int, q: int, block: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted paths of every kind: increasing rows, the root first, some chains, some the root alone."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.full((bs, block), -1, dtype=torch.int32)
    lens = torch.randint(1, block + 1, (bs,), generator=generator, dtype=torch.int32)
    lens[0] = block
    for b, length in enumerate(lens.tolist()):
        others = torch.randperm(q - 1, generator=generator)[: length - 1].sort().values + 1
        if b % 4 == 3:
            others = torch.arange(1, length)  # a chain
        elif b % 4 == 2 and length > 2:
            others[0] = 1  # in place at first, then not
        elif b % 4 == 1:
            others = torch.arange(2, length + 1).clamp(max=q - 1)  # all rows one further: each is overwritten
        index[b, :length] = b * q + torch.cat((torch.zeros(1, dtype=torch.int64), others)).int()
    return index, lens


def check_compact_kv(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, (bs, q, block, shapes) in enumerate(
        [
            (1, 16, 16, [(2, 24)]),
            (5, 33, 16, [(2, 16), (2, 16), (2, 24)]),  # V heads wider than K's
            (8, 8, 8, [(4, 64)]),
            (4, 129, 32, [(2, 8), (3, 208)]),  # a row of several programs, its last one partly filled
        ]
    ):
        index, lens = random_paths(bs, q, block, number)
        index[bs // 2 + 1 :, 1:], lens[bs // 2 + 1 :] = -1, 1
        if number == 2:
            index, lens = random_paths(bs, q, block, number)
        pool_slots = bs * q + 50
        slots = torch.randperm(pool_slots, generator=generator)[: bs * q]  # any order, as after page reuse
        for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            wanted = [
                torch.randint(0, 255, (pool_slots, *shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
                .view(dtype)
                .squeeze(-1)
                for shape in shapes
            ]
            found = [buffer.clone().to(device) for buffer in wanted]
            naive_compact_kv(KVRows.of(wanted), slots, index, lens)
            launch_compact_kv(KVRows.of(found), slots.to(device), index.to(device), lens.to(device))
            for buffer, goal in zip(found, wanted, strict=True):
                assert torch.equal(buffer.cpu().view(torch.uint8), goal.view(torch.uint8)), f"case {number}, {dtype}"


def check_compile() -> None:
    """Compile every kind of specialisation for sm90, which needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compiled(kernel: triton.JITFunction, num_warps: int, types: dict[str, str], **constants: object) -> str:
        signature = {}
        for name in kernel.arg_names:
            signature[name] = "constexpr" if name in constants else types.get(name, "*i64")
        source = ASTSource(kernel, signature, constants)
        target = GPUTarget("cuda", 90, 32)
        return triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]

    for ids, (has_root, depth, width, nodes) in itertools.product(
        ("*i32", "*i64"), [(True, 15, 8, 32), (False, 15, 8, 16), (True, 31, 16, 128), (True, 1, 1, 1)]
    ):
        block = build_tree.block_size(nodes)
        types = {
            "p_token_ids": ids,
            "p_root_tokens": ids,
            "p_log_probs": "*fp32",
            "p_is_chain": "*u8",
        }
        sizes = {"D": depth, "K": width, "N": nodes, "BLOCK": block}
        ptx = compiled(build_tree.build_tree_kernel, 1, types, HAS_ROOT=has_root, **sizes)
        # The latency of a pop is that of its reductions: one instruction each, and no trip to shared memory.
        assert "redux.sync.max.s32" in ptx
        assert "shfl" not in ptx
        assert "ld.shared" not in ptx
    for lens, (full, fill), q in itertools.product(
        ("*i32", "*i64"), [(False, False), (True, False), (True, True)], (2, 33, 129)
    ):
        sizes = {"Q": q, "ROWS": 16, "BLOCK_Q": triton.next_power_of_2(q), "LEN_BLOCKS": 1 if q < 129 else 2}
        types = {"p_prefix_lens": lens, "p_mask": "*u8"}
        compiled(verify_mask.verify_mask_kernel, 4, types, FULL_MASK=full, FILL_PREFIX=fill, **sizes)
    for lens, block in itertools.product(("*i32", "*i64"), (1, 10, 16)):
        types = {"p_prefix_lens": lens, "p_accept_index": "*i32", "p_accept_lens": "*i32"}
        sizes = {"Q": 33, "B": block, "BLOCK_B": triton.next_power_of_2(block)}
        compiled(accept_walk.accept_walk_kernel, 1, types, **sizes)
    for q, block in ((8, 8), (33, 16), (129, 32)):
        types = {"p_accept_index": "*i32", "p_accept_lens": "*i32"}
        ptx = compiled(compact_kv.compact_kv_kernel, 4, types, Q=q, B=block, WORDS=256)
        # 16 bytes a thread, and the order of rows kept by each thread for itself.
        assert "ld.global.v2.b64" in ptx
        assert "st.global.v2.b64" in ptx
        assert "ld.shared" not in ptx


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        check_compile()
    else:
        globals()[f"check_{sys.argv[1]}"]("cpu")
    print("checked", sys.argv[1])
