"""The hybrid target: config as both transformers and SGLang read it, the module, and the directory that is served."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import TrainError
from . import delta_rule
from .settings import TargetShape
from .tokenizer import END_OF_TEXT, IM_END, chat_tokenizer, token_id

FULL_ATTENTION_INTERVAL = 4


def config(shape: TargetShape, vocab_size: int, eos: int) -> dict[str, Any]:
    """config.json. SGLang reads `full_attention_interval` (transformers drops it), transformers `layer_types`."""
    if shape.num_hidden_layers % FULL_ATTENTION_INTERVAL:
        raise TrainError(
            f"target.num_hidden_layers: found {shape.num_hidden_layers}, want a multiple of 4; correct it."
        )
    layer_types = ["linear_attention"] * (FULL_ATTENTION_INTERVAL - 1) + ["full_attention"]
    rotary = shape.head_dim // 4  # of each head, a quarter; M-RoPE's three parts are the halves of its pairs
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        **asdict(shape),
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "layer_types": layer_types * (shape.num_hidden_layers // FULL_ATTENTION_INTERVAL),
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [rotary // 2 - 2 * (rotary // 8), rotary // 8, rotary // 8],
        },
        "tie_word_embeddings": True,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }


def build(shape: TargetShape, vocab_size: int, eos: int, seed: int = 0) -> nn.Module:
    """transformers' module with fresh fp32 weights; its gated delta rule is :mod:`.delta_rule`'s, in this process."""
    if not torch.version.cuda:
        from sglang_dflash.cpu.stand_in import declare_torchvision_ops

        declare_torchvision_ops()
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5

    delta_rule.install(modeling_qwen3_5)
    torch.manual_seed(seed)
    values = config(shape, vocab_size, eos)
    values.pop("full_attention_interval")
    model: nn.Module = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**values, "dtype": "float32"}))
    return model.float()


def write(
    directory: Path, shape: TargetShape, vocab_size: int, weights: dict[str, Tensor], tokenizer: Path, facts: Any
) -> None:
    """Write the served directory, whole or not at all: bf16 weights, config, tokenizer, and how it was trained.

    The tied head is left out. ``facts`` become `training.json`.
    """
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    ids = chat_tokenizer(tokenizer)
    end, im_end = token_id(ids, END_OF_TEXT), token_id(ids, IM_END)
    kept = {n: w.to("cpu", torch.bfloat16).contiguous() for n, w in weights.items() if n != "lm_head.weight"}
    save_file(kept, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)  # the library makes it the owner's alone
    (temporary / "config.json").write_text(json.dumps(config(shape, vocab_size, end), indent=1))
    generation = {"eos_token_id": [im_end, end], "pad_token_id": end}
    (temporary / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (temporary / "training.json").write_text(json.dumps(facts, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, temporary / name)
    old = directory.with_name(directory.name + ".old")
    if directory.exists():
        os.replace(directory, old)
    os.replace(temporary, directory)
    shutil.rmtree(old, ignore_errors=True)
