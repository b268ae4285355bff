"""Tiny random models for tests: fp32 targets of three architectures and DFlash drafters, a few MB each.

Every maker writes a complete Hugging Face directory (weights, config, byte-level tokenizer with a chat
template) and is deterministic in its `seed`. Tokens 0..255 are bytes; 256..259 are `<|endoftext|>`,
`<|im_start|>`, `<|im_end|>` and `<|mask|>`; the rest of the 512 are fillers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.cpu.stand_in import declare_torchvision_ops

VOCAB = 512
EOS = 256
MASK = 259
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Wide enough that greedy text varies and top-1 margins stay far above fp32 noise.
_SCALE = 0.2
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": _SCALE,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": EOS,
}


def write_tokenizer(directory: Path) -> None:
    """Write the byte-level tokenizer described in the module docstring into `directory`."""
    declare_torchvision_ops()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIALS]
    symbols += [f"<|r{i}|>" for i in range(len(symbols), VOCAB)]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIALS[0],
        pad_token=_SPECIALS[0],
        additional_special_tokens=list(_SPECIALS[1:]),
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _write(model_class: Any, config: Any, directory: Path | str, seed: int) -> Path:
    path = Path(directory)
    torch.manual_seed(seed)
    model_class(config).to(torch.float32).save_pretrained(path)
    write_tokenizer(path)
    return path


def make_dense(directory: Path | str, seed: int = 0) -> Path:
    """Qwen3, 4 layers, grouped-query attention with QK norm."""
    declare_torchvision_ops()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_COMMON, num_hidden_layers=4, head_dim=32)
    return _write(Qwen3ForCausalLM, config, directory, seed)


def make_llama(directory: Path | str, seed: int = 2) -> Path:
    """Llama, 4 layers, no QK norm."""
    declare_torchvision_ops()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_COMMON, num_hidden_layers=4, head_dim=32)
    return _write(LlamaForCausalLM, config, directory, seed)


def make_hybrid(directory: Path | str, seed: int = 1) -> Path:
    """Qwen3.5 text, 8 layers: gated delta net, with gated full attention in layers 3 and 7."""
    declare_torchvision_ops()
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **_COMMON,
        num_hidden_layers=8,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        full_attention_interval=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )
    path = _write(Qwen3_5ForCausalLM, config, directory, seed)
    # transformers drops the field on saving; SGLang derives the layer pattern from it.
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | {"full_attention_interval": 4}, indent=1))
    return path


def make_drafter(
    directory: Path | str,
    target: Path | str,
    block_size: int = 8,
    target_layer_ids: list[int] | None = None,
    num_layers: int = 2,
    sliding_window: int | None = None,
    seed: int = 7,
) -> Path:
    """A DFlash drafter in z-lab's format for the target model directory `target`.

    Reads width, vocabulary and depth from the target's config. `target_layer_ids` default to three layers
    spread over the target; `sliding_window` (keys, itself included) makes every drafter layer but the last
    windowed. Embeddings and the output head are the target's, so the file holds neither.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    goal = json.loads((Path(target) / "config.json").read_text())
    hidden, target_layers = goal["hidden_size"], goal["num_hidden_layers"]
    layer_ids = target_layer_ids or sorted({1, target_layers // 2 - 1, target_layers - 2})
    heads, kv_heads, head_dim, inner = 4, 2, 32, 2 * hidden
    layer_types = ["full_attention"] * num_layers
    if sliding_window is not None:
        layer_types[:-1] = ["sliding_attention"] * (num_layers - 1)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": goal["vocab_size"],
        "max_position_embeddings": goal["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "block_size": block_size,
        "num_target_layers": target_layers,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "layer_types": layer_types,
        "use_sliding_window": sliding_window is not None,
        "sliding_window": sliding_window,
        "eos_token_id": EOS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": layer_ids, "block_size": block_size},
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.05

    weights = {"fc.weight": matrix(hidden, len(layer_ids) * hidden)}
    weights |= {name: torch.ones(hidden) for name in ("hidden_norm.weight", "norm.weight")}
    for i in range(num_layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        weights |= {
            attention + "q_proj.weight": matrix(heads * head_dim, hidden),
            attention + "k_proj.weight": matrix(kv_heads * head_dim, hidden),
            attention + "v_proj.weight": matrix(kv_heads * head_dim, hidden),
            attention + "o_proj.weight": matrix(hidden, heads * head_dim),
            attention + "q_norm.weight": torch.ones(head_dim),
            attention + "k_norm.weight": torch.ones(head_dim),
            mlp + "gate_proj.weight": matrix(inner, hidden),
            mlp + "up_proj.weight": matrix(inner, hidden),
            mlp + "down_proj.weight": matrix(hidden, inner),
            f"layers.{i}.input_layernorm.weight": torch.ones(hidden),
            f"layers.{i}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, path / "model.safetensors")
    return path
