"""Do two paths see the same hidden states? The running server against transformers, layer by layer, same tokens.

The server's states come through the capture tee, from a throw-away drafter that conditions on every layer, so they are
what a drafter would get. transformers runs twice, each in a process of its own: with fla's kernels, where they are, and
with its own torch code. What ran is read off the functions that ran. With a drafter, its tau is replayed on the same
texts under each path's features: a difference of states matters as far as it moves that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity

from sglang_dflash.drafter import read_drafter_spec, target_facts
from sglang_dflash.drafter_config import DrafterSpec, TargetFacts, check_against_target
from sglang_dflash.provenance import target_folder

from .errors import TrainError
from .evaluate import Captured, offline_figures, replay_texts
from .hf_states import missing_packages
from .probe import BLOCK, write_probe
from .served import Client, Mode, Prompt, Serving, workspace
from .target_weights import load_target_weights

SERVER, WITH_FLA, TORCH = "server", "transformers with fla", "transformers, torch"


def parity(
    target: str,
    prompts: Sequence[Prompt],
    *,
    drafter: Path | None = None,
    max_tokens: int = 128,
    server_flags: dict[str, str] | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """The report that `tables.show_parity` prints.

    The server answers ``prompts`` greedily with ``max_tokens`` tokens; prompts and answers are the texts compared.
    Raises TrainError, DrafterError or ServerError.
    """
    if not prompts:
        raise TrainError("parity: found no prompts, want at least one.")
    facts = target_facts(target)
    spec = None if drafter is None else read_drafter_spec(drafter)
    if spec is not None:
        check_against_target(spec, facts)
    with workspace("parity") as folder:
        return _parity(target, prompts, drafter, spec, facts, max_tokens, server_flags or {}, folder, say)


def _parity(
    target: str,
    prompts: Sequence[Prompt],
    drafter: Path | None,
    spec: DrafterSpec | None,
    facts: TargetFacts,
    max_tokens: int,
    server_flags: dict[str, str],
    folder: Path,
    say: Callable[[str], object],
) -> dict[str, Any]:
    serving = Serving(
        target=target,
        on_gpu=torch.cuda.is_available(),
        logs=folder / "logs",
        concurrency=1,
        tokens=max(len(p.token_ids) for p in prompts) + max_tokens,
        extra=server_flags,
    )
    probe = write_probe(folder / "probe", facts, tuple(range(facts.num_hidden_layers - 1)))
    (spool := folder / "capture").mkdir()
    with serving.start(Mode(str(BLOCK - 1)), probe, say, capture_into=spool, final=True) as client:
        texts, starts, states = server_states(client, prompts, max_tokens, facts)
        fingerprint = client.fingerprint
    report: dict[str, Any] = {
        "target": target,
        "drafter": None if drafter is None else str(drafter),
        "dtype": fingerprint["dtype"],
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "layers": [*range(facts.num_hidden_layers - 1), "final"],
        "sources": [_server_source(fingerprint)],
        "tau": {},
    }
    taus = {SERVER: states}
    for name, hide in ((WITH_FLA, False), (TORCH, True)):
        source, found = _transformers_source(name, hide, target, fingerprint, texts, folder, say)
        report["sources"].append(source)
        if found is not None:
            source["layers"] = compare(states, found)
            taus[name] = found
    if drafter is not None and spec is not None:
        weights = load_target_weights(target_folder(target))
        for name, of in taus.items():
            captured = [
                Captured(torch.tensor(t), pick_layers(s, spec), start)
                for t, start, s in zip(texts, starts, of, strict=True)
            ]
            budgets = [spec.block_size - 1, max(32, spec.block_size - 1)]
            figures = offline_figures(replay_texts(drafter, weights, captured, budgets), budgets)
            report["tau"][name] = {
                **{("chain" if k == "chain" else f"DDTree-8, N={k}"): v for k, v in figures["decode_tau"].items()},
                "chain, teacher-forced": figures["teacher_forced_tau"].get("chain"),
            }
    return report


def server_states(
    client: Client, prompts: Sequence[Prompt], max_tokens: int, facts: TargetFacts
) -> tuple[list[list[int]], list[int], list[Tensor]]:
    """Texts with the server's answers, where these begin, and the states ``[L, S, H]`` of each (the last: final)."""
    texts, starts, states = [], [], []
    for i, prompt in enumerate(prompts):
        answer = client.answer(prompt, max_tokens).token_ids
        if len(answer) < 2:
            continue  # nothing to verify in it
        text = [*prompt.token_ids, *answer]
        ((_, captured),) = client.capture({f"parity-{i}": text})  # alone: a batch may round otherwise
        assert captured.final is not None
        layers = captured.features.view(len(text), -1, facts.hidden_size).transpose(0, 1)
        states.append(torch.cat([layers, captured.final.unsqueeze(0)]))
        texts.append(text)
        starts.append(len(prompt.token_ids))
    if not texts:
        raise TrainError("parity: found no answer of two tokens, want one; give other prompts or raise --max-tokens.")
    return texts, starts, states


