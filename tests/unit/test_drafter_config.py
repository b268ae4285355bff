"""Every bad config.json is refused in one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drafter_files import (
    TARGET,
    D,
    H,
    assert_refused,
    edit,
    write_tiny,
)

from sglang_dflash.drafter import (
    TargetFacts,
    check_drafter,
    read_drafter_spec,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tiny(tmp_path)
    return tmp_path


# Each: changes to the top level, changes to dflash_config, what the message must say. Seen without a target.
BAD_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "architecture": (
        {"architectures": ["DFlash2DraftModel"]},
        {},
        (
            "architectures",
            "DFlash2DraftModel",
            "DFlashDraftModel",
            "not served as a tree: use --speculative-eagle-topk 1",
        ),
    ),
    "architecture absent": ({"architectures": ...}, {}, ("architectures", "None", "DFlashDraftModel")),
    "model_type absent": ({"model_type": ...}, {}, ("model_type", "None", "qwen3")),
    "model_type partial": (
        {"model_type": "qwen3_5_text"},
        {},
        ("model_type", "qwen3_5_text", "partial rotary"),
    ),
    "dflash_config type": ({"dflash_config": [1]}, {}, ("dflash_config", "list", "an object")),
    "ids absent": ({}, {"target_layer_ids": ...}, ("target_layer_ids", "nothing", "a list of layer ids")),
    "ids empty": ({}, {"target_layer_ids": []}, ("target_layer_ids", "[]", "a list of layer ids")),
    "ids string": ({}, {"target_layer_ids": "1,3"}, ("target_layer_ids", '"1,3"', "a list of layer ids")),
    "ids number": ({}, {"target_layer_ids": 5}, ("target_layer_ids", "found 5", "a list of layer ids")),
    "ids float": (
        {},
        {"target_layer_ids": [1, 3.5]},
        ("target_layer_ids", "[1, 3.5]", "a list of layer ids"),
    ),
    "ids bool": (
        {},
        {"target_layer_ids": [True, 3]},
        ("target_layer_ids", "[true, 3]", "a list of layer ids"),
    ),
    "ids last layer": ({}, {"target_layer_ids": [1, 3, 7]}, ("target_layer_ids", "7 in [1, 3, 7]", "0..6")),
    "ids negative": ({}, {"target_layer_ids": [-1, 3, 5]}, ("target_layer_ids", "-1 in [-1, 3, 5]", "0..6")),
    "ids negative, depth unknown": (
        {"num_target_layers": ...},
        {"target_layer_ids": [-1, 3, 5]},
        ("target_layer_ids", "-1 in [-1, 3, 5]"),
    ),
    "ids decreasing": ({}, {"target_layer_ids": [3, 1, 5]}, ("target_layer_ids", "[3, 1, 5]", "[1, 3, 5]")),
    "ids duplicate": (
        {},
        {"target_layer_ids": [1, 3, 3]},
        ("target_layer_ids", "duplicates in [1, 3, 3]", "distinct"),
    ),
    "ids disagree": (
        {"target_layer_ids": [1, 3, 6]},
        {},
        ("target_layer_ids", "[1, 3, 6]", "[1, 3, 5]", "one value"),
    ),
    "mask absent": ({}, {"mask_token_id": ...}, ("mask_token_id", "nothing", "a token id >= 0", "pad token")),
    "mask negative": ({}, {"mask_token_id": -1}, ("mask_token_id", "-1", "a token id >= 0")),
    "mask not an int": ({}, {"mask_token_id": "63"}, ("mask_token_id", "'63'", "a token id >= 0")),
    "mask disagree": ({"mask_token_id": 62}, {}, ("mask_token_id", "62", "63", "one value")),
    "block disagree": (
        {"block_size": 8},
        {},
        ("block_size", "8 at the top level", "16 in dflash_config", "one value"),
    ),
    "block null hides": (
        {},
        {"block_size": None},
        ("block_size", "16 at the top level", "null in dflash_config"),
    ),
    "block absent": (
        {"block_size": ...},
        {"block_size": ...},
        ("block_size", "nothing", "trained block size"),
    ),
    "block 1": ({"block_size": ...}, {"block_size": 1}, ("block_size", "found 1,", "2..32")),
    "block 33": ({"block_size": ...}, {"block_size": 33}, ("block_size", "33", "2..32")),
    "block not an int": ({"block_size": ...}, {"block_size": 16.0}, ("block_size", "16.0", "2..32")),
    "num_target_layers type": ({"num_target_layers": "8"}, {}, ("num_target_layers", "8", "an integer")),
    "size absent": ({"head_dim": ...}, {}, ("head_dim", "nothing", "a positive integer", "default")),
    "size zero": ({"num_key_value_heads": 0}, {}, ("num_key_value_heads", "0", "a positive integer")),
    "context absent": ({"max_position_embeddings": ...}, {}, ("max_position_embeddings", "nothing")),
    "domino": ({}, {"projector_type": "domino"}, ("projector_type", "domino", "--speculative-eagle-topk 1")),
    "convolution": ({}, {"conv_kernel_size": 2}, ("conv_kernel_size", "2", "--speculative-eagle-topk 1")),
    "selector": ({}, {"selector_rank": 256}, ("selector_rank", "256", "--speculative-eagle-topk 1")),
    "lilicorr": ({}, {"lilicorr_num_layers": 2}, ("lilicorr_num_layers", "2", "--speculative-eagle-topk 1")),
    "shifted labels": ({}, {"shift_label": True}, ("shift_label", "true", "false", "slot 0")),
    "sampled anchor": ({"sample_from_anchor": True}, {}, ("sample_from_anchor", "true", "false", "slot 0")),
    "partial rotary": (
        {"partial_rotary_factor": 0.25},
        {},
        ("partial_rotary_factor", "0.25", "nothing or 1"),
    ),
    "partial rotary nested": (
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {},
        ("rope_parameters.partial_rotary_factor", "0.25", "nothing or 1"),
    ),
    "mrope": ({"mrope_section": [11, 11, 10]}, {}, ("mrope_section", "[11, 11, 10]", "nothing")),
    "mrope nested": (
        {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True}},
        {},
        ("rope_scaling.mrope_interleaved", "true", "nothing"),
    ),
    "rope_dim odd": (
        {"rope_parameters": {"rope_theta": 1000000, "rope_dim": 7}},
        {},
        ("rope_parameters.rope_dim", "7", "even integer up to head_dim 8"),
    ),
    "rope by layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        {},
        ("rope_parameters", "full_attention", "one flat object"),
    ),
    "rope twice": (
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 2}},
        {},
        ("rope_parameters", "rope_scaling", "yarn", "one of the two"),
    ),
    "rope_theta absent": ({"rope_theta": ...}, {}, ("rope_theta", "nothing", "the trained base", "10000")),
    "rope_theta absent in both": (
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}},
        {},
        ("rope_theta", "nothing", "top level or in rope_parameters"),
    ),
    "rope_theta disagree": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {},
        ("rope_theta", "1000000 (top level)", "10000 (rope_parameters)", "one value"),
    ),
    "rope_theta type": ({"rope_theta": "1e6"}, {}, ("rope_theta", "'1e6'", "a positive number")),
    "layer_types length": (
        {"layer_types": ["full_attention"]},
        {},
        ("layer_types", "1 entries", "2 (num_hidden_layers)"),
    ),
    "layer_types unknown": (
        {"layer_types": ["full_attention", "linear_attention"]},
        {},
        ("layer_types[1]", "linear_attention", "full_attention or sliding_attention"),
    ),
    "window absent": ({"sliding_window": ...}, {}, ("sliding_window", "nothing", "a positive integer")),
    "window dropped": ({"use_sliding_window": False}, {}, ("use_sliding_window", "false", "true")),
    "quantised": (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {},
        ("quantization_config", "found compressed-tensors,", "nothing", "bf16"),
    ),
    "quantised by algorithm": (
        {"quantization_config": {"quant_algo": "W4A16_NVFP4"}},
        {},
        ("quantization_config", "found W4A16_NVFP4,", "bf16"),
    ),
    "quantised somehow": (
        {"quantization_config": "int4"},
        {},
        ("quantization_config", "found int4,", "bf16"),
    ),
    "window zero": ({"sliding_window": 0}, {}, ("sliding_window", "found 0", "a positive integer")),
    "layer_types string": ({"layer_types": "sf"}, {}, ("layer_types", "'sf'", "2 (num_hidden_layers)")),
    "rope_theta negative": ({"rope_theta": -1}, {}, ("rope_theta", "-1", "a positive number")),
    "norm zero": ({"rms_norm_eps": 0}, {}, ("rms_norm_eps", "found 0,", "a small positive number")),
    "norm negative": ({"rms_norm_eps": -1e-6}, {}, ("rms_norm_eps", "found -1e-06,", "a small positive number")),
    "norm string": ({"rms_norm_eps": "1e-6"}, {}, ("rms_norm_eps", "found '1e-6',", "a small positive number")),
    "norm bool": ({"rms_norm_eps": True}, {}, ("rms_norm_eps", "found True,", "a small positive number")),
    "rope_theta bool": ({"rope_theta": True}, {}, ("rope_theta", "True", "a positive number")),
    "rope not an object": ({"rope_scaling": "yarn"}, {}, ("rope_scaling", '"yarn"', "one flat object")),
    "rope_dim wide": (
        {"rope_scaling": {"rope_dim": 10}},
        {},
        ("rope_scaling.rope_dim", "10", "up to head_dim 8"),
    ),
    "rope_dim type": (
        {"rope_scaling": {"rope_dim": 8.0}},
        {},
        ("rope_scaling.rope_dim", "8.0", "even integer"),
    ),
    "compressed": ({"compression_config": {"format": "pack"}}, {}, ("compression_config", "pack", "bf16")),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_refused_without_a_target(root: Path, case: str) -> None:
    top, nested, parts = BAD_CONFIGS[case]
    edit(root, top, **nested)
    assert_refused(root, "config.json", *parts, target=None)


# What only the target can tell.
BAD_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "other depth": (
        {"num_target_layers": 9},
        {},
        ("num_target_layers", "found 9", "8 (the target's layers)", "the-target"),
    ),
    "last layer": (
        {"num_target_layers": ...},
        {"target_layer_ids": [1, 3, 7]},
        ("7 in [1, 3, 7]", "0..6 for a target of 8"),
    ),
    "mask outside": ({}, {"mask_token_id": 64}, ("mask_token_id", "found 64", "less than the target's 64")),
    "other width": ({"hidden_size": 24}, {}, ("hidden_size", "found 24", "wanted 16")),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_bad_pair_is_refused(root: Path, case: str) -> None:
    top, nested, parts = BAD_PAIRS[case]
    edit(root, top, **nested)
    read_drafter_spec(root)
    assert_refused(root, "config.json", *parts)


@pytest.mark.parametrize(
    ("text", "part"),
    [(None, "FileNotFoundError"), ("{", "not JSON"), ("[1]", "a JSON list"), (b"\xff\xfe{", "not JSON")],
)
def test_config_file_is_refused(root: Path, text: str | bytes | None, part: str) -> None:
    file = root / "config.json"
    file.unlink()
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(root, "config.json", part)


@pytest.mark.parametrize(
    ("name", "part"),
    [("mask_embedding.pt", "a pickle file"), ("hf_quant_config.json", "a quantised drafter")],
)
def test_stray_file_is_refused(root: Path, name: str, part: str) -> None:
    (root / name).write_text("{}")
    assert_refused(root, name, part)


@pytest.mark.parametrize(
    "top",
    [
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {"partial_rotary_factor": 1.0},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}},
        # The trained width, stated: upstream then ignores the fields copied from the target.
        {
            "rope_parameters": {
                "rope_theta": 1e6,
                "rope_dim": D,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1],
            }
        },
    ],
)
def test_rope_layouts_upstream_reads_are_accepted(root: Path, top: dict[str, Any]) -> None:
    edit(root, top)
    assert check_drafter(root, TARGET).rope_theta == 1e6


def test_a_key_in_either_place_is_accepted(root: Path) -> None:
    edit(root, {"block_size": ...})
    assert check_drafter(root, TARGET).block_size == 16
    edit(root, {"block_size": 8, "mask_token_id": 5}, block_size=..., mask_token_id=...)
    spec = check_drafter(root, TARGET)
    assert (spec.block_size, spec.mask_token_id) == (8, 5)


@pytest.mark.parametrize("block", [2, 32])
def test_block_size_limits_are_inclusive(root: Path, block: int) -> None:
    edit(root, {"block_size": block}, block_size=block)
    assert check_drafter(root, TARGET).block_size == block


def test_layer_id_limits_are_inclusive(root: Path) -> None:
    edit(root, target_layer_ids=[0, 3, 6])
    assert check_drafter(root, TARGET).target_layer_ids == (0, 3, 6)


def test_layer_types_may_be_absent(root: Path) -> None:
    edit(root, {"layer_types": ...})
    spec = check_drafter(root, TARGET)
    assert (spec.layer_types, spec.sliding_window) == (None, None)


def test_other_config_classes_keep_the_window_unasked(root: Path) -> None:
    edit(root, {"model_type": "mistral", "use_sliding_window": ...})
    assert check_drafter(root, TARGET).sliding_window == 32


def test_plain_logit_transform_is_no_warning(root: Path) -> None:
    edit(root, output_multiplier=1.0, final_logit_softcapping=0.0)
    assert check_drafter(root, TARGET).warnings == ()


def test_short_context_is_a_warning(root: Path) -> None:
    edit(root, {"max_position_embeddings": 511})
    (warning,) = check_drafter(root, TARGET).warnings
    for part in (
        str(root / "config.json"),
        "max_position_embeddings",
        "found 511",
        "512",
        "--context-length",
    ):
        assert part in warning
    assert "\n" not in warning
    assert check_drafter(root, TargetFacts(H, 8, 64, None, "the-target")).warnings == ()


@pytest.mark.parametrize(("key", "value"), [("final_logit_softcapping", 30.0), ("output_multiplier", 0.2)])
def test_ignored_logit_transform_is_a_warning(root: Path, key: str, value: Any) -> None:
    edit(root, {}, **{key: value})
    (warning,) = check_drafter(root, TARGET).warnings
    assert key in warning
    assert str(value) in warning
