"""Train the target for a given time: Muon for the matrices, AdamW for the rest, the best held-out weights kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import TrainError
from . import pack, target
from .settings import Settings

_PATIENCE = 5  # evaluations without a better held-out loss
_LOG2 = math.log(2)


def windows(tokens: Tensor, length: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Batches ``[rows, length + 1]`` of random windows without replacement, another offset and order every pass."""
    generator = torch.Generator().manual_seed(seed)
    count = (len(tokens) - 1) // length - 1
    if count < rows:
        raise TrainError(f"train: found {len(tokens)} tokens, want at least {(rows + 2) * length}; pack more text.")
    steps = torch.arange(length + 1, device=tokens.device)
    while True:
        offset = int(torch.randint(length, (), generator=generator))
        starts = torch.randperm(count, generator=generator) * length + offset
        for begin in range(0, count - rows + 1, rows):
            yield tokens[starts[begin : begin + rows].to(tokens.device).unsqueeze(1) + steps].long()


def rate(progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero, as a share of the peak; ``progress`` runs from 0 to 1."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def optimisers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW without decay for embeddings, norms, convolutions and the small gates."""
    fit, seen = settings.fit, set[int]()
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:  # the tied head
            continue
        seen.add(id(parameter))
        wide = parameter.ndim == 2 and min(parameter.shape) >= 32 and "embed_tokens" not in name
        (matrices if wide else rest).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=fit.lr, weight_decay=fit.weight_decay, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(rest, lr=fit.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def token_losses(model: Any, batch: Tensor, autocast: AbstractContextManager[Any]) -> Tensor:
    """``[rows * length]`` fp32 cross-entropy of every next token of ``[rows, length + 1]``."""
    with autocast:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def mean_loss(
    model: nn.Module, tokens: Tensor, length: int, rows: int, autocast: Any, most: int | None = None
) -> float:
    """Mean loss in nats a token over consecutive windows: each is read from its own start, so early tokens of a
    window have little context, as in serving."""
    count = min((len(tokens) - 1) // length, most or 10**9)
    if not count:
        raise TrainError(f"held-out text: found {len(tokens)} tokens, want more than {length}; hold out more.")
    starts = torch.linspace(0, len(tokens) - 1 - length, count).long() if most else torch.arange(count) * length
    steps, total = torch.arange(length + 1, device=tokens.device), 0.0
    with eager_layers(model):
        for part in starts.split(rows):
            batch = tokens[part.to(tokens.device).unsqueeze(1) + steps].long()
            total += float(token_losses(model, batch, autocast).double().sum())
    return total / (count * length)


def fit(folder: Path, settings: Settings, out: Path, seconds: float, device: str | None = None) -> dict[str, Any]:
    """Train on the packed corpus in ``folder`` for ``seconds`` and write the best target into ``out``.

    The schedule follows the clock, so the time is kept whatever the machine's speed; the clock starts when the first
    steps, which compile, are done. Held-out loss is measured every ``eval_seconds``; training stops early when it no
    longer falls. Returns what `training.json` says. Raises TrainError on bad data or a loss that is no number.
    """
    began = time.monotonic()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    shape, how = settings.target, settings.fit
    torch.set_float32_matmul_precision("high")  # the chunked delta rule's fp32 products, on tensor cores
    splits = {
        split: torch.from_numpy(pack.read(folder, split).astype("int32")).to(device)
        for split in ("train", "validation", "test")
    }
    packed = pack_facts(folder, settings)
    model: Any = target.build(shape, settings.vocab_size, packed["end_of_text"]).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    autocast: Any = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
    batches = windows(splits["train"], how.length, how.rows, seed=1)
    compiled = compile_layers(model, next(batches), autocast) if on_gpu else False
    groups = optimisers(model, settings)
    peaks = [group["lr"] for optimiser in groups for group in optimiser.param_groups]
    print(
        f"target: {parameters / 1e6:.2f} M parameters; {len(splits['train']) / 1e6:.1f} M tokens; "
        f"layers {'compiled' if compiled else 'eager'}; ready after {time.monotonic() - began:.0f} s",
        flush=True,
    )

    facts = packed | {
        "parameters": parameters,
        "fit": asdict(how),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }
    best, bad, step, curve = math.inf, 0, 0, []
    weights: dict[str, Tensor] = {}
    start = evaluated = time.monotonic()
    running = torch.zeros((), device=device)
    since = 0
    while True:
        elapsed = time.monotonic() - start
        over = elapsed >= seconds
        if over or time.monotonic() - evaluated >= how.eval_seconds:
            # What was queued is waited for here, so the clock is right.
            mean = float(running) / max(1, since)
            loss = mean_loss(model, splits["validation"], how.length, how.rows, autocast, how.eval_rows)
            elapsed = time.monotonic() - start
            tokens = step * how.rows * how.length
            curve.append(
                {"seconds": round(elapsed, 1), "step": step, "train": round(mean, 4), "held_out": round(loss, 4)}
            )
            print(
                f"{elapsed:6.1f} s  step {step:5d}  {tokens / 1e6:6.1f} M tokens "
                f"({tokens / max(elapsed, 1e-9) / 1e3:.0f} k/s)"
                f"  train {mean:.4f}  held-out {loss:.4f} (perplexity {math.exp(min(loss, 20)):.2f})",
                flush=True,
            )
            if not math.isfinite(loss) or not math.isfinite(mean):
                raise TrainError(f"step {step}: found loss {mean} and {loss} held-out, want numbers; lower fit.lr.")
            running.zero_()
            since, evaluated = 0, time.monotonic()
            if loss < best:
                best, bad = loss, 0
                weights = {n: p.detach().to("cpu", torch.float32, copy=True) for n, p in model.state_dict().items()}
                # At once: a machine that is lent may go before the time is over.
                target.write(out, shape, settings.vocab_size, weights, folder, facts | {"curve": curve})
            else:
                bad += 1
            if over or bad >= _PATIENCE:
                break
            continue
        factor = rate(elapsed / seconds, how.warmup)
        for group, peak in zip((g for o in groups for g in o.param_groups), peaks, strict=True):
            group["lr"] = peak * factor
        loss_now = token_losses(model, next(batches), autocast).mean()
        loss_now.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in groups:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        running += loss_now.detach()
        since += 1
        step += 1
        if on_gpu and step % 8 == 0:
            torch.cuda.synchronize()  # the schedule's clock must not run ahead of the work

    model.load_state_dict(weights)
    facts |= {
        "seconds": round(time.monotonic() - start, 1),
        "steps": step,
        "tokens_seen": step * how.rows * how.length,
        "curve": curve,
        "held_out": {},
    }
    for split in ("validation", "test"):
        loss = mean_loss(model, splits[split], how.length, how.rows, autocast)
        a_byte = facts["splits"][split]["tokens"] / facts["splits"][split]["bytes"]
        facts["held_out"][split] = {
            "loss": round(loss, 4),
            "perplexity": round(math.exp(loss), 3),
            "bits_per_byte": round(loss / _LOG2 * a_byte, 4),
        }
    target.write(out, shape, settings.vocab_size, weights, folder, facts)
    print(f"wrote {out} after {time.monotonic() - began:.0f} s: {facts['held_out']}", flush=True)
    return facts


def pack_facts(folder: Path, settings: Settings) -> dict[str, Any]:
    """`pack.json`. Raises TrainError if it was packed for another vocabulary."""
    import json

    facts: dict[str, Any] = json.loads((folder / "pack.json").read_text())
    if facts["vocab_size"] != settings.vocab_size:
        raise TrainError(
            f"{folder}: found a vocabulary of {facts['vocab_size']}, want {settings.vocab_size}; pack again."
        )
    return facts


def compile_layers(model: Any, batch: Tensor, autocast: Any) -> bool:
    """Compile the decoder layers (two kinds, so two graphs) with one forward and backward; eager if that fails.

    Only the layers: their many small fp32 operations are what fusing saves; the rest is matrix products.
    """
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    try:
        token_losses(model, batch, autocast).mean().backward()
    except Exception as e:  # whatever the compiler meets: a slower run is better than none on a machine that is lent
        print(f"layers stay eager, torch.compile: {type(e).__name__}: {str(e)[:300]}", flush=True)
        for layer in model.model.layers:
            del layer.forward
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


@contextmanager
def eager_layers(model: Any) -> Iterator[None]:
    """Evaluation runs the layers as they are: without gradients, or for another number of rows, a compiled layer
    would be compiled once more, and that costs more than every evaluation together."""
    compiled = {layer: layer.__dict__.pop("forward") for layer in model.model.layers if "forward" in layer.__dict__}
    model.eval()
    try:
        yield
    finally:
        model.train()
        for layer, forward in compiled.items():
            layer.forward = forward
