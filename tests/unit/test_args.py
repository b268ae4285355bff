"""The flags of a tree, in SGLang's own pipeline: defaults, both names, and every refusal in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from models import make_dense, make_drafter, make_hybrid

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_dflash import args
from sglang_dflash.config import MAX_BLOCK_SIZE, MAX_BUDGET, MAX_TOPK, TreeConfig
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt.model_executor.cuda_graph_config import PhaseConfig  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

PROBE = Path(__file__).with_name("resolve_serve_config.py")
BLOCK = 8
CHAIN = "--speculative-eagle-topk 1"

# Options beside `speculative-algorithm: dflash` and the drafter -> fields that must come out.
RESOLVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": (
        {},
        {
            "speculative_eagle_topk": 8,
            "speculative_num_draft_tokens": BLOCK,
            "speculative_num_steps": BLOCK - 1,
            "speculative_dflash_block_size": BLOCK,
            "attention_backend": "torch_native",
            "speculative_draft_attention_backend": "torch_native",
        },
    ),
    "our flags": (
        {"speculative-ddtree-topk": 4, "speculative-ddtree-budget": 20},
        {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 21, "speculative_num_steps": BLOCK - 1},
    ),
    "upstream's flags": (
        {"speculative-eagle-topk": 3, "speculative-num-draft-tokens": 12},
        {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12},
    ),
    "both, agreeing": (
        {"speculative-ddtree-budget": 11, "speculative-num-draft-tokens": 12},
        {"speculative_num_draft_tokens": 12},
    ),
    "smaller block": (
        {"speculative-dflash-block-size": 5},
        {"speculative_dflash_block_size": 5, "speculative_num_draft_tokens": 5, "speculative_num_steps": 4},
    ),
    "upper case": ({"speculative-algorithm": "DFLASH"}, {"speculative_eagle_topk": 8}),
    # What stock SGLang makes of these options, untouched.
    "chain": (
        {"speculative-ddtree-topk": 1},
        {
            "speculative_algorithm": "DFLASH",
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": BLOCK,
            "speculative_num_steps": 1,
            "speculative_dflash_block_size": None,
        },
    ),
    "hybrid": (
        {"hybrid": True, "speculative-ddtree-budget": 24, "mamba-radix-cache-strategy": "extra_buffer",
         "mamba-track-interval": 64, "context-length": 1024},
        {"speculative_num_draft_tokens": 25, "mamba_track_interval": 64, "context_length": 1024},
    ),
}  # fmt: skip

# Options -> what the error must name.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two topks": (
        {"speculative-ddtree-topk": 4, "speculative-eagle-topk": 8},
        ("--speculative-ddtree-topk 4", "--speculative-eagle-topk 8", "give one"),
    ),
    "two widths": (
        {"speculative-ddtree-budget": 20, "speculative-num-draft-tokens": 20},
        ("--speculative-ddtree-budget 20", "21 verify rows", "--speculative-num-draft-tokens is 20"),
    ),
    "block too large": (
        {"speculative-dflash-block-size": 9},
        ("--speculative-dflash-block-size: found 9, want at most 8", "config.json"),
    ),
    "budget below the block": (
        {"speculative-ddtree-budget": 6},
        ("--speculative-ddtree-budget: found 6 nodes", "want at least 7", "raise the budget"),
    ),
    "budget above the masks": (
        {"speculative-ddtree-budget": 129},
        ("--speculative-ddtree-budget: found 129 nodes", "want 1..128"),
    ),
    "no budget": ({"speculative-ddtree-budget": 0}, ("--speculative-ddtree-budget: found 0 nodes",)),
    "negative budget": ({"speculative-ddtree-budget": -1}, ("--speculative-ddtree-budget: found -1 nodes",)),
    "topk zero": ({"speculative-ddtree-topk": 0}, ("--speculative-ddtree-topk: found 0, want 2..16",)),
    "block zero": ({"speculative-dflash-block-size": 0}, ("block size: found 0, want 2..32",)),
    "no number": (
        {"speculative-ddtree-budget": "many"},
        ("--speculative-ddtree-budget: found 'many', want a whole number",),
    ),
    "half a number": ({"speculative-ddtree-topk": 2.5}, ("--speculative-ddtree-topk: found '2.5', want a whole",)),
    "no drafter": ({"speculative-draft-model-path": None}, ("--speculative-draft-model-path: found none, want a",)),
    "no requests": ({"max-running-requests": 0}, ["--max-running-requests: found 0, want at least 1"]),
    "topk too large": (
        {"speculative-ddtree-topk": 17},
        ("--speculative-ddtree-topk: found 17", "want 2..16"),
    ),
    "steps": ({"speculative-num-steps": 3}, ("--speculative-num-steps: found 3, want 7",)),
    "quantised KV": ({"kv-cache-dtype": "fp8_e4m3"}, ("--kv-cache-dtype: found 'fp8_e4m3'", CHAIN)),
    "sampling": ({"sampling-backend": "flashinfer"}, ("--sampling-backend: found 'flashinfer', want pytorch", CHAIN)),
    "pipeline": ({"pp-size": 2}, ("--pp-size: found 2, want 1", CHAIN)),
    "disaggregation": ({"disaggregation-mode": "decode"}, ("--disaggregation-mode: found 'decode'", CHAIN)),
    # Upstream asserts the same of the tree's width, but says nothing.
    "tracking": (
        {"hybrid": True, "speculative-ddtree-budget": 100, "mamba-radix-cache-strategy": "extra_buffer",
         "mamba-track-interval": 64},
        ("--mamba-track-interval: found 64, want at least 101", "lower --speculative-ddtree-budget"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> its fields after SGLang's parser and resolution, or {"error": ...}; all from YAML files."""
    home = tmp_path_factory.mktemp("args")
    targets = {"dense": make_dense(home / "dense"), "hybrid": make_hybrid(home / "hybrid")}
    drafters = {
        kind: make_drafter(home / f"{kind}-drafter", target, block_size=BLOCK) for kind, target in targets.items()
    }
    cases = {name: options for name, (options, _) in (RESOLVED | REFUSED).items()}
    cases["no speculation"] = {
        "speculative-algorithm": None, "speculative-draft-model-path": None, "attention-backend": "torch_native"
    }  # fmt: skip
    files = []
    for name, options in cases.items():
        kind = "hybrid" if options.get("hybrid") else "dense"
        values = {
            "model-path": str(targets[kind]),
            "device": "cpu",
            "dtype": "float32",
            "max-total-tokens": 4096,
            "max-mamba-cache-size": 40,
            "speculative-algorithm": "dflash",
            "speculative-draft-model-path": str(drafters[kind]),
        } | {key: value for key, value in options.items() if key != "hybrid"}
        values = {key: value for key, value in values.items() if value is not None}
        file = home / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        files.append(str(file))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, str(PROBE), "cpu", str(home / "none"), *files],
        env=environment | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-4000:]
    return {Path(k).stem: v for k, v in json.loads(lines[0].removeprefix("RESULTS ")).items()}


