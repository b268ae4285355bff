"""tau of one or more drafters on the same prompts: as served, as replayed offline, and that of prompt lookup.

Every way of decoding is a server of its own (the budget is a server setting), started one after the other. All are
greedy, so all should write the same text. tau is pooled: 1 + accepted drafts / verifies; the prefill's token is not in
it. Answers that end in an exact loop are easy for any drafting and are always told apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafter import check_drafter, target_facts
from sglang_dflash.drafter_config import DrafterSpec
from sglang_dflash.provenance import target_folder

from .disk import check_space
from .drafter_model import Drafter
from .errors import TrainError
from .lookup import lookup_accepts
from .loops import is_looping
from .replay import CHAIN, STREAK, Replay, replay
from .served import AR, Answer, Client, Counts, Mode, Prompt, ServedRun, Serving, parse_modes, pooled, workspace
from .target_weights import TargetWeights, load_target_weights


@dataclass(frozen=True)
class Captured:
    """One answered prompt and the context features of the whole of it."""

    token_ids: Tensor  # [S] int32
    features: Tensor  # [S, K*H]
    answer_start: int


def default_budgets(block_size: int) -> str:
    """Chain, the tree that costs what the chain costs, and 32 nodes."""
    return ",".join(dict.fromkeys(["chain", str(block_size - 1), str(max(32, block_size - 1))]))


def evaluate(
    target: str,
    drafters: Sequence[Path],
    prompts: Sequence[Prompt],
    *,
    budgets: str | None = None,
    max_tokens: int = 512,
    concurrency: int = 8,
    server_flags: dict[str, str] | None = None,
    say: Callable[[str], object] = print,
    progress: Callable[[str, int], Callable[[], object]] | None = None,
) -> dict[str, Any]:
    """Serve, count, capture, replay. Returns the report that `tables.show_evaluation` prints and ``--out`` writes.

    Args:
        target: path or hub id.
        drafters: local directories.
        prompts: in the target's tokens; the same for every server.
        budgets: ``ar``, ``chain`` and tree sizes, comma-separated; ``ar`` also says whether the texts are identical.
        server_flags: more flags for every server, without dashes.
        progress: given a title and a total, returns what to call at each step.

    Raises TrainError, DrafterError or ServerError.
    """
    if not prompts or not drafters:
        raise TrainError(f"eval: found {len(prompts)} prompts and {len(drafters)} drafters, want one of each at least.")
    facts = target_facts(target)
    specs = [check_drafter(d, facts) for d in drafters]  # now, and not after minutes of other servers
    largest = max(s.block_size for s in specs)
    modes = parse_modes(budgets or default_budgets(largest), largest)
    if not any(m.is_tree or m.key == CHAIN for m in modes):
        raise TrainError(
            f"--budgets: found {budgets!r}, want chain or a tree's budget in it; plain decoding has no tau."
        )
    with workspace("eval") as folder:
        return _evaluate(
            target, drafters, specs, prompts, modes, max_tokens, concurrency, server_flags or {}, folder, say, progress
        )


def _evaluate(
    target: str,
    drafters: Sequence[Path],
    specs: Sequence[DrafterSpec],
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    max_tokens: int,
    concurrency: int,
    server_flags: dict[str, str],
    folder: Path,
    say: Callable[[str], object],
    progress: Callable[[str, int], Callable[[], object]] | None,
) -> dict[str, Any]:
    serving = Serving(
        target=target,
        on_gpu=torch.cuda.is_available(),
        logs=folder / "logs",
        concurrency=concurrency,
        tokens=max(len(p.token_ids) for p in prompts) + max_tokens,
        extra=server_flags,
    )
    runs: list[dict[str, Any]] = []
    offline: list[dict[str, Any]] = []
    reference: ServedRun | None = None

    def serve(mode: Mode, drafter: Path | None, capture_for: DrafterSpec | None) -> list[Captured]:
        nonlocal reference
        spool = folder / "capture" if capture_for else None
        if spool:
            spool.mkdir(exist_ok=True)
        with serving.start(mode, drafter, say, capture_into=spool) as client:
            name = f"{drafter.name}: {mode.title}" if drafter else mode.title
            run = client.run(prompts, max_tokens, concurrency, step(name, len(prompts)))
            reference = reference or run
            runs.append(_run_report(mode, drafter, prompts, run, reference))
            return capture_answers(client, prompts, run.answers, capture_for, folder) if capture_for else []

    step = progress or (lambda title, total: lambda: None)
    if Mode(AR) in modes:
        serve(Mode(AR), None, None)
    for drafter, spec in zip(drafters, specs, strict=True):
        trees = [m for m in modes if m.is_tree]
        texts: list[Captured] = []
        for mode in (m for m in modes if m.key != AR):
            # Any tree server hands its drafter the same features; the chain is upstream's and has no tee.
            now = bool(trees) and mode == trees[0]
            texts = serve(mode, drafter, spec if now else None) or texts
        if not trees:
            texts = capture_with(serving, drafter, spec, prompts, reference, folder, say)
        keys = [m.key for m in trees]
        offline.append(replay_report(drafter, target_folder(target), texts, [int(k) for k in keys]))
    assert reference is not None
    return {
        "target": target,
        "greedy": True,
        "max_tokens": max_tokens,
        "concurrency": concurrency,
        "runs": runs,
        "offline": offline,
        "lookup": lookup_report(prompts, reference.answers, min(s.block_size for s in specs) - 1),
    }


def capture_answers(
    client: Client, prompts: Sequence[Prompt], answers: Sequence[Answer], spec: DrafterSpec, folder: Path
) -> list[Captured]:
    """Features of every prompt with its answer. Answers of one token have nothing to verify and are left out."""
    pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if len(a.token_ids) > 1]
    tokens = sum(len(p.token_ids) + len(a.token_ids) for p, a in pairs)
    check_space(folder, tokens * len(spec.target_layer_ids) * spec.hidden_size * 4)
    texts = {f"eval-{i}": [*p.token_ids, *a.token_ids] for i, (p, a) in enumerate(pairs)}
    captured = dict(client.capture(texts))
    return [
        Captured(captured[name].token_ids, captured[name].features, len(prompt.token_ids))
        for name, (prompt, _) in zip(texts, pairs, strict=True)
    ]


def capture_with(
    serving: Serving,
    drafter: Path,
    spec: DrafterSpec,
    prompts: Sequence[Prompt],
    reference: ServedRun | None,
    folder: Path,
    say: Callable[[str], object],
) -> list[Captured]:
    """The same through a server started only to capture (no tree was asked for)."""
    assert reference is not None
    (spool := folder / "capture").mkdir(exist_ok=True)
    with serving.start(Mode(str(spec.block_size - 1)), drafter, say, capture_into=spool) as client:
        return capture_answers(client, prompts, reference.answers, spec, folder)


def replay_texts(
    drafter: Path | Drafter, target: TargetWeights, texts: Sequence[Captured], budgets: Sequence[int]
) -> list[Replay]:
    """`replay` of every text, on the GPU if there is one, in the dtype of the features."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = drafter if isinstance(drafter, Drafter) else Drafter.from_dir(drafter)
    if not texts:
        return []
    dtype = texts[0].features.dtype
    model = model.to(device, dtype).eval()
    weights = target.to(device, dtype)
    return [replay(model, weights, t.token_ids, t.features, t.answer_start, budgets) for t in texts]


