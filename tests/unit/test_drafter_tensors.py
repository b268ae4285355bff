"""Every bad weight file is refused, from its header, in one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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
    assert_refused,
    edit,
    retensor,
    write_tiny,
)
from safetensors.torch import load_file, save_file

from sglang_dflash.drafter import DrafterError, check_drafter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tiny(tmp_path)
    return tmp_path


def pop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(shape, dtype=dtype))


Q1 = "layers.1.self_attn.q_proj.weight"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], tuple[str, ...]]] = {
    "missing": (pop(Q1), (Q1, "1 missing, 24 present", "shape [32, 16]")),
    "missing norm": (pop("hidden_norm.weight"), ("hidden_norm.weight", "no such tensor", "shape [16]")),
    "mis-shaped": (put(Q1, 16, 16), (Q1, "shape [16, 16]", "wanted [32, 16]")),
    "mis-shaped norm": (put("layers.0.self_attn.q_norm.weight", 32), ("q_norm.weight", "[32]", "wanted [8]")),
    "unexpected": (
        put("layers.2.input_layernorm.weight", 16),
        ("layers.2.input_layernorm.weight", "[16]", "no such tensor"),
    ),
    "rotary cache": (
        put("layers.0.self_attn.rotary_emb.inv_freq", 4),
        ("rotary_emb.inv_freq", "no such tensor"),
    ),
    "own embeddings": (
        put("model.embed_tokens.weight", 64, 16),
        ("model.embed_tokens.weight", "[64, 16]", "delete it"),
    ),
    "own head": (
        put("lm_head.weight", 64, 16),
        ("lm_head.weight", "[64, 16]", "the target's embeddings and head"),
    ),
    "domino head": (
        put("prefix_gru.weight_ih_l0", 4, 4),
        ("prefix_gru.weight_ih_l0", "--speculative-eagle-topk 1"),
    ),
    "convolutions": (
        put("layers.0.mlp_conv.base_kernel", 2, 2, 16),
        ("mlp_conv", "--speculative-eagle-topk 1"),
    ),
    "bias not asked for": (put("layers.0.self_attn.q_proj.bias", 32), ("q_proj.bias", "no such tensor")),
    "both fused and not": (
        put("layers.0.self_attn.qkv_proj.weight", 64, 16),
        ("layers.0.self_attn.", "(3 such)", "no such tensor"),
    ),
    "packed": (put(Q1, 32, 2, dtype=torch.int32), (Q1, "dtype I32", "BF16 or F16 or F32", "quantised")),
    "byte packed": (put(Q1, 32, 8, dtype=torch.uint8), (Q1, "dtype U8", "BF16 or F16 or F32")),
    "fp8": (put(Q1, 32, 16, dtype=torch.float8_e4m3fn), (Q1, "dtype F8_E4M3", "BF16 or F16 or F32")),
    "fc one short": (
        put("fc.weight", 16, 32),
        ("fc 32 wide", "[16, 32]", "48 wide", "[16, 48]", "one layer was dropped"),
    ),
    "fc one long": (
        put("fc.weight", 16, 64),
        ("fc 64 wide", "[16, 64]", "48 wide", "[16, 48]", "final hidden state"),
    ),
    "fc other": (
        put("fc.weight", 16, 96),
        ("fc 96 wide", "48 wide", "fits 6 target_layer_ids, config.json lists 3"),
    ),
    "fc other width": (put("fc.weight", 16, 50), ("fc 50 wide", "[16, 50]", "48 wide", "one checkpoint")),
    "fc flat": (put("fc.weight", 48), ("fc 48 wide", "[48]", "[16, 48]", "one checkpoint")),
    "twice": (put("model.fc.weight", 16, 48), ("fc.weight", "each tensor once")),
    "twice by alias": (put("encoder.fc.weight", 16, 48), ("fc.weight", "each tensor once")),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensor_is_refused(root: Path, case: str) -> None:
    change, parts = BAD_TENSORS[case]
    retensor(root, change)
    assert_refused(root, WEIGHTS, *parts)


def test_asked_for_biases_must_exist(root: Path) -> None:
    edit(root, {"attention_bias": True})
    assert_refused(root, WEIGHTS, "layers.0.self_attn.q_proj.bias", "8 missing", "shape [32]")
    sizes = {"q": HEADS * D, "k": KV * D, "v": KV * D, "o": H}
    biases = {f"layers.{i}.self_attn.{p}_proj.bias": torch.zeros(n) for i in range(2) for p, n in sizes.items()}
    retensor(root, lambda tensors: tensors.update(biases))
    assert check_drafter(root, TARGET).attention_bias


def test_asked_for_sinks_must_exist(root: Path) -> None:
    edit(root, attention_sink_bias=True)
    assert_refused(root, WEIGHTS, "layers.0.self_attn.attention_sink_bias", "2 missing", "shape [4]")
    sinks = {f"layers.{i}.self_attn.attention_sink_bias": torch.zeros(HEADS) for i in range(2)}
    retensor(root, lambda tensors: tensors.update(sinks))
    assert check_drafter(root, TARGET).attention_sink_bias


@pytest.mark.parametrize("cut", [1, 700, None])
def test_damaged_file_is_refused(root: Path, cut: int | None) -> None:
    file = root / WEIGHTS
    data = file.read_bytes()
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" if cut is None else data[:-cut])
    assert_refused(root, WEIGHTS, "a damaged file", "a complete safetensors file", "download it again")


@pytest.mark.parametrize(("names", "part"), [((), "none"), (("pytorch_model.bin",), "only pytorch_model.bin (pickle")])
def test_no_safetensors_is_refused(root: Path, names: tuple[str, ...], part: str) -> None:
    (root / WEIGHTS).unlink()
    for name in names:
        (root / name).write_bytes(b"never read")
    assert_refused(root, "", "*.safetensors", part, "model.safetensors")


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shard(root: Path) -> dict[str, str]:
    """Split the weights in two files with an index; returns the weight map."""
    tensors = load_file(root / WEIGHTS)
    (root / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {name: SHARDS[i >= 12] for i, name in enumerate(names)}
    for file in SHARDS:
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, root / file)
    write_index(root, weight_map)
    return weight_map


def write_index(root: Path, weight_map: Any) -> None:
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_drafter_is_accepted(root: Path) -> None:
    shard(root)
    save_file({"stray": torch.zeros(1)}, root / "consolidated.safetensors")  # not in the index, so never loaded
    assert check_drafter(root, TARGET).num_layers == LAYERS


INDEX = "model.safetensors.index.json"


def test_index_naming_a_missing_file_is_refused(root: Path) -> None:
    shard(root)
    (root / SHARDS[1]).unlink()
    assert_refused(root, INDEX, SHARDS[1], "a file beside the index", "finish the download")


def test_index_leaving_the_directory_is_refused(root: Path) -> None:
    weight_map = shard(root)
    write_index(root, weight_map | {"fc.weight": f"../{root.name}/{SHARDS[0]}"})
    assert_refused(root, INDEX, "fc.weight", f"../{root.name}", "a file beside the index")


def test_index_naming_no_file_is_refused(root: Path) -> None:
    write_index(root, {"fc.weight": 1})
    assert_refused(root, INDEX, "fc.weight", "found 1,", "a file beside the index")


def test_index_and_shards_must_agree(root: Path) -> None:
    weight_map = shard(root)
    write_index(root, weight_map | {"fc.weight": SHARDS[1]})
    assert_refused(root, INDEX, "fc.weight", f"it in {SHARDS[0]}", f"it in {SHARDS[1]}")


def test_index_must_name_what_is_there(root: Path) -> None:
    weight_map = shard(root)
    write_index(root, weight_map | {"ghost.weight": SHARDS[1]})
    assert_refused(root, INDEX, "ghost.weight", "no shard", f"it in {SHARDS[1]}")


@pytest.mark.parametrize("weight_map", [None, {}, [1]])
def test_index_without_a_map_is_refused(root: Path, weight_map: Any) -> None:
    write_index(root, weight_map)
    assert_refused(root, INDEX, "weight_map", "tensor names to files")


def test_index_that_is_not_json_is_refused(root: Path) -> None:
    (root / INDEX).write_text("{")
    assert_refused(root, INDEX, "not JSON")


def test_tensor_in_two_shards_is_refused(root: Path) -> None:
    shard(root)
    tensors = load_file(root / SHARDS[1])
    save_file(tensors | {"fc.weight": torch.zeros(H, 3 * H)}, root / SHARDS[1])
    assert_refused(root, SHARDS[1], "fc.weight", SHARDS[0], "each tensor once")


def test_two_files_without_an_index_are_both_loaded_so_both_are_checked(root: Path) -> None:
    save_file({"fc.weight": torch.zeros(H, 3 * H)}, root / "adapter.safetensors")
    assert_refused(root, WEIGHTS, "fc.weight", "adapter.safetensors", "each tensor once")


# Layouts that upstream's loader reads and published or converted drafters use.
def prefixed(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def aliased(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")


def fused(tensors: dict[str, torch.Tensor]) -> None:
    for i in range(LAYERS):
        a, m = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        tensors[f"{a}.qkv_proj.weight"] = torch.cat([tensors.pop(f"{a}.{n}_proj.weight") for n in "qkv"])
        tensors[f"{m}.gate_up_proj.weight"] = torch.cat([tensors.pop(f"{m}.{n}_proj.weight") for n in ("gate", "up")])


@pytest.mark.parametrize("change", [prefixed, aliased, fused])
def test_names_the_loader_knows_are_accepted(root: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    retensor(root, change)
    assert check_drafter(root, TARGET).num_layers == LAYERS


def test_fused_tensor_of_a_wrong_size_is_refused(root: Path) -> None:
    retensor(root, fused)
    retensor(root, put("layers.1.self_attn.qkv_proj.weight", 96, 16))
    assert_refused(root, WEIGHTS, "layers.1.self_attn.qkv_proj.weight", "[96, 16]", "wanted [64, 16]")


def test_without_tensors_only_the_config_is_checked(root: Path) -> None:
    (root / WEIGHTS).unlink()
    assert check_drafter(root, TARGET, tensors=False).num_layers == LAYERS
    edit(root, {"hidden_size": 24})
    with pytest.raises(DrafterError, match="hidden_size: found 24"):
        check_drafter(root, TARGET, tensors=False)
