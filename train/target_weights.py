"""The three tensors of the target that training needs: embeddings, head and final norm. Frozen, never saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import TrainError

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"]
_GEMMA_NORM = ("qwen3_5", "qwen3_next", "gemma")  # model types whose norms multiply by 1 + weight
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TargetWeights:
    """Frozen tensors of one target. ``lm_head is embedding`` where the target ties them."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]
    final_norm: Tensor  # [H]
    eps: float
    gemma_norm: bool

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetWeights:
        embedding = self.embedding.to(device, dtype)
        head = embedding if self.lm_head is self.embedding else self.lm_head.to(device, dtype)
        return TargetWeights(embedding, head, self.final_norm.to(device), self.eps, self.gemma_norm)

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[...] -> [..., H]``."""
        return torch.nn.functional.embedding(token_ids, self.embedding)


def load_target_weights(path: str | Path) -> TargetWeights:
    """Read them from a Hugging Face model directory. Raises TrainError naming what is missing."""
    root = Path(path)
    try:
        config: dict[str, Any] = json.loads((root / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise TrainError(f"{root / 'config.json'}: found {type(e).__name__}, want the target's; check the path.") from e
    text = config.get("text_config", config)
    if not isinstance(width := text.get("hidden_size"), int):
        raise TrainError(
            f"{root / 'config.json'}: hidden_size: found {width!r}, want an integer; give a causal language model."
        )
    files = _where(root)
    embedding = _read(root, files, [f"{prefix}embed_tokens.weight" for prefix in _PREFIXES])
    # Older configs leave the key out where a family ties by default; such a checkpoint then has no head.
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is None:
        tied = not any(name in files for name in _HEADS)
    head = embedding if tied else _read(root, files, _HEADS)
    norm = _read(root, files, [f"{prefix}norm.weight" for prefix in _PREFIXES])
    if norm.dtype not in _FLOATS or tuple(norm.shape) != (width,):
        raise TrainError(
            f"{root}: norm: found {norm.dtype} {list(norm.shape)}, want floats [{width}]; give its target."
        )
    for name, tensor in (("embed_tokens", embedding), ("lm_head", head)):
        if tensor.dtype not in _FLOATS or tensor.ndim != 2 or tensor.shape[1] != width:
            raise TrainError(
                f"{root}: {name}: found {tensor.dtype} {list(tensor.shape)}, want a float matrix "
                f"[vocabulary, {width}]; give the unquantised target."
            )
    gemma = str(text.get("model_type", "")).startswith(_GEMMA_NORM)
    return TargetWeights(embedding, head, norm, float(text.get("rms_norm_eps", 1e-6)), gemma)


def _where(root: Path) -> dict[str, Path]:
    """Tensor name -> file, from the headers."""
    where: dict[str, Path] = {}
    for file in sorted(root.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as e:
            raise TrainError(f"{file}: found a damaged file ({e}), want safetensors; download it again.") from e
    if not where:
        raise TrainError(f"{root}: found no *.safetensors, want the target's weights; download the whole model.")
    return where


def _read(root: Path, files: dict[str, Path], names: list[str]) -> Tensor:
    for name in names:
        if name in files:
            with safe_open(str(files[name]), framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor
    raise TrainError(f"{root}: found no {names[0]} (nor {', '.join(names[1:])}), want it; give a whole causal model.")
