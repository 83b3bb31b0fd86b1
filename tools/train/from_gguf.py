"""Quantized GGUF files back into training modules, through gguf-py's dequantizers.

    python tools/train/from_gguf.py --gguf target.gguf --check HF  # the F32 file gives the HF state
    python tools/train/from_gguf.py --gguf target.gguf --pieces OUT  # float16, to train drafters on

The drafters are trained on what ships: the dequantized target.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

TARGET_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
DRAFTER_NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
DRAFTER_LAYER_NAMES = {
    **{k: v for k, v in LAYER_NAMES.items() if v.startswith(("self_attn", "mlp", "input"))},
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a GGUF as float32 in row-major shape."""
    from gguf import GGUFReader, dequantize

    out = {}
    for t in GGUFReader(path).tensors:
        shape = [int(x) for x in reversed(t.shape.tolist())]
        out[t.name] = (
            torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).float().reshape(shape)
        )
    return out


def grouped(x: Tensor, nk: int, nv: int, dim: int = 0) -> Tensor:
    """V heads along `dim` from GGUF's tiled order back to Hugging Face's grouped order."""
    x = x.movedim(dim, 0)
    width = x.shape[0] // nv
    y = x.reshape(nv // nk, nk, width, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return y.movedim(0, dim).contiguous()


def target_state(path: Path, nk: int = 2, nv: int = 4, kdim: int = 256) -> dict[str, Tensor]:
    """State dict of `Target` from a qwen35 GGUF."""
    state = {}
    for name, x in tensors(path).items():
        if name in TARGET_NAMES:
            hf = TARGET_NAMES[name]
        else:
            _, i, rest = name.split(".", 2)
            hf = f"model.layers.{i}.{LAYER_NAMES[rest]}"
            if rest in (
                "attn_gate.weight",
                "ssm_beta.weight",
                "ssm_alpha.weight",
                "ssm_a",
                "ssm_dt.bias",
            ):
                x = grouped(x, nk, nv)
            elif rest in ("attn_qkv.weight", "ssm_conv1d.weight"):
                x = torch.cat([x[: 2 * kdim], grouped(x[2 * kdim :], nk, nv)])
            elif rest == "ssm_out.weight":
                x = grouped(x, nk, nv, 1)
            if rest == "ssm_a":
                x = torch.log(-x)
            elif rest == "ssm_conv1d.weight":
                x = x[:, None]
        if "norm" in hf and not hf.endswith("linear_attn.norm.weight"):
            x = x - 1.0
        state[hf] = x
    return state


def drafter_state(path: Path) -> dict[str, Tensor]:
    """State dict of `Drafter` from an upstream `dflash` GGUF."""
    state = {}
    for name, x in tensors(path).items():
        if name in DRAFTER_NAMES:
            state[DRAFTER_NAMES[name]] = x
        else:
            _, i, rest = name.split(".", 2)
            state[f"layers.{i}.{DRAFTER_LAYER_NAMES[rest]}"] = x
    return state


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--gguf", type=Path, required=True)
    p.add_argument("--check", type=Path)
    p.add_argument("--pieces", type=Path)
    a = p.parse_args()
    state = target_state(a.gguf)
    if a.check:
        from safetensors.torch import load_file

        hf = load_file(a.check / "model.safetensors")
        worst = {
            k: (state[k].reshape(v.shape) - v.float()).abs().max().item() for k, v in hf.items()
        }
        print(
            f"{len(hf)} tensors, worst difference {max(worst.values()):.1e}"
            f" in {max(worst, key=worst.__getitem__)}"
        )
        if set(state) - set(hf):
            raise ValueError(
                f"{a.gguf}: tensors without a counterpart: {sorted(set(state) - set(hf))}"
            )
    if a.pieces:
        from common import save_pieces

        save_pieces(state, a.pieces, "target", torch.float16)


if __name__ == "__main__":
    main()
