"""The embedded hybrid as the Hugging Face folder that unmodified vLLM loads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import decoders
from torch import Tensor

from torch_dflash.gguf import GGUFFile, tokenizer_from_gguf
from torch_dflash.load import ASSETS
from torch_dflash.models.config import Qwen35Config
from torch_dflash.models.from_gguf import read_target_config
from torch_dflash.models.rows import grouped_v_heads

NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
V_ROWS = {"attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias"}
QKV_ROWS = {"attn_qkv.weight", "ssm_conv1d.weight"}


def grouped(config: Qwen35Config, x: Tensor) -> Tensor:
    """V heads along the first axis, from the file's tiled order."""
    heads = x.unflatten(0, (config.num_value_heads, -1))
    return heads[grouped_v_heads(config.num_key_heads, config.num_value_heads)].flatten(0, 1)


def convert(config: Qwen35Config, name: str, x: Tensor) -> tuple[str, Tensor]:
    """One tensor of the file under its published name, as published checkpoints hold it."""
    if name in TOP:
        return TOP[name], x - 1 if "norm" in name else x
    _, index, rest = name.split(".", 2)
    if rest in V_ROWS:
        x = grouped(config, x)
    elif rest in QKV_ROWS:
        keys = 2 * config.key_size
        x = torch.cat([x[:keys], grouped(config, x[keys:])])
    elif rest == "ssm_out.weight":
        x = grouped(config, x.t()).t()
    if rest == "ssm_a":
        x = (-x).log()
    elif rest == "ssm_conv1d.weight":
        x = x[:, None]
    elif "norm" in rest and rest != "ssm_norm.weight":
        x = x - 1
    return f"model.layers.{index}.{NAMES[rest]}", x.contiguous()


def write_hf_target(folder: Path, gguf: Path = ASSETS / "target.gguf") -> Path:
    """Write config, float32 safetensors and tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with GGUFFile.open(gguf) as file:
        c = read_target_config(file)
        assert isinstance(c, Qwen35Config)
        dense = {n: file.tensor(n).to_dense().float() for n in file.tensors}
        tokenizer = tokenizer_from_gguf(file)
        template = file.metadata.get("tokenizer.chat_template")
        names = file.metadata["tokenizer.ggml.tokens"]
    save_file(dict(convert(c, n, x) for n, x in dense.items()), folder / "model.safetensors")
    fraction = c.rope.rotary_dim / c.head_dim
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "attention_bias": False,
        "linear_num_key_heads": c.num_key_heads,
        "linear_num_value_heads": c.num_value_heads,
        "linear_key_head_dim": c.key_head_dim,
        "linear_value_head_dim": c.value_head_dim,
        "linear_conv_kernel_dim": c.conv_kernel,
        "layer_types": [
            "linear_attention" if k == "gdn" else "full_attention" for k in c.layer_kinds
        ],
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": c.context_length,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "partial_rotary_factor": fraction,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope.theta,
            "partial_rotary_factor": fraction,
            "mrope_interleaved": True,
            "mrope_section": list(c.rope_sections[:3]),
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    engine = tokenizer._engine
    engine.decoder = decoders.ByteLevel()
    engine.save(str(folder / "tokenizer.json"))
    eos = tokenizer.eos_id
    assert eos is not None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names[eos],
        "pad_token": names[eos],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
