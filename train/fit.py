"""The training loop: FSDP2, fp32 masters, accumulation, cosine schedule, checkpoints that continue exactly.

Anchors are drawn from (seed, step, rank), batches from (seed, epoch): nothing about a run lives in memory only, so a
run that was killed and resumed gives the loss curve of one that was not.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from sglang_dflash.drafter_config import DrafterSpec
from sglang_dflash.provenance import hash_weights

from .batches import Batch, Batches, check_mask_token
from .checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from .disk import write_atomically
from .drafter_model import Drafter
from .errors import TrainError
from .metrics import Tally
from .recipe import Recipe, drafter_spec
from .shards import Dataset, check_sample
from .source import Source
from .step import draft_hidden, loss_of, plan_drafts, tally_trees
from .target_weights import TargetWeights, load_target_weights

RUN, CURVE = "run.json", "metrics.jsonl"
_LEAK = 0.9  # accuracy on data seen for the first time that no honest drafter reaches early
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Fit:
    """One training run in ``out``: new, or continued from its last checkpoint."""

    def __init__(
        self,
        target: str | Path,
        data: Sequence[str | Path] | Source,
        out: str | Path,
        recipe: Recipe,
        *,
        init: str | Path | None = None,
        console: Console | None = None,
    ):
        self.recipe, self.out, self.console = recipe, Path(out), console or Console(stderr=True)
        self.device = _start_ranks()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dataset: Source = Dataset(*data) if isinstance(data, (list, tuple)) else cast(Source, data)
        _check_target(self.dataset.fingerprint, Path(target))
        self.spec = drafter_spec(recipe, target, self.dataset.layer_ids, self.dataset.feature_width)
        self.batches = Batches(
            self.dataset,
            row_length=recipe.max_length,
            rows=recipe.rows,
            seed=recipe.seed,
            epochs=recipe.epochs,
            rank=self.rank,
            world=self.world,
            mask_token_id=recipe.drafter.mask_token_id,
        )
        if recipe.loss == "argmax" and not self.dataset.has_final:
            raise TrainError("loss argmax: found data without the final hidden state, want it; prepare with --final.")
        for sample in self.dataset.fetch(range(min(len(self.dataset), 64))):  # the rest as they come
            check_mask_token(sample, recipe.drafter.mask_token_id)
        dtype = _DTYPES[recipe.dtype]
        self.target: TargetWeights = load_target_weights(target).to(self.device, dtype)
        self.drafter = Drafter(self.spec).initialise(recipe.seed)
        if init is not None:
            self.drafter.load(init)
        self.model = _shard(self.drafter.to(self.device), self.device, dtype)
        self.optimiser = AdamW(
            self.model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=self.device.type == "cuda"
        )
        self.per_epoch = [-(-batches // recipe.accumulation) for batches in self.batches.per_epoch]
        self.steps = sum(self.per_epoch)
        self.step = 0
        self._open_run(target)

    # ---- the run's folder ----------------------------------------------------------------------

    def _open_run(self, target: str | Path) -> None:
        """Note what this run is, or check that it is the same run, and resume it."""
        about = {
            "recipe": self.recipe.model_dump(mode="json"),
            "fingerprint": self.dataset.fingerprint,
            "samples": len(self.dataset),
            "world": self.world,
            "drafter": asdict(self.spec),
            "target": str(target),
        }
        about = json.loads(json.dumps(about))
        file = self.out / RUN
        if file.exists():
            have = json.loads(file.read_text())
            for key in ("recipe", "fingerprint", "samples", "world"):
                if have[key] != about[key]:
                    raise TrainError(
                        f"{file}: {key}: {_difference(have[key], about[key])}; use a new --out for a new run."
                    )
        elif self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(about, indent=1))
        dist.barrier()
        saved = checkpoints(self.out)
        if saved:
            load_checkpoint(saved[-1], self.model, self.optimiser)
            self.step = int(read_state(saved[-1])["step"])
        if self.rank == 0:
            self._cut_curve()

    def _cut_curve(self) -> None:
        """Drop points past the checkpoint: they will be drawn again."""
        file = self.out / CURVE
        if file.exists():
            lines = [line for line in file.read_text().split("\n") if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            write_atomically(file, "".join(f"{line}\n" for line in kept))

    # ---- the loop ------------------------------------------------------------------------------

    def run(self, *, until: int | None = None) -> dict[str, float]:
        """Train to the end (or to step ``until``), save, and return the last figures. Raises TrainError on a NaN."""
        end = min(self.steps, until or self.steps)
        figures: dict[str, float] = {}
        writer = self._scalars()
        tally, losses = self._tally(), torch.zeros(2, device=self.device)
        began = time.monotonic()
        with self._progress() as progress:
            bar = progress.add_task("fit", total=self.steps, completed=self.step, note="")
            for micro in self._micro_batches():
                if self.step >= end:
                    break
                log = self._logs(self.step + 1) or self.step + 1 == end
                loss, norm = self._train(micro, tally, trees=log)
                losses += torch.stack([loss, torch.ones_like(loss)])
                self.step += 1
                if log:
                    figures = self._read(tally, losses, norm, began)
                    progress.update(bar, note=f"loss {figures['loss']:.4f} tau {figures['tau/chain']:.3f}")
                    self._record(figures, writer)
                    tally, losses = self._tally(), torch.zeros(2, device=self.device)
                progress.update(bar, completed=self.step)
                if self.step % self.recipe.save_every == 0 and self.step < end:
                    self._save()
        if not checkpoints(self.out) or read_state(checkpoints(self.out)[-1])["step"] < self.step:
            self._save()
        if writer is not None:
            writer.close()
        return figures

    def _micro_batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step from where the run stands; an epoch's last step may have fewer."""
        epoch, first = self._position(self.step)
        stream = self.batches.stream(epoch, first, pin=self.device.type == "cuda")
        for step in range(self.step, self.steps):
            epoch, first = self._position(step)
            yield [next(stream) for _ in range(min(self.recipe.accumulation, self.batches.per_epoch[epoch] - first))]

    def _position(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the number of its first micro-batch there."""
        epoch = 0
        while step >= self.per_epoch[epoch]:
            step -= self.per_epoch[epoch]
            epoch += 1
        return epoch, step * self.recipe.accumulation

    def _logs(self, step: int) -> bool:
        """Also before every save: a resumed run then averages its figures over the same steps as one that was not
        killed, and weights with a NaN in them are never saved."""
        return step % self.recipe.log_every == 0 or step % self.recipe.save_every == 0

    def _train(self, micro: list[Batch], tally: Tally, *, trees: bool) -> tuple[Tensor, Tensor]:
        """One optimiser step; the loss and the gradient's norm, on the device."""
        self.model.train()
        generator = torch.Generator(device=self.device)
        generator.manual_seed((self.recipe.seed * 1_000_003 + self.step) * 1009 + self.rank)
        if self.recipe.noise:
            torch.manual_seed((self.recipe.seed * 1_000_003 + self.step) * 1013 + self.rank)
        plans = [plan_drafts(batch, self.recipe, generator) for batch in micro]
        weight = torch.stack([plan.weight for plan in plans]).sum()
        dist.all_reduce(weight)
        weight = weight.clamp(min=1e-6)  # a step without a single label moves nothing
        total = torch.zeros((), device=self.device)
        for number, plan in enumerate(plans):
            self.model.set_requires_gradient_sync(number == len(plans) - 1)
            hidden = draft_hidden(self.model, self.drafter, self.target, plan, self.recipe.noise)
            loss = loss_of(hidden, plan, self.target, self.recipe, tally)
            # FSDP averages over ranks where a sum is wanted.
            (loss * self.world / weight).backward()
            total += loss.detach() / weight
            if trees and number == 0:
                tally_trees(hidden.detach(), plan, self.target, self.recipe.tree_budgets, tally)
        norm = clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.lr * self._schedule(self.step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine to 0."""
        warm = max(1, round(self.recipe.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    # ---- figures -------------------------------------------------------------------------------

    def _tally(self) -> Tally:
        return Tally(self.recipe.drafter.block_size - 1)

    def _read(self, tally: Tally, losses: Tensor, norm: Tensor, began: float) -> dict[str, float]:
        """Wait for the device and sum over ranks. Raises TrainError when the loss is no number."""
        dist.all_reduce(losses)
        loss = float(losses[0] / losses[1] * self.world)
        figures = {"step": float(self.step), "loss": loss, "grad_norm": float(norm)} | tally.reduced().read()
        figures |= {"lr": self.optimiser.param_groups[0]["lr"], "seconds": round(time.monotonic() - began, 3)}
        if not math.isfinite(loss) or not math.isfinite(figures["grad_norm"]):
            self._check_samples()
            raise TrainError(
                f"step {self.step}: loss: found {loss}, gradient norm {figures['grad_norm']}, want finite numbers; "
                "lower lr, or train in float32; the run's last checkpoint is from before."
            )
        early = self.step <= max(1, self.steps // 10) and self.step <= self.per_epoch[0]
        figures["leak_alarm"] = float(early and figures["accuracy/all"] > _LEAK)
        if figures["leak_alarm"] and self.rank == 0:
            self.console.print(
                f"LEAK ALARM at step {self.step}: accuracy {figures['accuracy/all']:.3f} on data seen for the first "
                f"time, want below {_LEAK}: the drafter sees its own labels, or the data repeats itself.",
                style="bold red",
            )
        return figures

    def _check_samples(self) -> None:
        """Raise TrainError naming the sample if the data, and not the training, brought the NaN."""
        since = next((n for n in range(self.step - 1, 0, -1) if self._logs(n)), 0)
        for step in range(since, self.step):
            epoch, first = self._position(step)
            for micro in range(first, min(first + self.recipe.accumulation, self.batches.per_epoch[epoch])):
                for row in self.batches.indices(epoch, micro):
                    for sample in self.dataset.fetch(row):
                        check_sample(sample)

    def _record(self, figures: dict[str, float], writer: Any) -> None:
        if self.rank != 0:
            return
        with (self.out / CURVE).open("a") as curve:
            curve.write(json.dumps(figures) + "\n")
        if writer is not None:
            for name, value in figures.items():
                if name != "step":
                    writer.add_scalar(name, value, self.step)

    def _scalars(self) -> Any:
        if not self.recipe.tensorboard or self.rank != 0:
            return None
        try:
            from tensorboardX import SummaryWriter
        except ImportError as e:
            raise TrainError(
                "tensorboard: found no tensorboardX, want it; pip install tensorboardX, or set tensorboard: false."
            ) from e
        # Points past the checkpoint are drawn again.
        return SummaryWriter(str(self.out / "tensorboard"), purge_step=self.step + 1, flush_secs=10)

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console, disable=self.rank != 0)

    def _save(self) -> None:
        save_checkpoint(self.out, self.step, self.model, self.optimiser, {"world": self.world})


def _start_ranks() -> torch.device:
    """Join torchrun's group, or make one of our own."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda", local) if cuda else torch.device("cpu")


def _shard(drafter: Drafter, device: torch.device, dtype: torch.dtype) -> Any:
    """FSDP2 over all ranks, a layer at a time: masters and gradients in fp32, compute in ``dtype``."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # A layer's inputs are in `dtype` already, except the rotary tables, which must not be rounded.
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in drafter.layers:
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    return fully_shard(drafter, mesh=mesh, mp_policy=policy)


def _check_target(fingerprint: dict[str, Any], target: Path) -> None:
    """Features of one model and the head of another do not belong together, and nothing else would show it.

    A quantised target is captured from other bytes than its head is read from, so its weights cannot be compared.
    """
    if fingerprint.get("quantization") != "none" or not target.is_dir():
        return
    found, want = hash_weights(target), fingerprint.get("target_weights")
    if found != want:
        raise TrainError(
            f"{target}: weights: found hash {found}, want {want} as of the target that the data was captured from; "
            "train with that target, or capture again."
        )


def _difference(have: Any, want: Any) -> str:
    """The first key in which two JSON values differ, in words."""
    if isinstance(have, dict) and isinstance(want, dict):
        for key in sorted(set(have) | set(want)):
            if have.get(key) != want.get(key):
                return f"{key}: found {_difference(have.get(key), want.get(key))}"
    return f"found {have} in the run, want {want} as given now".removeprefix("found ")


def load_spec(run: str | Path) -> tuple[DrafterSpec, dict[str, Any]]:
    """The drafter and the whole ``run.json`` of a run. Raises TrainError."""
    file = Path(run) / RUN
    try:
        about: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise TrainError(f"{file}: found {type(e).__name__}, want a run of fit; give its --out folder.") from e
    fields = about["drafter"]
    for name in ("target_layer_ids", "layer_types", "warnings"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return DrafterSpec(**fields), about
