"""Checkpoints of others: what speculators 0.9 and z-lab write comes out as the same drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shapes import drafter_spec, make_drafter
from training_data import VOCAB, write_target

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


def speculators(folder: Path, zlab: Path, **changes: Any) -> Path:
    """``zlab`` as speculators writes it: ids one higher, shapes nested, the verifier's norm beside the tensors."""
    spec = spec_from_dir(zlab)
    shape = {
        "model_type": "qwen3", "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6, "max_position_embeddings": spec.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
    }  # fmt: skip
    config = {
        "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id, "draft_vocab_size": VOCAB, "transformer_layer_config": shape,
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
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal: found true, want false"),
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


def test_an_unknown_tensor_is_refused(zlab: Path, target: Path, tmp_path: Path) -> None:
    source = speculators(tmp_path / "spec", zlab)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(TrainError, match=r"extra\.weight: found a tensor no DFlash drafter has"):
        import_drafter(source, target, tmp_path / "out")