def replay_report(drafter: Path, target: Path, texts: Sequence[Captured], budgets: Sequence[int]) -> dict[str, Any]:
    """Offline figures of one drafter."""
    replays = replay_texts(drafter, load_target_weights(target), texts, budgets)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next server wants the memory
    return {"drafter": str(drafter), "answers": len(texts), **offline_figures(replays, budgets)}


def offline_figures(replays: Sequence[Replay], budgets: Sequence[int]) -> dict[str, Any]:
    """What `replay` says of all texts together, by ``chain`` and budget.

    decode_tau: pooled over the walks a server takes. teacher_forced_tau: each text's mean over its positions, pooled
    like decoding, tokens / (tokens / tau of the text), so that texts of unlike tau do not drown in the easy ones.
    every_position: 1 + the plain mean over all positions, what `fit` logs; above the others where texts are unlike.
    """
    keys = [CHAIN, *map(str, budgets)]
    figures: dict[str, Any] = {"decode_tau": {}, "teacher_forced_tau": {}, "every_position": {}}
    replays = [r for r in replays if len(r.complete)]
    if not replays:
        return figures | {"top8_streak": None, "accuracy": []}
    for key in keys:
        figures["decode_tau"][key] = pooled([Counts.of(r.walk(key)) for r in replays]).tau
        forced = [1 + float(_whole(r, key).float().mean()) for r in replays]
        tokens = [len(r.complete) for r in replays]
        figures["teacher_forced_tau"][key] = sum(tokens) / sum(n / tau for n, tau in zip(tokens, forced, strict=True))
        figures["every_position"][key] = 1 + float(torch.cat([_whole(r, key) for r in replays]).float().mean())
    correct = torch.cat([r.correct & r.inside for r in replays]).sum(dim=0)
    inside = torch.cat([r.inside for r in replays]).sum(dim=0).clamp(min=1)
    return figures | {
        "top8_streak": float(torch.cat([_whole(r, STREAK) for r in replays]).float().mean()),
        "accuracy": (correct / inside).tolist(),
    }


