"""The trained module is the served drafter: names, widths, checkpoints, and a decode step written another way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import random_pair
import torch
from safetensors.torch import save_file
from shapes import MASK_ID, VOCAB, drafter_spec, inputs, make_drafter, run_blocks

from sglang_dflash.drafter_config import DrafterError, spec_from_dir
from sglang_dflash.drafter_tensors import expected_shapes
from sglang_dflash.train.drafter_model import Drafter
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.export import published_config
from sglang_dflash.train.layer_ids import default_layer_ids


def test_invariant_04_golden_layer_ids() -> None:
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(32, 5) == (1, 8, 15, 22, 29)
    assert default_layer_ids(28, 1) == (14,)
    for layers in range(5, 100):
        for count in range(1, min(8, layers - 3) + 1):
            ids = default_layer_ids(layers, count)
            assert len(ids) == count
            assert list(ids) == sorted(set(ids))
            assert 0 <= ids[0] <= ids[-1] < layers - 1


@pytest.mark.parametrize(("layers", "count"), [(8, 0), (8, 6), (3, 1)])
def test_invariant_04_impossible_counts_are_refused(layers: int, count: int) -> None:
    with pytest.raises(TrainError, match=rf"found {count} of a target of {layers} layers, want 1\.\."):
        default_layer_ids(layers, count)


def test_invariant_01_fc_is_as_wide_as_all_context_layers() -> None:
    drafter = make_drafter()
    assert drafter.fc.in_features == 3 * 32
    features, tokens, embedding = inputs(1, 12, drafter)
    with pytest.raises(TrainError, match=r"found 64 wide, want 96 \(3 target_layer_ids x hidden size 32\)"):
        run_blocks(drafter, features[..., :64], tokens, embedding, torch.tensor([[5]]))


def test_invariant_01_fc_of_four_layers_against_five_names_both_widths(tmp_path: Path) -> None:
    spec = drafter_spec(target_layer_ids=(1, 2, 3, 4, 5))
    write_checkpoint(tmp_path, make_drafter(target_layer_ids=(1, 2, 3, 4)), ids=[1, 2, 3, 4, 5])
    with pytest.raises(DrafterError, match=r"fc 128 wide.*160 wide"):
        Drafter(spec).load(tmp_path)


def write_checkpoint(path: Path, drafter: Drafter, ids: list[int] | None = None) -> None:
    """``ids``: what its config says of its layers, if that is not the truth."""
    config = published_config(drafter.spec, VOCAB)
    config["dflash_config"]["target_layer_ids"] = ids or list(drafter.spec.target_layer_ids)
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(drafter.state_dict()), path / "model.safetensors")


def test_invariant_02_and_03_names_and_round_trip(tmp_path: Path) -> None:
    drafter = make_drafter()
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert shapes == expected_shapes(drafter.spec)
    assert len(shapes) == 11 * drafter.spec.num_layers + 3
    write_checkpoint(tmp_path, drafter)
    again = Drafter.from_dir(tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, drafter.get_parameter(name)), name


def test_another_shape_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_drafter())
    with pytest.raises(TrainError, match=r"layers\.0\.mlp\.gate_proj\.weight: found \[48, 32\], want \[64, 32\]"):
        Drafter(drafter_spec(intermediate_size=64)).load(tmp_path)


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "swigluoai"}, "hidden_act: found 'swigluoai', want 'silu'"),
        ({"use_gemma_norm": True}, "use_gemma_norm: found True"),
        ({"is_causal": True}, "is_causal: found True"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style: found False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: found 'yarn', want 'default'"),
        ({"rope_scaling": {"rope_dim": 4}}, "rope_dim: found 4, want 8"),
    ],
)
def test_variants_that_the_server_computes_otherwise_are_refused(tmp_path: Path, changes: dict, words: str) -> None:
    write_checkpoint(tmp_path, make_drafter())
    edit_config(tmp_path, is_causal=False, rope_scaling=None)  # what a full drafter may say and mean nothing by
    Drafter.from_dir(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(TrainError, match=words):
        Drafter.from_dir(tmp_path)


def test_a_scaled_value_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_drafter())
    nested = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    edit_config(tmp_path, dflash_config=nested | {"attention_value_scale": 0.5})
    with pytest.raises(TrainError, match=r"attention_value_scale: found 0\.5"):
        Drafter.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (1, 2, 5)}, r"target_layer_ids: found \(1, 3, 5\), want \(1, 2, 5\)"),
        ({"rope_theta": 5e5}, r"rope_theta: found 10000\.0, want 500000\.0"),
        ({"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 9}, "layer_types: found"),
        ({"mask_token_id": 3}, "mask_token_id: found 49, want 3"),
    ],
)
def test_a_drafter_of_the_same_shapes_and_another_meaning_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    write_checkpoint(tmp_path, make_drafter())
    Drafter(drafter_spec(layer_types=None, sliding_window=77)).load(tmp_path)  # the same meaning, said otherwise
    with pytest.raises(TrainError, match=words):
        Drafter(drafter_spec(**changes)).load(tmp_path)


def test_fused_and_prefixed_names_load_as_the_server_loads_them(tmp_path: Path) -> None:
    drafter = make_drafter()
    write_checkpoint(tmp_path, drafter)
    tensors = dict(drafter.state_dict())
    for i in range(drafter.spec.num_layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        tensors[f"{attention}qkv_proj.weight"] = torch.cat([tensors.pop(f"{attention}{p}_proj.weight") for p in "qkv"])
        tensors[f"{mlp}gate_up_proj.weight"] = torch.cat([tensors.pop(f"{mlp}{p}_proj.weight") for p in ("gate", "up")])
    save_file({f"model.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    again = Drafter.from_dir(tmp_path)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_invariant_34_block_size_agrees_in_both_places_and_no_rope_key_of_the_target_leaks(tmp_path: Path) -> None:
    target = random_pair.target_config()
    assert target["rope_parameters"]["partial_rotary_factor"] == 0.25  # what must not leak
    spec = drafter_spec(rope_theta=target["rope_parameters"]["rope_theta"])
    config = published_config(spec, VOCAB)
    assert config["block_size"] == config["dflash_config"]["block_size"] == spec.block_size
    leaks = {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "rope_parameters", "rope_scaling"}
    assert not leaks & {*config, *config["dflash_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = spec_from_dir(tmp_path)
    wanted = dataclasses.replace(spec, path=str(tmp_path))
    assert again == wanted
    edit_config(tmp_path, block_size=5)
    with pytest.raises(DrafterError, match="block_size: found 5 at the top level and 4 in dflash_config"):
        spec_from_dir(tmp_path)
    edit_config(tmp_path, block_size=4, partial_rotary_factor=0.25)
    with pytest.raises(DrafterError, match=r"partial_rotary_factor: found 0\.25"):
        spec_from_dir(tmp_path)


def test_biases_are_refused() -> None:
    with pytest.raises(TrainError, match=r"11n\+3"):
        Drafter(dataclasses.replace(drafter_spec(), attention_bias=True))


def test_invariant_10_noise_is_off_in_evaluation_and_never_changes_its_input() -> None:
    drafter = make_drafter()
    features, _, _ = inputs(1, 12, drafter)
    before = features.clone()
    assert torch.equal(drafter.context(features, noise=0.5), drafter.context(features))
    drafter.train()
    assert torch.equal(drafter.context(features), drafter.context(features))
    assert not torch.allclose(drafter.context(features, noise=0.5), drafter.context(features))
    assert torch.equal(features, before)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """NeoX rotation of one head vector, pair by pair."""
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        a, b = x[..., i], x[..., half + i]
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., half + i] = b * angle.cos() + a * angle.sin()
    return out


def decode_step(drafter: Drafter, features: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One draft as the server does it: a KV cache of S committed tokens, then one block at S. float64, no masks.

    ``features [S, K*H]``, ``block [B, H]`` embeddings of anchor and mask tokens -> ``[B, H]``.
    """
    spec, w = drafter.spec, {k: v.double() for k, v in drafter.state_dict().items()}
    length, size, group = features.shape[0], block.shape[0], spec.num_heads // spec.num_kv_heads
    context = norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], spec.rms_norm_eps)
    x = block.double()
    for i in range(spec.num_layers):
        p = f"layers.{i}.self_attn."
        keys, values = [], []
        inner = norm(x, w[f"layers.{i}.input_layernorm.weight"], spec.rms_norm_eps)
        for position, row in enumerate([*context, *inner]):  # the block's slot o stands at S + o
            k = norm(
                (w[p + "k_proj.weight"] @ row).view(spec.num_kv_heads, -1), w[p + "k_norm.weight"], spec.rms_norm_eps
            )
            keys.append(turn(k, position, spec.rope_theta))
            values.append((w[p + "v_proj.weight"] @ row).view(spec.num_kv_heads, -1))
        out = torch.zeros(size, spec.num_heads * spec.head_dim, dtype=torch.float64)
        sliding = drafter.layer_types[i] == "sliding_attention"
        for o in range(size):
            q = norm(
                (w[p + "q_proj.weight"] @ inner[o]).view(spec.num_heads, -1), w[p + "q_norm.weight"], spec.rms_norm_eps
            )
            q = turn(q, length + o, spec.rope_theta)
            seen = range(length + size)
            if sliding:
                seen = range(max(0, length + o - int(spec.sliding_window or 0) + 1), length + o + 1)
            for head in range(spec.num_heads):
                scores = torch.stack([q[head] @ keys[t][head // group] for t in seen]) / spec.head_dim**0.5
                mixed = sum(p_t * values[t][head // group] for p_t, t in zip(scores.softmax(0), seen, strict=True))
                out[o, head * spec.head_dim : (head + 1) * spec.head_dim] = mixed
        x = x + out @ w[p + "o_proj.weight"].T
        inner = norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], spec.rms_norm_eps)
        gate = torch.nn.functional.silu(inner @ w[f"layers.{i}.mlp.gate_proj.weight"].T)
        x = x + (gate * (inner @ w[f"layers.{i}.mlp.up_proj.weight"].T)) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], spec.rms_norm_eps)


@pytest.mark.parametrize(
    "case", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}], ids=["full", "sliding"]
)
def test_invariant_19_a_decode_step_is_the_training_block(case: dict) -> None:
    drafter = make_drafter(**case)
    features, tokens, embedding = inputs(1, 20, drafter)
    anchors = torch.tensor([[0, 3, 11]])
    blocks = run_blocks(drafter, features, tokens, embedding, anchors)
    for i, anchor in enumerate((0, 3, 11)):
        ids = torch.tensor([int(tokens[0, anchor])] + [MASK_ID] * (drafter.spec.block_size - 1))
        served = decode_step(drafter, features[0, :anchor], embedding[ids])
        torch.testing.assert_close(blocks[0, i].double(), served, atol=2e-5, rtol=1e-4)
