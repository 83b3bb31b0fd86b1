"""Random tiny models, written on the fly as the files that users have."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from ..gguf import QuantTensor
from ..gguf.writer import Typed, write_gguf

__all__ = ["dense_gguf_from_hf", "random_quant", "tiny_drafter", "tiny_hybrid"]

_Q = GGMLQuantizationType
# Where a quant keeps its half scales, and the factor that makes random codes small and centred.
_SCALES = {
    _Q.Q4_0: [(0, 1 / 4.6)],
    _Q.Q8_0: [(0, 1 / 74.0)],
    _Q.Q4_K: [(0, 1 / 190.0), (2, 7.5 / 190.0)],
    _Q.Q5_K: [(0, 1 / 390.0), (2, 15.5 / 390.0)],
    _Q.Q6_K: [(208, 1 / 1370.0)],
    _Q.IQ4_XS: [(0, 1 / 1150.0)],
    _Q.Q2_K: [(80, 1 / 14.0), (82, 1.5 / 14.0)],
    _Q.Q3_K: [(108, 1 / 43.0)],
    _Q.IQ2_XXS: [(0, 1 / 53.0)],
    _Q.IQ2_XS: [(0, 1 / 56.0)],
    _Q.IQ3_XXS: [(0, 1 / 143.0)],
    _Q.IQ3_S: [(0, 1 / 140.0)],
}
BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [
    chr(256 + n) for n in range(68)
]  # the byte-level alphabet of GPT-2's BPE


def random_quant(
    rows: int, columns: int, ggml_type: int, generator: torch.Generator, std: float
) -> QuantTensor:
    """Random weights of about the given standard deviation, on the generator's device.

    Args:
        rows, columns: shape.
        ggml_type: F32, F16, BF16, Q4_0, Q8_0, Q2_K to Q6_K, IQ2_XXS, IQ2_XS, IQ3_XXS, IQ3_S or
            IQ4_XS.
        generator: source of randomness.
        std: of the values.
    """
    kind, device = _Q(ggml_type), generator.device
    if kind in (_Q.F32, _Q.F16, _Q.BF16):
        dtype = {_Q.F32: torch.float32, _Q.F16: torch.float16, _Q.BF16: torch.bfloat16}[kind]
        return QuantTensor.from_tensor(
            torch.randn(rows, columns, generator=generator, device=device).mul(std).to(dtype)
        )
    elems, size = GGML_QUANT_SIZES[kind]
    quants = rows, columns // elems
    packed = torch.randint(
        0, 256, (*quants, size), dtype=torch.uint8, generator=generator, device=device
    )
    for offset, factor in _SCALES[kind]:
        d = torch.rand(*quants, 1, generator=generator, device=device).add(0.5).mul(std * factor)
        packed[..., offset : offset + 2] = d.to(torch.float16).view(torch.uint8)
    return QuantTensor(packed.view(rows, -1), int(kind), (rows, columns))


def tokenizer_metadata(vocab: int, mask: int | None = None) -> dict[str, Typed]:
    """A byte-level BPE of ``vocab`` tokens: 256 bytes, one merge, fillers, then special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    tokens = [*BYTES, BYTES[0] + BYTES[1]]
    tokens += [f"<filler{n}>" for n in range(vocab - len(tokens) - len(special))] + special
    types = [1] * 257 + [4] * (vocab - 257 - len(special)) + [3] * len(special)
    return {
        "tokenizer.ggml.model": Typed("string", "gpt2"),
        "tokenizer.ggml.pre": Typed("string", "qwen35"),
        "tokenizer.ggml.tokens": Typed("array[string]", tokens),
        "tokenizer.ggml.token_type": Typed("array[int32]", types),
        "tokenizer.ggml.merges": Typed("array[string]", [f"{BYTES[0]} {BYTES[1]}"]),
        "tokenizer.ggml.eos_token_id": Typed("uint32", vocab - 4),
        "tokenizer.ggml.mask_token_id": Typed("uint32", vocab - 1 if mask is None else mask),
        "tokenizer.ggml.add_bos_token": Typed("bool", False),
    }


