"""Every file in serve_configs/ resolves, in SGLang's own pipeline, to the server its comments promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import random_pair
import yaml
from published_models import MODELS

from sglang_dflash.drafter import read_drafter_spec
from sglang_dflash.drafter_tensors import expected_shapes

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("resolve_serve_config.py")
FILES = sorted((ROOT / "serve_configs").glob("*.yaml"))
GPU_FILES = [f for f in FILES if f.stem != "tiny-cpu"]

GIB = 1 << 30
GPU_BYTES = {"1x80gb": 79.2 * GIB, "1x141gb": 139.8 * GIB, "2x80gb": 79.2 * GIB}
# bf16 checkpoints, vision tower included: parameters of the published safetensors.
TARGET_BYTES = {
    "Qwen/Qwen3.6-27B": 2 * 27.4e9,
    "Qwen/Qwen3.5-27B": 2 * 27.4e9,
    "Qwen/Qwen3.5-35B-A3B": 2 * 35.1e9,
    "Qwen/Qwen3-8B": 2 * 8.19e9,
    "meta-llama/Llama-3.1-8B-Instruct": 2 * 8.03e9,
}
HYBRID_RESERVE = 10 * GIB  # upstream's pre_capture_activation_reserve_mb_of, the least it takes on a large GPU

by_name = pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
on_gpu = pytest.mark.parametrize("file", GPU_FILES, ids=lambda f: f.stem)


def write_model(models: Path, name: str) -> None:
    """config.json, and for a drafter a safetensors file of the right headers with a hole for data."""
    path = models / name.replace("/", "--")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    if MODELS[name]["architectures"] != ["DFlashDraftModel"]:
        return
    header, offset = {}, 0
    for tensor, shape in expected_shapes(read_drafter_spec(path)).items():
        size = 2
        for n in shape:
            size *= n
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + offset)


def run_probe(kind: str, models: Path, files: list[Path], cwd: Path) -> dict[str, Any]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cwd),
        "SGLANG_USE_CPU_ENGINE": str(int(kind == "cpu")),
    }
    done = subprocess.run(
        [sys.executable, str(PROBE), kind, str(models), *map(str, files)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"the probe failed with {done.returncode}:\n{done.stderr[-4000:]}"
    return dict(json.loads(lines[0].removeprefix("RESULTS ")))


@pytest.fixture(scope="session")
def gpu_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("published")
    for name in MODELS:
        write_model(models, name)
    return models


@pytest.fixture(scope="session")
def resolved(gpu_models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """File name -> resolved fields, or {"error": ...}."""
    home = tmp_path_factory.mktemp("home")
    random_pair.write(home / ".cache" / "tiny")
    tiny = ROOT / "serve_configs" / "tiny-cpu.yaml"
    return run_probe("gpu", gpu_models, GPU_FILES, home) | run_probe("cpu", gpu_models, [tiny], home)


@by_name
def test_resolves_to_the_tree_it_names(file: Path, resolved: dict[str, Any]) -> None:
    written, got = yaml.safe_load(file.read_text()), resolved[file.name]
    assert "error" not in got, got["error"] + "\n" + got["traceback"]
    block_size = written["speculative-dflash-block-size"]
    assert got["speculative_algorithm"] == "DFLASH"
    assert got["speculative_eagle_topk"] == 8
    assert got["speculative_num_draft_tokens"] == written["speculative-ddtree-budget"] + 1
    assert got["speculative_dflash_block_size"] == block_size
    assert got["speculative_num_steps"] == block_size - 1
    backend = "torch_native" if file.stem == "tiny-cpu" else "triton"
    assert got["attention_backend"] == backend
    assert got["speculative_draft_attention_backend"] == backend


@by_name
def test_resolution_changes_nothing_that_is_written(file: Path, resolved: dict[str, Any]) -> None:
    written, got = yaml.safe_load(file.read_text()), resolved[file.name]
    for key, value in written.items():
        field = key.replace("-", "_")
        if field in got and field not in ("speculative_algorithm", "speculative_draft_model_path"):
            assert got[field] == value, key
    assert got["disable_overlap_schedule"] is False
    assert got["disable_radix_cache"] is False


@on_gpu
def test_every_batch_has_a_graph(file: Path, resolved: dict[str, Any]) -> None:
    got = resolved[file.name]
    assert got["decode_graph_max_bs"] == got["max_running_requests"]


@by_name
def test_block_size_is_the_drafters(file: Path) -> None:
    written = yaml.safe_load(file.read_text())
    drafter = MODELS.get(written["speculative-draft-model-path"]) or random_pair.drafter_config()
    assert written["speculative-dflash-block-size"] == drafter["block_size"]


@by_name
def test_every_key_is_a_flag(file: Path, resolved: dict[str, Any]) -> None:
    # argparse also takes unambiguous beginnings of a flag, which the next release may make ambiguous.
    assert resolved[file.name]["unknown_keys"] == []


@by_name
def test_every_value_carries_a_comment(file: Path) -> None:
    lines = file.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith("#"):
            assert above.startswith("# "), f"{file.name}: no comment above {line!r}"


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    text = config.get("text_config", config)
    layers = text.get("layer_types", ["full_attention"] * text["num_hidden_layers"])
    attention = sum(kind != "linear_attention" for kind in layers)
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return int(attention * 2 * text["num_key_value_heads"] * head_dim * 2)


def state_bytes(config: dict[str, Any]) -> int:
    """One request's recurrent state: fp32 matrices and bf16 convolution windows; 0 for a dense model."""
    text = config.get("text_config", config)
    linear = text.get("layer_types", []).count("linear_attention")
    if not linear:
        return 0
    heads, k, v = text["linear_num_value_heads"], text["linear_key_head_dim"], text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * k + heads * v
    return int(linear * (heads * k * v * 4 + channels * (text["linear_conv_kernel_dim"] - 1) * 2))