def pick_layers(states: Tensor, spec: DrafterSpec) -> Tensor:
    """``[L, S, H]`` -> the context features ``[S, K*H]`` of a drafter."""
    chosen = states[list(spec.target_layer_ids)]
    return chosen.transpose(0, 1).reshape(chosen.shape[1], -1)


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[dict[str, float]]:
    """Each layer over all tokens of all texts ``[L, S, H]``: mean cosine of a token's states, mean and max |diff|."""
    a, b = torch.cat(list(ours), dim=1), torch.cat(list(theirs), dim=1)
    if a.shape != b.shape:
        raise TrainError(f"parity: found states {list(b.shape)}, want {list(a.shape)} as the server's; report this.")
    rows = []
    for x, y in zip(a, b, strict=True):
        # Each in fp32 only while it is compared: all layers of a large target at once would not fit.
        x, y = x.float(), y.float()
        difference = (x - y).abs()
        rows.append(
            {
                "cosine": float(cosine_similarity(x.double(), y.double(), dim=-1).mean()),
                "mean": float(difference.mean()),
                "max": float(difference.max()),
            }
        )
    return rows


def _server_source(fingerprint: dict[str, Any]) -> dict[str, Any]:
    kernels = [f"{k.replace('_', ' ')}: {fingerprint[k]}" for k in ("attention", "linear_attention", "conv")]
    return {"name": SERVER, "layers": [], "kernels": kernels, "missing": []}


def reason_not_run(name: str, linear: bool, missing: Sequence[str], on_gpu: bool) -> str | None:
    """Why transformers' fast path is no row of the table, by the name of what is missing; None if it is one."""
    if name != WITH_FLA:
        return None
    if not linear:
        return "not run: this target has no linear attention, so there is no fast path; see the torch row"
    if any(m.startswith("fla") for m in missing):
        return f"not run: missing {' and '.join(missing)}; install on the GPU host to get this row"
    return None if on_gpu else "not run: fla's kernels need a GPU, found none"


def _transformers_source(
    name: str,
    hide: bool,
    target: str,
    fingerprint: dict[str, Any],
    texts: list[list[int]],
    folder: Path,
    say: Callable[[str], object],
) -> tuple[dict[str, Any], list[Tensor] | None]:
    source: dict[str, Any] = {"name": name, "layers": [], "kernels": [], "missing": []}
    linear, missing = fingerprint["linear_attention"] != "none", missing_packages()
    if reason := reason_not_run(name, linear, missing, torch.cuda.is_available()):
        source["missing"].append(reason)
        return source, None
    job = {
        "target": str(target_folder(target)),
        "dtype": fingerprint["dtype"],
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "hide": hide,
        "texts": texts,
        "out": str(folder / f"states-{'torch' if hide else 'fla'}"),
    }
    say(f"{name}: running {len(texts)} texts")
    about, states = run_transformers(job, folder)
    source["kernels"] = about["kernels"]
    source["missing"] = missing_lines(about, hide)
    return source, states


def missing_lines(about: dict[str, Any], hide: bool) -> list[str]:
    """What should have been fast and was not. Nothing of the path that was asked to be slow."""
    if hide:
        return []
    slow = [line for line in about["kernels"] if ": transformers." in line]
    return [f"fast path missing: {line}" for line in [*slow, *about["fallbacks"]]]


def run_transformers(job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """`hf_states` in a process of its own: what ran, and the states ``[L, S, H]`` of each text. Raises TrainError."""
    file, log = folder / "job.json", folder / "logs" / "transformers.log"
    file.write_text(json.dumps(job))
    with log.open("w") as out:
        command = [sys.executable, "-m", f"{__package__}.hf_states", str(file)]
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        raise TrainError(f"transformers: found exit status {done.returncode} ({last}), want 0; log {log}.")
    states = load_file(job["out"])
    return json.loads(Path(job["out"] + ".json").read_text()), [states[str(i)] for i in range(len(job["texts"]))]
