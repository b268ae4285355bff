"""Fingerprints: what they hold, what a difference means, and what the hashes see."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import random_pair
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash import provenance
from sglang_dflash.config import SettingError
from sglang_dflash.drafter_config import DrafterError
from sglang_dflash.provenance import (
    FILE,
    IDENTITY,
    SWITCH,
    Fingerprint,
    accepted_provenance,
    check_provenance,
    of_files,
    of_server,
    read_provenance,
)
from sglang_dflash.target_files import NONE, UNKNOWN, hash_config, hash_template, hash_tokenizer, hash_weights

SERVER = Fingerprint(
    sglang="0.5.23", attention="a", linear_attention="b", conv="c", dtype="bfloat16", state_dtype="float32, bfloat16",
    quantization="none", layer_ids=(1, 2), target_config="d", target_weights="e", tokenizer="f", chat_template="g",
)  # fmt: skip
FIELDS = [f.name for f in dataclasses.fields(Fingerprint)]
WARNED = [name for name in FIELDS if name not in (*IDENTITY, "thinking")]


def changed(name: str, of: Fingerprint = SERVER) -> Fingerprint:
    return dataclasses.replace(of, **{name: (1, 3) if name == "layer_ids" else "other"})


@pytest.fixture
def drafter(tmp_path: Path):
    """Write this fingerprint beside a drafter; returns its folder."""

    def write(value: Fingerprint | dict[str, Any] | str) -> Path:
        text = value if isinstance(value, str) else json.dumps(value if isinstance(value, dict) else value.to_json())
        (tmp_path / FILE).write_text(text)
        return tmp_path

    return write


def test_round_trip() -> None:
    assert Fingerprint.from_json(json.loads(json.dumps(SERVER.to_json())), "x") == SERVER


def test_one_line_a_difference() -> None:
    other = changed("dtype", changed("layer_ids"))
    assert SERVER.differences(SERVER) == []
    assert SERVER.differences(other) == [
        "dtype: trained with bfloat16, served with other",
        "layer_ids: trained with (1, 2), served with (1, 3)",
    ]


def test_invariant_29_every_field_is_compared_but_the_thinking_flag(drafter, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert (set(IDENTITY) | set(WARNED) | {"thinking"}) == set(FIELDS)
    for name in FIELDS:
        caplog.clear()
        folder = drafter(changed(name))
        if name in IDENTITY:
            with pytest.raises(DrafterError) as refused:
                check_provenance(folder, lambda: SERVER)
            assert f"{FILE}: {name}: found trained with" in str(refused.value)
            assert f"{SWITCH}=warn" in str(refused.value)
            assert "\n" not in str(refused.value)
            continue
        check_provenance(folder, lambda: SERVER)
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        if name == "thinking":
            assert not warned
            assert "trained with thinking other" in caplog.text
        else:
            assert warned == [f"Drafter provenance: {name}: trained with other, served with {getattr(SERVER, name)}."]


def test_invariant_29_the_refusal_names_every_field(drafter) -> None:
    with pytest.raises(DrafterError, match=r"target_config: .* \(target_weights, tokenizer differ too\)"):
        check_provenance(
            drafter(changed("target_config", changed("target_weights", changed("tokenizer")))), lambda: SERVER
        )


def test_the_switch_turns_refusals_into_warnings(drafter, caplog, monkeypatch) -> None:
    monkeypatch.setenv(SWITCH, "warn")
    check_provenance(drafter(changed("tokenizer")), lambda: SERVER)
    assert "Drafter provenance: tokenizer: trained with other, served with f." in caplog.text
    monkeypatch.setenv(SWITCH, "warm")
    with pytest.raises(SettingError, match=f"{SWITCH}: found 'warm', want warn or refuse"):
        check_provenance(drafter(SERVER), lambda: SERVER)


def test_a_drafter_without_one_is_served_with_one_line(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert read_provenance(tmp_path) is None
    check_provenance(tmp_path, lambda: SERVER)
    assert [r.getMessage() for r in caplog.records] == [
        f"Drafter provenance: unknown (no provenance.json in {tmp_path})."
    ]


def test_another_quantisation_has_other_bytes(drafter, caplog) -> None:
    check_provenance(drafter(changed("quantization", changed("target_weights"))), lambda: SERVER)
    assert "target_weights: trained with other" in caplog.text
    with pytest.raises(DrafterError, match="tokenizer"):
        check_provenance(drafter(changed("quantization", changed("tokenizer"))), lambda: SERVER)


def test_what_is_unknown_only_warns(drafter, caplog) -> None:
    server = dataclasses.replace(SERVER, target_weights=UNKNOWN)
    check_provenance(drafter(SERVER), lambda: server)
    assert "target_weights: trained with e, served with unknown" in caplog.text


BAD = [
    ("[1]", "JSON"),
    ("{", ""),
    ({k: v for k, v in SERVER.to_json().items() if k != "conv"}, "conv: found none"),
    (SERVER.to_json() | {"extra": "x"}, "extra: found x"),
    (SERVER.to_json() | {"layer_ids": "1"}, "layer_ids: found 1"),
    (SERVER.to_json() | {"layer_ids": [True]}, "layer_ids: found"),
    (SERVER.to_json() | {"dtype": 16}, "dtype: found 16"),
]


@pytest.mark.parametrize(("value", "says"), BAD)
def test_a_damaged_file_is_one_line(drafter, caplog, monkeypatch, value, says) -> None:
    folder = drafter(value)
    with pytest.raises(DrafterError) as refused:
        check_provenance(folder, lambda: SERVER)
    assert says in str(refused.value)
    assert str(folder / FILE) in str(refused.value)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv(SWITCH, "warn")
    check_provenance(folder, lambda: SERVER)
    assert FILE in caplog.text


# ---- hashes of the target's files ----------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return random_pair.write(tmp_path)[0]


def test_weights_hash_sees_every_tensor_and_no_file_boundary(target: Path) -> None:
    file = target / "model.safetensors"
    weights, before = load_file(file), hash_weights(target)
    names = sorted(weights)
    for name in names:
        # Training moves every element a little.
        save_file(weights | {name: weights[name] + 1e-3}, file)
        assert hash_weights(target) != before, name
    file.unlink()
    save_file({name: weights[name] for name in names[::2]}, target / "model-1.safetensors", {"format": "pt"})
    save_file({name: weights[name] for name in names[1::2]}, target / "model-2.safetensors")
    assert hash_weights(target) == before
    save_file({name: weights[name].to(torch.bfloat16) for name in names[1::2]}, target / "model-2.safetensors")
    assert hash_weights(target) != before


def test_config_hash_sees_numbers_and_not_names(target: Path) -> None:
    file = target / "config.json"
    config, before = json.loads(file.read_text()), hash_config(target, {})
    assert hash_config(target, {"rms_norm_eps": 1e-5}) != before
    incidental = {"_name_or_path": "x", "transformers_version": "9", "dtype": "float16", "quantization_config": {}}
    file.write_text(json.dumps(dict(reversed(config.items())) | incidental))
    assert hash_config(target, {}) == before
    file.write_text(json.dumps(config | {"rope_parameters": config["rope_parameters"] | {"rope_theta": 1.0}}))
    assert hash_config(target, {}) != before


def test_template_hash(target: Path, tmp_path: Path) -> None:
    before = hash_template(target)
    (target / "chat_template.jinja").write_text(random_pair.CHAT_TEMPLATE)
    assert hash_template(target) == before  # moved into a file of its own
    (target / "chat_template.jinja").write_text("{{ other }}")
    other = hash_template(target)
    assert other != before
    (given := tmp_path / "given.jinja").write_text("{{ other }}")
    assert hash_template(target, str(given)) == other
    assert hash_template(target, "chatml") not in (other, before)


def test_hashes_of_nothing(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    for hashed in (hash_weights, hash_tokenizer, hash_template, lambda f: hash_config(f, {})):
        assert hashed(empty) == NONE
        assert hashed(None) == UNKNOWN


def chunk_gated_delta_rule() -> None:
    """The function that this module's kernel would call."""