def drafter_bytes(models: Path, name: str) -> int:
    return (models / name.replace("/", "--") / "model.safetensors").stat().st_size


@on_gpu
def test_memory_fits_and_holds_one_full_context_at_least(file: Path, gpu_models: Path) -> None:
    """The arithmetic of the file's header, done anew from the published shapes."""
    written = yaml.safe_load(file.read_text())
    target, drafter = written["model-path"], written["speculative-draft-model-path"]
    shards = written.get("tp-size", 1)
    gpu = GPU_BYTES[file.stem.rsplit("-", 1)[1]]
    state, requests = state_bytes(MODELS[target]), written["max-running-requests"]
    static = gpu * written["mem-fraction-static"]
    if state:
        static = min(static, gpu - HYBRID_RESERVE)
        assert written["max-mamba-cache-size"] == 5 * requests, "upstream takes 5 states a running request"
    weights = (TARGET_BYTES[target] + drafter_bytes(gpu_models, drafter)) / shards
    snapshots = (requests + 1) * (written["speculative-ddtree-budget"] + 1) * state / shards
    committed = (written.get("max-mamba-cache-size", 0) + 1) * state / shards
    kv = static - weights - snapshots - committed
    per_token = (kv_bytes_per_token(MODELS[target]) + kv_bytes_per_token(MODELS[drafter])) / shards
    tokens = kv / per_token
    assert tokens >= written["context-length"], f"{tokens:.0f} KV tokens"
    said = next(line for line in file.read_text().splitlines() if line.startswith("#   KV"))
    stated = int(said.split("about ")[1].split(" tokens")[0].replace(",", ""))
    assert stated == pytest.approx(tokens, rel=0.1)


def test_a_misspelt_key_is_refused(gpu_models: Path, tmp_path: Path) -> None:
    """The probe sees what a user would: it goes through the parser and the plugin, not around them."""
    good = (ROOT / "serve_configs" / "qwen3-8b-1x80gb.yaml").read_text()
    bad = {
        "misspelt": good.replace("speculative-ddtree-topk", "speculative-ddtree-k"),
        "narrow": good.replace("speculative-ddtree-budget: 15", "speculative-ddtree-budget: 3"),
        "backend": good.replace("attention-backend: triton", "attention-backend: flashinfer"),
    }
    files = [tmp_path / f"{name}.yaml" for name in bad]
    for file in files:
        file.write_text(bad[file.stem])
    got = run_probe("gpu", gpu_models, files, tmp_path)
    assert got["misspelt.yaml"]["error"].startswith("exit 2: usage:")
    assert "want at least 15 for block size 16" in got["narrow.yaml"]["error"]
    assert "want 'triton'" in got["backend.yaml"]["error"]
