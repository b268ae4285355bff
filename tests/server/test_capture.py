"""The tee on a real server: what it writes is what transformers computes, and nobody else notices it."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import pair, random_ids
from configs import on
from harness import Server, command, free_port, server_env
from safetensors import safe_open

from sglang_dflash.capture import FINAL, FOLDER, PREFIX, file_stem
from sglang_dflash.cpu.stand_in import declare_torchvision_ops
from sglang_dflash.drafter_config import spec_from_dir
from sglang_dflash.provenance import FILE, SWITCH, Fingerprint

OPTIONS = ("--disable-radix-cache", "--chunked-prefill-size", "64", "--disable-prefill-cuda-graph")
HYBRID = ("--speculative-ddtree-budget", "24", "--max-mamba-cache-size", "60")


class Reference:
    """transformers on the target: every layer's output, and the last one's before the final norm."""

    def __init__(self, target: Path):
        declare_torchvision_ops()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.final: torch.Tensor | None = None
        self.model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _module: torch.nn.Module, args: tuple) -> None:
        self.final = args[0]

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
        """``hidden_states``, the final one before the norm ``[S, H]``, and logits ``[S, V]``."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        assert self.final is not None
        return out.hidden_states, self.final[0], out.logits[0]


def read(folder: Path, rid: str, wait_s: float = 30) -> dict[str, torch.Tensor]:
    file = folder / f"{file_stem(rid)}.safetensors"
    deadline = time.monotonic() + wait_s
    while not file.exists():
        assert time.monotonic() < deadline, sorted(p.name for p in folder.iterdir())
        time.sleep(0.05)
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in list(opened.keys())} | {"metadata": opened.metadata()}


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def capturing(request, tmp_path_factory):
    texts = pair(request.param, shared=4)
    folder = tmp_path_factory.mktemp("captured")
    options = (*OPTIONS, *(HYBRID if request.param == "hybrid" else ()))
    work = tmp_path_factory.mktemp("capture-server")
    with Server(
        work,
        texts.target,
        texts.drafter,
        *options,
        env={FOLDER: str(folder), FINAL: "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ) as server:
        yield server, texts, folder, Reference(texts.target)
        server.assert_healthy()


PROMPTS = [random_ids(n, 7000 + n) for n in (1, 3, 63, 64, 65, 150, 201)]


def test_invariant_05_06_and_31_captured_features_are_the_layers_outputs(capturing) -> None:
    """Batched and in chunks of 64; against transformers' hidden_states[id + 1]. One layer beside must not do."""
    server, texts, folder, reference = capturing
    rids = [f"{PREFIX}{i}" for i in range(len(PROMPTS))]
    server.in_parallel(lambda job: server.generate(job[0], 1, rid=job[1]), list(zip(PROMPTS, rids, strict=True)), 7)
    ids = spec_from_dir(texts.drafter).target_layer_ids
    for prompt, rid in zip(PROMPTS, rids, strict=True):
        got = read(folder, rid)
        assert got["token_ids"].tolist() == prompt
        features = got["features"].unflatten(-1, (len(ids), -1))
        assert features.shape[0] == len(prompt)
        assert features.isfinite().all()
        hidden, final, _ = reference(prompt)
        for i, layer in enumerate(ids):
            scale = hidden[layer + 1].abs().max()
            assert (features[:, i] - hidden[layer + 1][0]).abs().max() < 5e-4 * scale
            for beside in (layer, layer + 2):
                assert (features[:, i] - hidden[beside][0]).abs().max() > 1e-2 * scale
        assert (got["final"] - final).abs().max() < 5e-4 * final.abs().max()


def test_invariant_07_the_final_hidden_state_is_a_tensor_of_its_own(capturing) -> None:
    server, texts, folder, _ = capturing
    server.generate(PROMPTS[5], 1, rid=f"{PREFIX}own")
    got = read(folder, f"{PREFIX}own")
    spec = spec_from_dir(texts.drafter)
    assert got["features"].shape[1] == len(spec.target_layer_ids) * spec.hidden_size
    assert got["final"].shape == (len(PROMPTS[5]), spec.hidden_size)
    for part in got["features"].split(spec.hidden_size, dim=1):
        assert not torch.allclose(part, got["final"], atol=1e-3)


def test_invariant_08_head_of_normed_final_is_the_targets_argmax(capturing) -> None:
    from sglang_dflash.train.head import argmax_labels
    from sglang_dflash.train.target_weights import load_target_weights

    server, texts, folder, reference = capturing
    weights = load_target_weights(texts.target)
    same = total = 0
    for i, prompt in enumerate(PROMPTS[2:]):
        server.generate(prompt, 1, rid=f"{PREFIX}argmax{i}")
        final = read(folder, f"{PREFIX}argmax{i}")["final"]
        labels = argmax_labels(final, weights.final_norm, weights.eps, weights.gemma_norm, weights.lm_head)
        same += int((labels == reference(prompt)[2].argmax(-1)).sum())
        total += len(prompt)
    assert same >= 0.999 * total


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_others_are_served_as_ever_and_leave_no_file(capturing) -> None:
    server, texts, folder, _ = capturing
    before = files(folder)
    for case in texts.cases[:3]:
        assert server.generate(case.prompt, len(case.answer))["output_ids"] == case.answer
    assert files(folder) == before


def test_captured_requests_are_answered_exactly_too(capturing) -> None:
    server, texts, folder, _ = capturing
    case = texts.cases[4]
    answer = server.generate(case.prompt, len(case.answer), rid=f"{PREFIX}long")
    assert answer["output_ids"] == case.answer
    assert read(folder, f"{PREFIX}long")["token_ids"].tolist() == case.prompt


def test_no_rid_leaves_the_folder(capturing) -> None:
    server, _, folder, _ = capturing
    for rid in (f"{PREFIX}../../escape", f"{PREFIX}/etc/escape", f"{PREFIX}a\x00b", PREFIX):
        server.generate([1, 2, 3], 1, rid=rid)
        read(folder, rid)
    assert not list(folder.parent.glob("*escape*"))
    assert all(p.suffix == ".safetensors" for p in folder.iterdir())


def test_a_refused_request_leaves_nothing(capturing) -> None:
    server, _, folder, _ = capturing
    before = files(folder)
    for n, refused in enumerate(({"repetition_penalty": 1.5}, {"max_new_tokens": 10**6})):
        body = {"input_ids": [1, 2, 3], "rid": f"{PREFIX}refused{n}", "sampling_params": {"temperature": 0} | refused}
        assert server.post("/generate", body).status_code == 400
    assert server.post("/generate", {"input_ids": random_ids(9000, 3), "rid": f"{PREFIX}long-"}).status_code == 400
    server.generate([1, 2, 3], 1, rid=f"{PREFIX}next")
    read(folder, f"{PREFIX}next")
    assert files(folder) == before | {f"{file_stem(PREFIX + 'next')}.safetensors"}


def test_an_aborted_prefill_leaves_nothing(capturing) -> None:
    server, _, folder, _ = capturing
    before, gone = files(folder), f"{PREFIX}gone"
    body = {"input_ids": random_ids(1900, 1), "rid": gone, "sampling_params": {"max_new_tokens": 1}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", body)
        deadline = time.monotonic() + 60
        while not list(folder.glob(f"{file_stem(gone)}.*.part")):  # half of it has come
            assert time.monotonic() < deadline, files(folder)
            time.sleep(0.005)
        assert server.post("/abort_request", {"rid": gone}).status_code == 200
        answer.result()
    deadline = time.monotonic() + 30
    while files(folder) != before:
        assert time.monotonic() < deadline, files(folder) - before
        time.sleep(0.05)


def test_a_retracted_request_is_captured_once(capturing) -> None:
    """SGLang retracts by beginning again with the prompt and the answer so far."""
    server, texts, folder, _ = capturing
    case, rid = texts.cases[5], f"{PREFIX}retracted"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, case.prompt, 400, rid=rid)
        assert read(folder, rid)["token_ids"].tolist() == case.prompt
        (folder / f"{file_stem(rid)}.safetensors").unlink()
        before = files(folder)
        assert server.post("/pause_generation", {"mode": "retract"}).status_code == 200
        assert not answer.done()
        assert server.post("/continue_generation", {}).status_code == 200
        assert answer.result()["output_ids"][: len(case.answer)] == case.answer
    server.generate([1, 2, 3], 1, rid=f"{PREFIX}behind")
    read(folder, f"{PREFIX}behind")
    assert files(folder) == before | {f"{file_stem(PREFIX + 'behind')}.safetensors"}


@on("dense")
def test_a_client_cannot_switch_it_on(served) -> None:
    server, texts = served
    before = files(server.log.parent)
    case = texts.cases[0]
    assert server.generate(case.prompt, len(case.answer), rid=f"{PREFIX}x")["output_ids"] == case.answer
    assert files(server.log.parent) == before
    assert "Drafter provenance: unknown (no provenance.json in" in server.log.read_text()


def test_invariant_29_the_fingerprint_travels_with_the_data(capturing) -> None:
    server, texts, folder, _ = capturing
    server.generate([5, 6, 7], 1, rid=f"{PREFIX}print")
    metadata = read(folder, f"{PREFIX}print")["metadata"]
    fingerprint = Fingerprint.from_json(json.loads(metadata["fingerprint"]), "test")
    assert fingerprint.layer_ids == spec_from_dir(texts.drafter).target_layer_ids
    assert fingerprint.dtype == "float32"
    assert fingerprint.target_weights != "none"
    hybrid = "hybrid" in texts.target.name
    assert ("cpu" in fingerprint.linear_attention) is hybrid  # the function that runs, not one that is installed
    assert fingerprint.state_dtype == ("float32, float32" if hybrid else "none")


def start(tmp_path: Path, drafter: Path | None, target: Path, *options: str, **env: str) -> tuple[int, str]:
    """Start a server that should refuse; its exit status and output."""
    line = [*command(target, drafter, *options), "--port", str(free_port())]
    env = server_env(DDTREE_TEST_CONTROL=str(tmp_path / "control.json"), **env)
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "folder", "says"),
    [
        ((), ".", "error: SGLANG_DFLASH_CAPTURE with the radix cache: found it on, want it off"),
        (OPTIONS, "missing", "error: SGLANG_DFLASH_CAPTURE=missing: found no such folder"),
        ((*OPTIONS, "--speculative-eagle-topk", "1"), ".", "error: SGLANG_DFLASH_CAPTURE: found a server without DDTr"),
    ],
)
def test_settings_that_would_lose_data_are_one_line(tmp_path: Path, options, folder: str, says: str) -> None:
    texts = pair("dense", shared=4)
    status, said = start(tmp_path, texts.drafter, texts.target, *options, **{FOLDER: folder})
    assert status == 2
    assert says in said.splitlines()[-1]


def test_invariant_29_another_targets_drafter_is_refused_or_warned_about(tmp_path: Path) -> None:
    texts = pair("dense", shared=4)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    for file in texts.drafter.iterdir():
        (drafter / file.name).write_bytes(file.read_bytes())
    other = Fingerprint(
        sglang="0.5.23", attention="a", linear_attention="none", conv="none", dtype="float32", state_dtype="none",
        quantization="none", layer_ids=spec_from_dir(drafter).target_layer_ids, target_config="x" * 16,
        target_weights="y" * 16, tokenizer="z" * 16, chat_template="none",
    )  # fmt: skip
    (drafter / FILE).write_text(json.dumps(other.to_json()))
    status, said = start(tmp_path, drafter, texts.target)
    assert status == 2
    assert f"error: {drafter / FILE}: target_config: found trained with {'x' * 16}, wanted" in said.splitlines()[-1]
    with Server(tmp_path / "warn", texts.target, drafter, env={SWITCH: "warn"}) as server:
        log = server.log.read_text()
        assert "Drafter provenance: target_weights: trained with" in log
        assert "Drafter provenance: attention: trained with a, served with sglang" in log
        case = texts.cases[0]
        assert server.generate(case.prompt, len(case.answer))["output_ids"] == case.answer