class _Kernel:
    pass


class _Backend:
    pass


def server(target: Path | str, **linear: Any) -> tuple[Any, Any]:
    """A model runner and its arguments, as far as a fingerprint reads them."""
    config = SimpleNamespace(
        model_path=str(target), revision=None, quantization=None, hf_config=None, model_override_args={}
    )
    backend: Any = _Backend()
    if linear:
        backend = SimpleNamespace(full_attn_backend=_Backend(), linear_attn_backend=SimpleNamespace(**linear))
    runner = SimpleNamespace(model_config=config, attn_backend=backend, dtype=torch.bfloat16)
    return runner, SimpleNamespace(tokenizer_path=str(target), chat_template=None)


def test_a_dense_server(target: Path) -> None:
    got = of_server(*server(target), [1, 2])
    assert (got.attention, got.linear_attention, got.conv, got.state_dtype) == (
        f"{__name__}._Backend", "none", "none", "none"
    )  # fmt: skip
    assert (got.dtype, got.quantization, got.layer_ids) == ("bfloat16", "none", (1, 2))
    assert got.target_weights == hash_weights(target)
    assert got.tokenizer == hash_tokenizer(target)
    assert UNKNOWN not in dataclasses.replace(got, thinking="off").to_json().values()


def test_the_kernel_that_runs_is_named(target: Path) -> None:
    cache = SimpleNamespace(temporal=torch.zeros(1), conv=[torch.zeros(1, dtype=torch.bfloat16)])
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache))
    got = of_server(
        *server(target, kernel_dispatcher=SimpleNamespace(extend_kernel=_Kernel()), req_to_token_pool=pool), [1]
    )
    assert got.linear_attention == f"{__name__}.chunk_gated_delta_rule"
    assert got.state_dtype == "float32, bfloat16"
    got = of_server(*server(target, req_to_token_pool=pool), [1])  # another kind of linear attention
    assert got.linear_attention == "types.SimpleNamespace"


def test_a_target_that_is_no_folder_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    got = of_server(*server(tmp_path / "model.gguf"), [1])
    assert {got.target_config, got.target_weights, got.tokenizer, got.chat_template} == {UNKNOWN}


def test_the_command_line_knows_the_target_and_not_the_kernels(target: Path, drafter) -> None:
    runner, cfg = server(target)
    early = of_files(runner.model_config, cfg, [1, 2])
    folder = drafter(dataclasses.replace(of_server(runner, cfg, [1, 2]), attention="other"))
    assert accepted_provenance(folder, lambda: early) is not None
    with pytest.raises(DrafterError, match="layer_ids"):
        accepted_provenance(folder, lambda: of_files(runner.model_config, cfg, [1, 3]))
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(DrafterError, match="tokenizer"):
        accepted_provenance(folder, lambda: of_files(runner.model_config, cfg, [1, 2]))


def test_thinking_is_not_a_servers_to_know() -> None:
    assert (
        provenance.Fingerprint.from_json({k: v for k, v in SERVER.to_json().items() if k != "thinking"}, "x").thinking
        == UNKNOWN
    )