def tiny_hybrid(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 6,
    interval: int = 3,
    hidden: int = 256,
    vocab: int = 512,
    ggml_type: int = int(_Q.Q8_0),
    types: Mapping[str, int] | None = None,
) -> Path:
    """Write a random ``qwen35`` target.

    Args:
        path: file to write.
        seed: of the weights.
        layers: decoder layers; every ``interval``-th is full attention.
        interval: see above.
        hidden: hidden and FFN width, a multiple of 256 for K-quants.
        vocab: vocabulary, at least 300.
        ggml_type: type of every matrix not named in ``types``.
        types: tensor-name suffix (``attn_qkv.weight``) to type.
    """
    g = torch.Generator().manual_seed(seed)
    heads, kv_heads, head_dim = 2, 1, 128
    nk, nv, dk, taps = 2, 4, 64, 4
    channels, value = 2 * nk * dk + nv * dk, nv * dk
    tensors: dict[str, QuantTensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        suffix = name.split(".", 2)[-1] if name.startswith("blk.") else name
        kind = (types or {}).get(suffix, ggml_type)
        tensors[name] = random_quant(rows, columns, kind, g, gain * columns**-0.5)

    def vector(name: str, values: Tensor) -> None:
        tensors[name] = QuantTensor.from_tensor(values.float().contiguous())

    def norm(name: str, size: int) -> None:
        vector(name, torch.rand(size, generator=g).add(0.5))

    matrix("token_embd.weight", vocab, hidden, hidden**0.5)
    for i in range(layers):
        b = f"blk.{i}."
        norm(b + "attn_norm.weight", hidden)
        norm(b + "post_attention_norm.weight", hidden)
        if (i + 1) % interval:
            matrix(b + "attn_qkv.weight", channels, hidden)
            matrix(b + "attn_gate.weight", value, hidden)
            matrix(b + "ssm_beta.weight", nv, hidden)
            matrix(b + "ssm_alpha.weight", nv, hidden)
            matrix(b + "ssm_out.weight", hidden, value, 2.0)
            vector(b + "ssm_conv1d.weight", torch.randn(channels, taps, generator=g).mul(0.5))
            vector(b + "ssm_a", -torch.rand(nv, generator=g).add(0.05))
            vector(b + "ssm_dt.bias", torch.randn(nv, generator=g))
            norm(b + "ssm_norm.weight", dk)
        else:
            matrix(b + "attn_q.weight", 2 * heads * head_dim, hidden)
            matrix(b + "attn_k.weight", kv_heads * head_dim, hidden)
            matrix(b + "attn_v.weight", kv_heads * head_dim, hidden)
            matrix(b + "attn_output.weight", hidden, heads * head_dim, 2.0)
            norm(b + "attn_q_norm.weight", head_dim)
            norm(b + "attn_k_norm.weight", head_dim)
        matrix(b + "ffn_gate.weight", hidden, hidden)
        matrix(b + "ffn_up.weight", hidden, hidden)
        matrix(b + "ffn_down.weight", hidden, hidden, 2.0)
    norm("output_norm.weight", hidden)
    matrix("output.weight", vocab, hidden, 4.0)
    key = "qwen35."
    metadata = {
        key + "block_count": Typed("uint32", layers),
        key + "context_length": Typed("uint32", 4096),
        key + "embedding_length": Typed("uint32", hidden),
        key + "feed_forward_length": Typed("uint32", hidden),
        key + "attention.head_count": Typed("uint32", heads),
        key + "attention.head_count_kv": Typed("uint32", kv_heads),
        key + "attention.key_length": Typed("uint32", head_dim),
        key + "attention.value_length": Typed("uint32", head_dim),
        key + "attention.layer_norm_rms_epsilon": Typed("float32", 1e-6),
        key + "rope.freq_base": Typed("float32", 1e7),
        key + "rope.dimension_count": Typed("uint32", 64),
        key + "rope.dimension_sections": Typed("array[int32]", [11, 11, 10, 0]),
        key + "ssm.conv_kernel": Typed("uint32", taps),
        key + "ssm.state_size": Typed("uint32", dk),
        key + "ssm.group_count": Typed("uint32", nk),
        key + "ssm.time_step_rank": Typed("uint32", nv),
        key + "ssm.inner_size": Typed("uint32", value),
        key + "full_attention_interval": Typed("uint32", interval),
        **tokenizer_metadata(vocab),
    }
    write_gguf(path, "qwen35", metadata, tensors.items())
    return path


def tiny_drafter(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    hidden: int = 256,
    vocab: int = 512,
    num_target_layers: int = 6,
    target_layer_ids: tuple[int, ...] = (0, 2, 4),
    block_size: int = 8,
    markov_head: str = "vanilla",
    **changes: Any,
) -> Path:
    """Write a random drafter as a Hugging Face folder, for a target of :func:`tiny_hybrid`.

    Args:
        folder: created if need be.
        kind: ``dflash``, ``dflash2`` or ``dspark``.
        seed: of the weights.
        hidden, vocab, num_target_layers: of the target.
        target_layer_ids: captured layers.
        block_size: rows of a block.
        markov_head: of ``dspark``: ``vanilla``, ``gated`` or ``rnn``.
        changes: further keys of config.json.
    """
    g = torch.Generator().manual_seed(seed)
    heads, kv_heads, head_dim, ffn, layers = 4, 2, 64, hidden, 2
    rank, top_k, taps, group = 16, 8, 2, 16
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        w = torch.randn(rows, columns, generator=g) * gain * columns**-0.5
        tensors[name] = w.to(torch.bfloat16)

    def norm(name: str, size: int) -> None:
        tensors[name] = torch.rand(size, generator=g).add(0.5).to(torch.bfloat16)

    matrix("fc.weight", hidden, len(target_layer_ids) * hidden)
    norm("hidden_norm.weight", hidden)
    norm("norm.weight", hidden)
    for i in range(layers):
        p = f"layers.{i}."
        norm(p + "input_layernorm.weight", hidden)
        norm(p + "post_attention_layernorm.weight", hidden)
        matrix(p + "self_attn.q_proj.weight", heads * head_dim, hidden)
        matrix(p + "self_attn.k_proj.weight", kv_heads * head_dim, hidden)
        matrix(p + "self_attn.v_proj.weight", kv_heads * head_dim, hidden)
        matrix(p + "self_attn.o_proj.weight", hidden, heads * head_dim, 2.0)
        norm(p + "self_attn.q_norm.weight", head_dim)
        norm(p + "self_attn.k_norm.weight", head_dim)
        matrix(p + "mlp.gate_proj.weight", ffn, hidden)
        matrix(p + "mlp.up_proj.weight", ffn, hidden)
        matrix(p + "mlp.down_proj.weight", hidden, ffn, 2.0)
        if kind == "dflash2":
            for side in ("attention", "mlp"):
                base = torch.randn(2, taps, hidden, generator=g).mul(0.2)
                base[:, 0] += 1
                tensors[f"{p}{side}_conv.base_kernel"] = base.to(torch.bfloat16)
                matrix(
                    f"{p}{side}_conv.kernel_projection.weight", 2 * taps * hidden // group, hidden
                )
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
    config: dict[str, Any] = {
        "architectures": [names.get(kind, "Qwen3DSparkModel")],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "is_causal": False,
        "max_position_embeddings": 4096,
        "num_target_layers": num_target_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "block_size": block_size,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [*target_layer_ids]},
    }
    if kind == "dflash2":
        matrix("candidate_selector.predecessor_codebook", vocab, rank)
        matrix("candidate_selector.successor_codebook", vocab, rank)
        matrix("candidate_selector.hidden_projection.weight", rank, hidden)
        config["dflash_config"] |= {
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "selector_rank": rank,
            "selector_top_k": top_k,
        }
    if kind == "dspark":
        matrix("markov_head.markov_w1.weight", vocab, rank)
        matrix("markov_head.markov_w2.weight", vocab, rank)
        matrix("confidence_head.proj.weight", 1, hidden + rank)
        tensors["confidence_head.proj.bias"] = torch.zeros(1, dtype=torch.bfloat16)
        config["dflash_config"] |= {"markov_rank": rank, "projector_type": "dspark"}
        if markov_head != "vanilla":
            name, rows, columns = {
                "gated": ("gate_proj", rank, hidden + rank),
                "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden),
            }[markov_head]
            matrix(f"markov_head.{name}.weight", rows, columns, 2.0)
            tensors[f"markov_head.{name}.bias"] = torch.randn(rows, generator=g).bfloat16()
            config["dflash_config"]["markov_head_type"] = markov_head
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def dense_gguf_from_hf(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write a Qwen3 checkpoint as a ``qwen3`` GGUF with the same values.

    Args:
        path: file to write.
        config: its config.json.
        tensors: Hugging Face names, with or without ``model.``.
    """
    names = {
        "embed_tokens.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    out = {}
    for name, value in tensors.items():
        short = name.removeprefix("model.")
        if short in names:
            target = names[short]
        else:
            _, index, rest = short.split(".", 2)
            target = f"blk.{index}.{parts[rest.removesuffix('.weight')]}.weight"
        dense = value.float() if value.dim() == 1 else value
        out[target] = QuantTensor.from_tensor(dense.contiguous())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    key = "qwen3."
    vocab = config["vocab_size"]
    tokens = [chr(0x4E00 + n) for n in range(vocab)]
    metadata = {
        key + "block_count": Typed("uint32", config["num_hidden_layers"]),
        key + "context_length": Typed("uint32", config["max_position_embeddings"]),
        key + "embedding_length": Typed("uint32", config["hidden_size"]),
        key + "feed_forward_length": Typed("uint32", config["intermediate_size"]),
        key + "attention.head_count": Typed("uint32", config["num_attention_heads"]),
        key + "attention.head_count_kv": Typed("uint32", config["num_key_value_heads"]),
        key + "attention.key_length": Typed("uint32", config["head_dim"]),
        key + "attention.value_length": Typed("uint32", config["head_dim"]),
        key + "attention.layer_norm_rms_epsilon": Typed("float32", config["rms_norm_eps"]),
        key + "rope.freq_base": Typed("float32", theta),
        "tokenizer.ggml.model": Typed("string", "gpt2"),
        "tokenizer.ggml.pre": Typed("string", "qwen2"),
        "tokenizer.ggml.tokens": Typed("array[string]", tokens),
        "tokenizer.ggml.token_type": Typed("array[int32]", [1] * vocab),
        "tokenizer.ggml.merges": Typed("array[string]", ["a b"]),
        "tokenizer.ggml.eos_token_id": Typed("uint32", 0),
    }
    write_gguf(path, "qwen3", metadata, out.items())
    return path