def _whole(of: Replay, key: str) -> Tensor:
    """Lengths at the anchors whose block the text does not cut; of a text shorter than a block, all."""
    return of.lengths[key][of.complete] if bool(of.complete.any()) else of.lengths[key]


def lookup_report(prompts: Sequence[Prompt], answers: Sequence[Answer], drafts: int) -> dict[str, Any]:
    """Prompt lookup on the same answers."""
    looked_up = [
        replace(a, counts=Counts.of(lookup_accepts(p.token_ids, a.token_ids, drafts=drafts)))
        for p, a in zip(prompts, answers, strict=True)
    ]
    return {"drafts": drafts, **_pooled_report(looked_up)}


def _pooled_report(answers: Sequence[Answer]) -> dict[str, Any]:
    """Pooled counts, split by whether an answer ends in a loop."""
    loops = [is_looping(a.token_ids) for a in answers]
    everything = pooled([a.counts for a in answers])
    return {
        "tau": everything.tau,
        "tau_off_loop": pooled([a.counts for a, loop in zip(answers, loops, strict=True) if not loop]).tau,
        "tau_looping": pooled([a.counts for a, loop in zip(answers, loops, strict=True) if loop]).tau,
        "looping": sum(loops),
        "answers": len(answers),
        "tokens": sum(len(a.token_ids) for a in answers),
        "verifies": everything.verifies,
        "accepted": everything.accepted,
        "acceptance": everything.acceptance,
    }


def _run_report(
    mode: Mode, drafter: Path | None, prompts: Sequence[Prompt], run: ServedRun, reference: ServedRun
) -> dict[str, Any]:
    """One server's figures. ``identical`` compares with the first server of the evaluation."""
    figures = _pooled_report(run.answers)
    same = [a.token_ids == b.token_ids for a, b in zip(run.answers, reference.answers, strict=True)]
    return {
        "mode": mode.key,
        "title": mode.title,
        "topk": 8 if mode.is_tree else None,
        "drafter": str(drafter) if drafter else None,
        **figures,
        "seconds": run.seconds,
        "tokens_per_second": figures["tokens"] / run.seconds,
        "identical": sum(same),
        "prompts": [
            {
                "id": p.id,
                "tokens": len(a.token_ids),
                "verifies": a.counts.verifies,
                "accepted": a.counts.accepted,
                "tau": a.counts.tau,
                "looping": is_looping(a.token_ids),
                "same_text": equal,
            }
            for p, a, equal in zip(prompts, run.answers, same, strict=True)
        ],
    }