@pytest.mark.parametrize("case", RESOLVED)
def test_resolves(case: str, resolved: dict[str, Any]) -> None:
    got = resolved[case]
    assert "error" not in got, got
    wanted = RESOLVED[case][1]
    assert {name: got[name] for name in wanted} == wanted
    assert got["unknown_keys"] == []


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case: str, resolved: dict[str, Any]) -> None:
    error = resolved[case].get("error", "")
    for words in REFUSED[case][1]:
        assert words in error, resolved[case]
    assert error.startswith("exit 2: error: ")  # no traceback from a command line
    assert error.count("\n") == 1


def test_other_servers_are_untouched(resolved: dict[str, Any]) -> None:
    got = resolved["no speculation"]
    assert "error" not in got, got
    assert got["speculative_eagle_topk"] is None
    assert got["speculative_num_draft_tokens"] is None


def test_merge_flags() -> None:
    assert args.merge_flags(None, None, None, None) == (None, None)
    assert args.merge_flags(4, 31, None, None) == (4, 32)
    assert args.merge_flags(None, None, 3, 7) == (3, 7)
    assert args.merge_flags(4, 31, 4, 32) == (4, 32)
    with pytest.raises(ValueError, match=r"--speculative-ddtree-topk 4 and --speculative-eagle-topk 5"):
        args.merge_flags(4, None, 5, None)
    with pytest.raises(ValueError, match=r"32 verify rows .* --speculative-num-draft-tokens is 31"):
        args.merge_flags(None, 31, None, 31)


def test_engine_keywords() -> None:
    made = args.EngineArgs(SimpleNamespace)
    given = made(speculative_ddtree_topk=4, speculative_ddtree_budget=20, model_path="m")
    assert vars(given) == {
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 21,
        "model_path": "m",
    }
    assert vars(made(model_path="m")) == {"model_path": "m"}
    with pytest.raises(ValueError, match="give one of them"):
        made(speculative_ddtree_budget=20, speculative_num_draft_tokens=20)
    assert args.EngineArgs(ServerArgs).__struct_fields__ == ServerArgs.__struct_fields__


def stock_options() -> dict[str, Any]:
    """Every option of SGLang at its default, as the resolution would see it."""
    return {field: getattr(ServerArgs(model_path="m"), field) for field in ServerArgs.__struct_fields__}


