"""A tiny target and drafter with random weights, for tests that need any pair and no training.

The target has the architecture of Qwen3.5/3.6 (gated delta net and full attention), the drafter that of
DFlash (block size 8). Nothing is trained: the text is noise in printable ASCII, and the drafter agrees with
the target about as often as chance. The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 4, 2, 64
LINEAR_HEADS, LINEAR_KEY_HEADS, LINEAR_DIM, CONV = 4, 2, 32, 4
MAX_LENGTH = 2048
BLOCK_SIZE = 8
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
VOCABULARY = 320  # 256 bytes, the special tokens, and unused rows up to a multiple of 64
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Weights = dict[str, torch.Tensor]


def byte_vocabulary() -> dict[str, int]:
    """GPT-2's printable name of each byte, and the special tokens, to token ids 0..259."""
    from tokenizers.pre_tokenizers import ByteLevel

    return {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL_TOKENS])}


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: one token a byte, any text in, the same text out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def target_config() -> dict[str, Any]:
    """config.json of the target. SGLang reads `full_attention_interval`, transformers `layer_types`."""
    eos = byte_vocabulary()[SPECIAL_TOKENS[0]]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_num_key_heads": LINEAR_KEY_HEADS,
        "linear_num_value_heads": LINEAR_HEADS,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }


def target_weights(seed: int) -> Weights:
    """Random fp32 weights under the names of transformers' Qwen3_5ForCausalLM; matrices are [out, in].

    Rows of the head that are not a printable ASCII byte are zero: their logit is 0, the best of some ninety
    random ones is above it, and so greedy text prints. The gated delta net's decay is weak, so that the
    text depends on the whole prompt.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    key, value = LINEAR_KEY_HEADS * LINEAR_DIM, LINEAR_HEADS * LINEAR_DIM
    weights: Weights = {
        "model.embed_tokens.weight": rand(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": torch.zeros(HIDDEN),  # this family scales by 1 + weight
        "lm_head.weight": torch.zeros(VOCABULARY, HIDDEN),
    }
    printable = [i for token, i in byte_vocabulary().items() if len(token) == 1 and "!" <= token <= "~"]
    printable.append(byte_vocabulary()["Ġ"])  # the space
    weights["lm_head.weight"][printable] = rand(len(printable), HIDDEN)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        weights |= {
            p + "input_layernorm.weight": torch.zeros(HIDDEN),
            p + "post_attention_layernorm.weight": torch.zeros(HIDDEN),
            p + "mlp.gate_proj.weight": rand(INTERMEDIATE, HIDDEN),
            p + "mlp.up_proj.weight": rand(INTERMEDIATE, HIDDEN),
            p + "mlp.down_proj.weight": rand(HIDDEN, INTERMEDIATE),
        }
        if i % 4 == 3:
            weights |= {
                p + "self_attn.q_proj.weight": rand(HEADS * HEAD_DIM * 2, HIDDEN),  # query and output gate
                p + "self_attn.k_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
                p + "self_attn.v_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
                p + "self_attn.o_proj.weight": rand(HIDDEN, HEADS * HEAD_DIM),
                p + "self_attn.q_norm.weight": torch.zeros(HEAD_DIM),
                p + "self_attn.k_norm.weight": torch.zeros(HEAD_DIM),
            }
        else:
            decay = torch.rand(LINEAR_HEADS, generator=generator) * 0.05 + 0.001
            weights |= {
                p + "linear_attn.in_proj_qkv.weight": rand(2 * key + value, HIDDEN),
                p + "linear_attn.in_proj_z.weight": rand(value, HIDDEN),
                p + "linear_attn.in_proj_b.weight": rand(LINEAR_HEADS, HIDDEN),
                p + "linear_attn.in_proj_a.weight": rand(LINEAR_HEADS, HIDDEN),
                p + "linear_attn.conv1d.weight": rand(2 * key + value, 1, CONV, scale=1 / math.sqrt(CONV)),
                p + "linear_attn.dt_bias": torch.ones(LINEAR_HEADS),
                p + "linear_attn.A_log": decay.log(),
                p + "linear_attn.norm.weight": torch.ones(LINEAR_DIM),
                p + "linear_attn.out_proj.weight": rand(HIDDEN, value),
            }
    return weights


def drafter_config() -> dict[str, Any]:
    """config.json of the drafter: one layer, block size 8, context features of target layers 1 and 2."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layer_types": ["full_attention"],
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "block_size": BLOCK_SIZE,
        "num_target_layers": LAYERS,
        "dflash_config": {
            "block_size": BLOCK_SIZE,
            "mask_token_id": byte_vocabulary()["<|mask|>"],
            "target_layer_ids": [1, 2],
        },
    }


def drafter_weights(seed: int) -> Weights:
    """Random fp32 weights under the drafter's names; embeddings and head are the target's and not stored."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    p = "layers.0."
    return {
        "fc.weight": rand(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        p + "input_layernorm.weight": torch.ones(HIDDEN),
        p + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        p + "self_attn.q_proj.weight": rand(HEADS * HEAD_DIM, HIDDEN),
        p + "self_attn.k_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
        p + "self_attn.v_proj.weight": rand(KV_HEADS * HEAD_DIM, HIDDEN),
        p + "self_attn.o_proj.weight": rand(HIDDEN, HEADS * HEAD_DIM),
        p + "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        p + "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        p + "mlp.gate_proj.weight": rand(INTERMEDIATE, HIDDEN),
        p + "mlp.up_proj.weight": rand(INTERMEDIATE, HIDDEN),
        p + "mlp.down_proj.weight": rand(HIDDEN, INTERMEDIATE),
    }


def write(directory: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write both models below ``directory``; returns (target, drafter)."""
    target, drafter = directory / "target", directory / "drafter"
    for path, config, weights in (
        (target, target_config(), target_weights(seed)),
        (drafter, drafter_config(), drafter_weights(seed + 1)),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(target)
    return target, drafter
