"""Published drafters are accepted; targets and paths are read as upstream reads them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_files import (
    HEADS,
    KV,
    LAYERS,
    TARGET,
    WEIGHTS,
    D,
    H,
    M,
    assert_refused,
    drafter_shapes,
    write_tiny,
)

from sglang_dflash.drafter import (
    DrafterError,
    DrafterSpec,
    TargetFacts,
    check_drafter,
    resolve_drafter_path,
    target_facts,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tiny(tmp_path)
    return tmp_path


def test_the_good_drafter_is_accepted(root: Path) -> None:
    assert check_drafter(root, TARGET) == DrafterSpec(
        path=str(root),
        block_size=16,
        mask_token_id=63,
        target_layer_ids=(1, 3, 5),
        num_layers=LAYERS,
        hidden_size=H,
        intermediate_size=M,
        num_heads=HEADS,
        num_kv_heads=KV,
        head_dim=D,
        attention_bias=False,
        attention_sink_bias=False,
        num_target_layers=8,
        max_position_embeddings=512,
        rope_theta=1e6,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=32,
        warnings=(),
    )


# Published drafters: config.json as z-lab ships it, and a file with its real header over a hole for weights.
COMMON: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "max_window_layers": 5,
    "use_cache": True,
    "transformers_version": "4.57.3",
}
SLIDING = ["sliding_attention"] * 4 + ["full_attention"]
AUTO_MAP = {"AutoModel": "dflash.DFlashDraftModel"}
PUBLISHED: dict[str, tuple[dict[str, Any], TargetFacts, int]] = {
    "Qwen3.6-27B": (
        {
            "auto_map": AUTO_MAP,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "layer_types": SLIDING,
            "max_position_embeddings": 262144,
            "num_target_layers": 64,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "sliding_window": 2048,
            "use_sliding_window": True,
            "tie_word_embeddings": False,
            "vocab_size": 248320,
        },
        TargetFacts(5120, 64, 248320, 262144, "Qwen/Qwen3.6-27B"),
        1_730_213_120,
    ),
    "Qwen3-8B": (
        {
            "auto_map": AUTO_MAP,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "layer_types": ["full_attention"] * 5,
            "max_position_embeddings": 40960,
            "num_target_layers": 36,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
        TargetFacts(4096, 36, 151936, 40960, "Qwen/Qwen3-8B"),
        # a layer: q and o, k and v, q_norm and k_norm, the three of the mlp, two norms
        5 * (2 * 4096**2 + 2 * 1024 * 4096 + 256 + 3 * 12288 * 4096 + 2 * 4096) + 5 * 4096**2 + 2 * 4096,
    ),
    # The layout written since mid-2026: rope_parameters, and block_size in dflash_config alone.
    "Qwen3.5-122B-A10B": (
        {
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
            },
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "layer_types": [*SLIDING[:4], *SLIDING[3:]],
            "max_position_embeddings": 262144,
            "num_hidden_layers": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
            "sliding_window": 4096,
            "use_sliding_window": True,
            "tie_word_embeddings": False,
            "vocab_size": 248320,
        },
        TargetFacts(3072, 48, 248320, 262144, "Qwen/Qwen3.5-122B-A10B"),
        6 * (2 * 4096 * 3072 + 2 * 1024 * 3072 + 256 + 3 * 9216 * 3072 + 2 * 3072) + 8 * 3072**2 + 2 * 3072,
    ),
}


def save_sparse(file: Path, shapes: dict[str, list[int]]) -> int:
    """A bf16 safetensors file with a real header whose data is a hole; returns its parameter count."""
    header, count = {}, 0
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [2 * count, 2 * (count + size)]}
        count += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with file.open("r+b") as f:
        f.truncate(8 + len(text) + 2 * count)
    return count


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafter_is_accepted(tmp_path: Path, name: str) -> None:
    own, target, parameters = PUBLISHED[name]
    config = COMMON | own
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers, ids = config["num_hidden_layers"], config["dflash_config"]["target_layer_ids"]
    shapes = drafter_shapes(config["hidden_size"], config["intermediate_size"], 32, 8, 128, layers, len(ids))
    assert len(shapes) == 11 * layers + 3
    assert save_sparse(tmp_path / WEIGHTS, shapes) == parameters
    spec = check_drafter(tmp_path, target)
    assert (spec.block_size, spec.target_layer_ids, spec.warnings) == (16, tuple(ids), ())


def test_fc_of_four_layers_is_refused_with_both_shapes(tmp_path: Path) -> None:
    own, target, _ = PUBLISHED["Qwen3.6-27B"]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | own))
    save_sparse(tmp_path / WEIGHTS, drafter_shapes(5120, 17408, 32, 8, 128, 5, 4))
    parts = ("fc 20480 wide", "[5120, 20480]", "25600 wide", "[5120, 25600]", "one layer was dropped")
    assert_refused(tmp_path, WEIGHTS, *parts, target=target)


# Targets.
TEXT = {"hidden_size": 16, "num_hidden_layers": 8, "vocab_size": 64, "max_position_embeddings": 512}


@pytest.mark.parametrize("model_type", ["mistral", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_target_facts_of_hugging_face_configs(model_type: str) -> None:
    from transformers import AutoConfig

    nested = model_type.startswith("qwen3_5")
    config = AutoConfig.for_model(model_type, **({"text_config": TEXT} if nested else TEXT))
    assert nested == hasattr(config, "text_config")
    assert target_facts(config) == TargetFacts(16, 8, 64, 512, "the target")


def test_target_facts_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": TEXT}))
    assert target_facts(tmp_path) == TargetFacts(16, 8, 64, 512, str(tmp_path))
    assert target_facts(str(tmp_path), context_len=100).context_len == 100


def test_target_facts_of_flat_nested_and_looped_configs() -> None:
    assert target_facts({"thinker_config": {"text_config": TEXT}, "_name_or_path": "omni"}).path == "omni"
    assert target_facts({"model_type": "llama"} | TEXT).hidden_size == 16
    assert target_facts({"thinker_config": TEXT}).path == "the target"
    assert target_facts({"llm_config": TEXT | {"num_loops": 2}}).num_hidden_layers == 16
    assert target_facts(SimpleNamespace(**TEXT)).vocab_size == 64


@pytest.mark.parametrize("size", [None, 0, "64"])
def test_target_without_sizes_is_refused(size: Any) -> None:
    wanted = f"odd config.json: vocab_size: found {size}, wanted a positive integer; "
    with pytest.raises(DrafterError, match=wanted):
        target_facts(TEXT | {"vocab_size": size, "_name_or_path": "odd"})


# Paths.
def test_local_directory_is_itself(root: Path) -> None:
    assert resolve_drafter_path(root) == root
    assert resolve_drafter_path(str(root)) == root


@pytest.mark.parametrize("path", ["/no/such/drafter", "./drafter", "drafter", "a/b/c", "~/no-such-drafter"])
def test_path_that_is_neither_is_refused(path: str) -> None:
    with pytest.raises(DrafterError) as caught:
        resolve_drafter_path(path)
    for part in (path, "found no such directory", "a local directory or a hub id owner/name"):
        assert part in str(caught.value)


def test_file_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)  # so that the relative path looks like a hub id
    with pytest.raises(DrafterError, match=r"config\.json: path: found a file, wanted a local directory"):
        resolve_drafter_path(f"{root.name}/config.json")
    with pytest.raises(DrafterError, match=r"model\.safetensors: path: found a file, wanted a local directory"):
        resolve_drafter_path(root / WEIGHTS)


def test_hub_id_fetches_configs_and_safetensors_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, wanted = [], ["*.json", "*.safetensors"]

    def snapshot_download(name: str, **kwargs: Any) -> str:
        calls.append((name, kwargs))
        return str(root)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert check_drafter("z-lab/Tiny-DFlash", TARGET, revision="abc").path == str(root)
    assert resolve_drafter_path("z-lab/Tiny-DFlash", cache_dir="/models") == root
    assert calls == [
        ("z-lab/Tiny-DFlash", {"revision": revision, "allow_patterns": wanted, "cache_dir": cache})
        for revision, cache in (("abc", None), (None, "/models"))
    ]


def test_hub_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DrafterError) as caught:
        resolve_drafter_path("z-lab/No-Such-DFlash")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("z-lab/No-Such-DFlash", "LocalEntryNotFoundError", "a local directory or a hub id"):
        assert part in message