WRONG = {
    "disaggregation_mode": "prefill",
    "speculative_draft_window_size": 64,
    "speculative_accept_threshold_single": 0.9,
    "speculative_accept_threshold_acc": 0.9,
    "linear_attn_backend": "flashinfer",
    "linear_attn_decode_backend": "cutedsl",
    "linear_attn_verify_backend": "flashinfer",
    "kv_cache_dtype": "fp8_e5m2",
}


@pytest.mark.parametrize("field", [field for field, *_ in args._REFUSED])
def test_every_refused_option(field: str) -> None:
    """It exists (a misspelt one would be fine for ever), its default passes, a wrong value is named."""
    options = stock_options()
    assert field in options
    args.refuse_unsupported(SimpleNamespace(**options))
    wrong = WRONG.get(field, 2 if field.endswith("_size") else True)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are matched below
        args.refuse_unsupported(SimpleNamespace(**options | {field: wrong}))
    text = str(error.value)
    assert text.startswith(f"--{field.replace('_', '-')}: found {wrong!r}, want ")
    assert CHAIN in text
    assert "\n" not in text


def test_simulated_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import spec_utils

    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_LEN", 3.5)
    with pytest.raises(ValueError, match=r"SGLANG_SIMULATE_ACC_LEN: found 3.5, want unset"):
        args.refuse_unsupported(SimpleNamespace(**stock_options()))


def test_attention_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "verify_backend", lambda: "triton")
    options = dict.fromkeys(args._ATTENTION_FIELDS)
    assert args.choose_attention(SimpleNamespace(**options)) == "triton"
    for field in args._ATTENTION_FIELDS:
        assert args.choose_attention(SimpleNamespace(**options | {field: "triton"})) == "triton"
        flag = field.replace("_", "-")
        with pytest.raises(ValueError, match=rf"^--{flag}: found 'fa3', want 'triton': .*{CHAIN}"):
            args.choose_attention(SimpleNamespace(**options | {field: "fa3"}))


@pytest.mark.parametrize(
    ("algorithm", "topk", "wanted"),
    [
        ("DFLASH", None, True),
        ("dflash", 8, True),
        ("DFLASH", 1, False),
        ("EAGLE", 8, False),
        (None, 8, False),
    ],
)
def test_wants_tree(algorithm: str | None, topk: int | None, wanted: bool) -> None:
    cfg = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=topk)
    assert args.wants_tree(cfg) is wanted


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 8, 7), "block size: found 1, want 2..32"),
        ((MAX_BLOCK_SIZE + 1, 8, 64), "block size: found 33"),
        ((8, 1, 7), "--speculative-ddtree-topk: found 1, want 2..16"),
        ((8, MAX_TOPK + 1, 7), "--speculative-ddtree-topk: found 17"),
        ((2, 8, 0), "--speculative-ddtree-budget: found 0 nodes, want 1..128"),
        ((8, 8, MAX_BUDGET + 1), "--speculative-ddtree-budget: found 129 nodes"),
        ((8, 8, 6), "want at least 7 for block size 8"),
    ],
)
def test_limits_of_a_tree(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are matched below
        TreeConfig(*sizes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_edges_of_a_tree() -> None:
    for sizes in ((2, 2, 1), (MAX_BLOCK_SIZE, MAX_TOPK, MAX_BUDGET), (8, 8, 7)):
        tree = TreeConfig(*sizes)
        assert tree.width == sizes[2] + 1
        assert tree.depth == sizes[0] - 1


@pytest.mark.parametrize(
    ("wish", "backend", "max_bs", "wanted"),
    [
        (None, "full", 16, 16),
        (None, "breakable", 16, 16),
        (None, "full", 48, 48),
        (None, "full", 160, 48),
        (None, "full", None, None),
        (None, "disabled", 16, None),
        (100, "full", 16, None),
    ],
)
def test_default_requests(wish: int | None, backend: str, max_bs: int | None, wanted: int | None) -> None:
    """A wish stands as it is, even past the graphs: the start-up check of the graphs names it."""
    decode = PhaseConfig(backend=backend, max_bs=max_bs)
    cfg = SimpleNamespace(max_running_requests=wish, cuda_graph_config=SimpleNamespace(decode=decode))
    assert args.default_requests(cfg) == wanted


def test_an_eager_draft_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "TRUE", "yes"):
        monkeypatch.setenv("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", value)
        with pytest.raises(ValueError, match=r"^SGLANG_DFLASH_EAGER_DRAFT_SAMPLER: found it set, want unset"):
            args.refuse_unsupported(SimpleNamespace(**stock_options()))
    monkeypatch.setenv("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", "0")
    args.refuse_unsupported(SimpleNamespace(**stock_options()))
