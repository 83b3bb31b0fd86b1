"""Configs of published drafters, for what is made in their dimensions."""

from typing import Any, Final

__all__ = ["DFLASH2_27B"]

# z-lab/Qwen3.8-27B-DFlash2
DFLASH2_27B: Final[dict[str, Any]] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "is_causal": False,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "num_target_layers": 64,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
