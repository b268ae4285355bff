"""Checkpoints to resume from: fp32 masters, optimiser state and position. Not what is served: that is `export`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from .disk import write_atomically
from .errors import TrainError

STATE = "state.json"
KEEP = 2


def save_checkpoint(run: Path, step: int, model: nn.Module, optimiser: Optimizer, state: dict[str, Any]) -> None:
    """Write ``run/checkpoints/step-NNNNNNN``, complete or absent; older ones but one are removed. Collective."""
    folder = run / "checkpoints"
    final, part = folder / f"step-{step:07d}", folder / f"step-{step:07d}.part"
    leader = dist.get_rank() == 0
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimiser)
    dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=str(part))
    dist.barrier()
    if leader:
        write_atomically(part / STATE, json.dumps(state | {"step": step}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        for old in checkpoints(run)[:-KEEP]:
            shutil.rmtree(old)
    dist.barrier()


def checkpoints(run: Path) -> list[Path]:
    """Complete ones, oldest first."""
    found = (p for p in (run / "checkpoints").glob("step-*") if p.suffix != ".part" and (p / STATE).exists())
    return sorted(found)


def read_state(checkpoint: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    return value


def load_checkpoint(checkpoint: Path, model: nn.Module, optimiser: Optimizer) -> None:
    """Restore weights and optimiser into a model of the same shape. Collective. Raises TrainError."""
    weights, moments = get_state_dict(model, optimiser)
    try:
        dcp.load({"model": weights, "optimiser": moments}, checkpoint_id=str(checkpoint))
    except Exception as e:  # its errors have no common base
        why = " ".join(str(e).split())[:300]
        raise TrainError(f"{checkpoint}: found {type(e).__name__} ({why}), want a whole checkpoint; remove it.") from e
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)
