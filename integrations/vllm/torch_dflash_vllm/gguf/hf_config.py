"""What a GGUF file says about a model, in the words of ``config.json``."""

from typing import Any

from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFFile, Tokenizer
from torch_dflash.models import DenseConfig, Qwen35Config

__all__ = ["QUANTIZATION", "generation_config", "hf_config"]

QUANTIZATION = "dflash_gguf"  # of the quantization method, the load format and the config's mark

_ARCHITECTURES = {
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "llama": ("LlamaForCausalLM", "llama"),
}
# general.sampling.*: what the model's makers recommend, under vLLM's names
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def hf_config(config: DenseConfig | Qwen35Config, file: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` that builds vLLM's own model for a file.

    The rope is written without scaling: context length and frequencies are taken from the file,
    where the loader puts them in place.

    Args:
        config: of the file.
        file: open.

    Raises:
        CheckpointError: vLLM's model has no place for something that the file holds.
    """
    architecture, model_type = _ARCHITECTURES[config.arch]
    partial = config.rope.rotary_dim / config.head_dim
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": partial,
        },
        "quantization_config": {
            "quant_method": QUANTIZATION,
            "file": str(file.path.resolve()),
        },
    }
    for name in ("bos", "eos", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if isinstance(value := file.metadata.get(key), int):
            values["pad_token_id" if name == "padding" else f"{name}_token_id"] = value
    return values | (_hybrid(config) if isinstance(config, Qwen35Config) else _dense(config, file))


def _hybrid(config: Qwen35Config) -> dict[str, Any]:
    names = {"gdn": "linear_attention", "full": "full_attention"}
    return {
        "layer_types": [names[kind] for kind in config.layer_kinds],
        "partial_rotary_factor": config.rope.rotary_dim / config.head_dim,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": config.conv_kernel,
        "linear_num_key_heads": config.num_key_heads,
        "linear_key_head_dim": config.key_head_dim,
        "linear_num_value_heads": config.num_value_heads,
        "linear_value_head_dim": config.value_head_dim,
        "mamba_ssm_dtype": "float32",
    }


def _dense(config: DenseConfig, file: GGUFFile) -> dict[str, Any]:
    if config.arch == "llama":
        # vLLM's Llama reads attention_bias for the output projection and qkv_bias for the rest
        return {"attention_bias": config.output_bias, "qkv_bias": config.attention_bias}
    if config.output_bias:
        raise CheckpointError(
            f"{file.path}: vLLM's {_ARCHITECTURES[config.arch][0]} must do without a bias of the "
            "output projection, got blk.0.attn_output.bias"
        )
    return {"attention_bias": config.attention_bias}


def generation_config(file: GGUFFile, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The ``generation_config.json`` of a file: what ends a generation, and recommended sampling.

    Args:
        file: open.
        tokenizer: of the file, whose end tokens are known by name as well; None: only by key.
    """
    if tokenizer is not None:
        ends = sorted(tokenizer.eos_ids)
    else:
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        ends = sorted({v for k in keys if isinstance(v := file.metadata.get(k), int)})
    values: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            values[name] = value
    return values
