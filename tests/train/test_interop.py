"""Checkpoints of others: what speculators 0.9 and z-lab write comes out as the same drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shapes import drafter_spec, make_drafter
from training_data import VOCAB, fingerprint, write_target

from sglang_dflash.drafter_config import DrafterError, spec_from_dir
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.export import write_drafter
from sglang_dflash.train.interop import import_drafter

SHAPE = {"mask_token_id": 49, "layer_types": ("full_attention", "full_attention")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def zlab(tmp_path: Path) -> Path:
    drafter = make_drafter()
    return write_drafter(
        tmp_path / "zlab", drafter_spec(**SHAPE), dict(drafter.state_dict()), VOCAB, dtype=torch.float32
    )


def layer_config(zlab: Path) -> dict[str, Any]:
    """The nested shapes."""
    spec = spec_from_dir(zlab)
    return {
        "model_type": "qwen3", "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6, "max_position_embeddings": spec.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
    }  # fmt: skip


def speculators(folder: Path, zlab: Path, **changes: Any) -> Path:
    """``zlab`` as speculators writes it: ids one higher, shapes nested, the verifier's norm beside the tensors."""
    spec = spec_from_dir(zlab)
    config = {
        "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id, "draft_vocab_size": VOCAB, "transformer_layer_config": layer_config(zlab),
        "aux_hidden_state_layer_ids": [i + 1 for i in spec.target_layer_ids],
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(zlab / "model.safetensors")
    save_file(tensors | {"verifier_norm.weight": torch.ones(spec.hidden_size)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["speculators", "z-lab"])
def test_round_trip(kind: str, zlab: Path, target: Path, tmp_path: Path) -> None:
    source = speculators(tmp_path / "spec", zlab) if kind == "speculators" else zlab
    out = import_drafter(source, target, tmp_path / "out")
    assert (out / "config.json").read_text() == (zlab / "config.json").read_text()
    got, wanted = load_file(out / "model.safetensors"), load_file(zlab / "model.safetensors")
    assert set(got) == set(wanted)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type: found 'eagle3', want 'dflash'"),
        ({"draft_vocab_size": 20}, "draft_vocab_size: found 20, want 64"),
        ({"sample_from_anchor": True}, "sample_from_anchor: found true, want false"),
        ({"projector_type": "domino"}, "projector_type: found 'domino', want 'dflash'"),
        ({"shift_label": True}, "shift_label: found true, want false"),
        ({"target_hidden_size": 64}, "target_hidden_size: found 64, want 32"),
        ({"transformer_layer_config": None}, "transformer_layer_config: found none"),
        ({"transformer_layer_config": {"model_type": "no such"}}, "transformer_layer_config: found 'no such'"),
        ({"mask_token_id": None}, "mask_token_id: found none"),
        ({"aux_hidden_state_layer_ids": "all"}, "aux_hidden_state_layer_ids: found 'all', want a list"),
        ({"aux_hidden_state_layer_ids": [0, 4, 6]}, "target_layer_ids: found -1"),
        ({"aux_hidden_state_layer_ids": [2, 4, 8]}, "target_layer_ids: found 7"),
    ],
)
def test_what_is_not_served_is_refused(
    changes: dict[str, Any], words: str, zlab: Path, target: Path, tmp_path: Path
) -> None:
    with pytest.raises((TrainError, DrafterError), match=words) as error:
        import_drafter(speculators(tmp_path / "spec", zlab, **changes), target, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("said", "words"), [(None, "found null"), (True, "found true")])
def test_sliding_layers_must_be_causal(said: bool | None, words: str, zlab: Path, target: Path, tmp_path: Path) -> None:
    """Where the key is left out its readers disagree, so it must be there."""
    shape = layer_config(zlab) | {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "use_sliding_window": True,
    }  # fmt: skip
    changes = {"transformer_layer_config": shape} | ({} if said is None else {"sliding_window_non_causal": said})
    with pytest.raises(TrainError, match=f"sliding_window_non_causal: {words}, want false"):
        import_drafter(speculators(tmp_path / "spec", zlab, **changes), target, tmp_path / "out")
    said_false = speculators(tmp_path / "causal", zlab, **changes | {"sliding_window_non_causal": False})
    spec = spec_from_dir(import_drafter(said_false, target, tmp_path / "out"))
    assert (spec.layer_types, spec.sliding_window) == (("sliding_attention", "full_attention"), 16)


def test_values_left_out_are_the_layer_classs_defaults(zlab: Path, target: Path, tmp_path: Path) -> None:
    """speculators writes only what differs from them."""
    shape = layer_config(zlab)
    del shape["rms_norm_eps"], shape["max_position_embeddings"]
    source = speculators(tmp_path / "spec", zlab, transformer_layer_config=shape)
    spec = spec_from_dir(import_drafter(source, target, tmp_path / "out"))
    assert (spec.rms_norm_eps, spec.max_position_embeddings) == (1e-6, 32768)


def test_a_tensor_too_many_or_missing_is_refused(zlab: Path, target: Path, tmp_path: Path) -> None:
    source = speculators(tmp_path / "spec", zlab)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(TrainError, match=r"extra\.weight: found \[2\], want no such tensor in a DFlash drafter"):
        import_drafter(source, target, tmp_path / "out")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(TrainError, match=r"layers\.1\.mlp\.up_proj\.weight: found no such tensor, want \[48, 32\]"):
        import_drafter(source, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prefixed_and_fused_names_come_out_published(zlab: Path, target: Path, tmp_path: Path) -> None:
    tensors = load_file(zlab / "model.safetensors")
    fused = dict(tensors)
    q, k, v = (fused.pop(f"layers.0.self_attn.{part}_proj.weight") for part in "qkv")
    fused["layers.0.self_attn.qkv_proj.weight"] = torch.cat([q, k, v])
    source = tmp_path / "fused"
    source.mkdir()
    (source / "config.json").write_text((zlab / "config.json").read_text())
    save_file({f"model.{name}": tensor for name, tensor in fused.items()}, source / "model.safetensors")
    got = load_file(import_drafter(source, target, tmp_path / "out") / "model.safetensors")
    assert set(got) == set(tensors)
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_provenance_goes_along(zlab: Path, target: Path, tmp_path: Path) -> None:
    (zlab / "provenance.json").write_text(json.dumps(fingerprint()))
    out = import_drafter(zlab, target, tmp_path / "out")
    assert json.loads((out / "provenance.json").read_text()) == fingerprint() | {"layer_ids": [1, 3, 5]}
