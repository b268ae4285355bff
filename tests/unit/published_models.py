"""Published shapes of the models that serve_configs/ names, cut to the fields that argument resolution reads.

Sources: the config.json of each checkpoint. Of the drafters, Qwen3.6-27B's and the 35B's were read; of the
other three the layer ids and block size are taken from their cards and from code that uses them, the rest
from their targets: enough to resolve arguments, not to load weights.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _qwen3_5(text_type: str, layers: int, out_hidden_size: int, **text: Any) -> Config:
    moe = "moe" in text_type
    return {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": text_type.removesuffix("_text"),
        "tie_word_embeddings": False,
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "text_config": {
            "model_type": text_type,
            "dtype": "bfloat16",
            "num_hidden_layers": layers,
            "full_attention_interval": 4,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            "head_dim": 256,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "vocab_size": 248320,
            "eos_token_id": 248044,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "tie_word_embeddings": False,
            **text,
        },
        "vision_config": {
            "model_type": text_type.removesuffix("_text"),
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": out_hidden_size,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _drafter(
    num_target_layers: int, ids: list[int], mask: int, block_size: int = 16, layers: int = 5, **shape: Any
) -> Config:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "head_dim": 128,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "max_position_embeddings": 262144,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": num_target_layers,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
        **shape,
    }


_QWEN_27B = _qwen3_5(
    "qwen3_5_text",
    64,
    5120,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=24,
    num_key_value_heads=4,
    linear_num_value_heads=48,
)
_QWEN_27B_DRAFTER = _drafter(
    64,
    [1, 16, 31, 46, 61],
    248070,
    hidden_size=5120,
    intermediate_size=17408,
    num_key_value_heads=8,
    vocab_size=248320,
)

MODELS: dict[str, Config] = {
    "Qwen/Qwen3.6-27B": _QWEN_27B,
    "Qwen/Qwen3.5-27B": _QWEN_27B,
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5(
        "qwen3_5_moe_text",
        40,
        2048,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": [128001, 128008, 128009],
    },
    "z-lab/Qwen3.6-27B-DFlash": {
        **_QWEN_27B_DRAFTER,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
    "z-lab/Qwen3.5-27B-DFlash": _QWEN_27B_DRAFTER,
    "z-lab/Qwen3.5-35B-A3B-DFlash": _drafter(
        40,
        [1, 10, 19, 28, 37],
        248070,
        layers=8,
        hidden_size=2048,
        intermediate_size=6144,
        num_key_value_heads=4,
        vocab_size=248320,
    ),
    "z-lab/Qwen3-8B-DFlash-b16": _drafter(
        36,
        [1, 9, 17, 25, 33],
        151669,
        hidden_size=4096,
        intermediate_size=12288,
        num_key_value_heads=8,
        vocab_size=151936,
        rope_theta=1000000,
    ),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": _drafter(
        32,
        [1, 8, 15, 22, 29],
        128255,
        block_size=10,
        hidden_size=4096,
        intermediate_size=14336,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_theta=500000,
    ),
}
