"""Files written by llama.cpp's converter: our reader, gguf-py's reader and the source agree."""

import re

import gguf
import pytest
import torch
from gguf_craft import GGUF_DRAFTERS
from safetensors.torch import load_file

from torch_dflash.gguf import GGUFFile, QuantTensor
from torch_dflash.hf import open_safetensors

TARGETS = ["nk2_nv4", "nk2_nv6", "nk3_nv3_tied", "types_nk2_nv4"]
FILES = [f"{d}/model.gguf" for d in GGUF_DRAFTERS] + [
    *(f"target_{t}.gguf" for t in TARGETS),
    "target_fused_qkv_f16.gguf",
    "target_mtp_bf16.gguf",
]


@pytest.mark.parametrize("name", FILES)
def test_equals_gguf_py(fixtures, name):
    path = fixtures / "gguf" / name
    oracle = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert [*file.tensors] == [t.name for t in oracle.tensors]
        for want in oracle.tensors:
            got = file.tensor(want.name)
            assert got.shape == tuple(reversed(want.shape.tolist()))
            assert got.ggml_type == want.tensor_type
            assert file.tensors[want.name].offset == want.data_offset
            assert got.packed.numpy().tobytes() == want.data.tobytes()
        fields = {k: f for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
        assert [*file.metadata] == [*fields]
        for key, field in fields.items():
            assert file.metadata[key] == field.contents()
            types = [t.name.lower() for t in field.types]
            assert file.metadata_type(key) == (
                f"array[{types[1]}]" if types[0] == "array" else types[0]
            )


def tiled(t: torch.Tensor, nk: int, nv: int, width: int) -> torch.Tensor:
    """Grouped V heads (Hugging Face) to tiled ones (GGUF), along the first dimension."""
    return t.reshape(nk, nv // nk, width, *t.shape[1:]).transpose(0, 1).reshape(t.shape)


def expected_target(hf: dict[str, torch.Tensor], meta) -> dict[str, torch.Tensor]:
    """FORMATS 3.8, written from the source's side: what each GGUF tensor must hold."""
    nk, nv = meta["qwen35.ssm.group_count"], meta["qwen35.ssm.time_step_rank"]
    dk, dv = meta["qwen35.ssm.state_size"], meta["qwen35.ssm.inner_size"] // nv
    kd = 2 * nk * dk
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    plus_one = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    out = {}
    for name, t in hf.items():
        t = t.float()
        match = re.fullmatch(r"model\.(?:language_model\.)?layers\.(\d+)\.(.+?)(\.weight)?", name)
        if not match:
            top = name.removeprefix("model.").removeprefix("language_model.")
            key, add = {
                "embed_tokens.weight": ("token_embd.weight", 0),
                "norm.weight": ("output_norm.weight", 1),
                "lm_head.weight": ("output.weight", 0),
            }[top]
            out[key] = t + add
            continue
        blk, part = f"blk.{match[1]}.", match[2]
        if part in names:
            out[blk + names[part] + ".weight"] = t
        elif part in plus_one:
            out[blk + plus_one[part] + ".weight"] = t + 1
        elif part == "linear_attn.norm":
            out[blk + "ssm_norm.weight"] = t
        elif part == "linear_attn.in_proj_qkv":
            out[blk + "attn_qkv.weight"] = torch.cat([t[:kd], tiled(t[kd:], nk, nv, dv)])
        elif part == "linear_attn.in_proj_z":
            out[blk + "attn_gate.weight"] = tiled(t, nk, nv, dv)
        elif part in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
            kind = {"a": "alpha", "b": "beta"}[part[-1]]
            out[blk + f"ssm_{kind}.weight"] = tiled(t, nk, nv, 1)
        elif part == "linear_attn.A_log":
            out[blk + "ssm_a"] = tiled(-t.exp(), nk, nv, 1)
        elif part == "linear_attn.dt_bias":
            out[blk + "ssm_dt.bias"] = tiled(t, nk, nv, 1)
        elif part == "linear_attn.conv1d":
            t = t.squeeze(1)
            out[blk + "ssm_conv1d.weight"] = torch.cat([t[:kd], tiled(t[kd:], nk, nv, dv)])
        elif part == "linear_attn.out_proj":
            out[blk + "ssm_out.weight"] = tiled(t.T.contiguous(), nk, nv, dv).T
        else:
            raise AssertionError(name)
    return out


@pytest.mark.parametrize("case", TARGETS)
def test_target_equals_its_source(fixtures, case):
    hf = load_file(fixtures / "hybrid" / case / "model.safetensors")
    with GGUFFile.open(fixtures / "gguf" / f"target_{case}.gguf") as file:
        want = expected_target(hf, file.metadata)
        assert want.keys() == file.tensors.keys()
        for name, value in want.items():
            got = file.tensor(name).to_dense().float()
            # exp of a float32 differs by an ulp between libraries; everything else is exact
            assert torch.allclose(got, value, rtol=2e-7 if name.endswith("ssm_a") else 0, atol=0), (
                name
            )


@pytest.mark.parametrize("case", GGUF_DRAFTERS)
def test_drafter_holds_the_values_of_its_source(fixtures, case):
    """Names are the drafters' business; here: each tensor is one of the source's, bit for bit."""
    folder = fixtures / "gguf" / case
    source = {name: t.to_dense() for name, t in open_safetensors(folder).items()}
    offsets = source.get("d2t")
    with GGUFFile.open(folder / "model.gguf") as file:
        for name in file.tensors:
            got = file.tensor(name).to_dense()
            if name == "d2t":  # absolute in a GGUF, offsets in Hugging Face
                assert offsets is not None
                assert torch.equal(got, offsets + torch.arange(len(offsets)))
                continue
            if case == "dflash_interleaved_rope" and re.search(r"attn_[qk](_norm)?\.", name):
                hd = file.metadata["dflash.attention.key_length"]
                rows = got.reshape(-1, 2, hd // 2, *got.shape[1:])
                got = rows.transpose(1, 2).reshape(got.shape)  # back from [even | odd]
            same = [s for s in source.values() if s.shape == got.shape or s.numel() == got.numel()]
            assert any(torch.equal(s.float().flatten(), got.float().flatten()) for s in same), name


def test_tensors_outlive_the_file(fixtures):
    path = fixtures / "gguf/target_nk2_nv4.gguf"
    with GGUFFile.open(path) as file:
        tensor = file.tensor("output.weight")
        info = file.tensors["output.weight"]
    with pytest.raises(ValueError, match="file is closed"):
        file.tensor("output.weight")
    del file
    raw = path.read_bytes()[info.offset : info.offset + info.nbytes]
    assert tensor.packed.numpy().tobytes() == raw


def test_writing_to_a_tensor_leaves_the_file_alone(fixtures, tmp_path):
    path = tmp_path / "copy.gguf"
    path.write_bytes((fixtures / "gguf/target_nk2_nv4.gguf").read_bytes())
    before = path.read_bytes()
    with GGUFFile.open(path) as file:
        file.tensor("output.weight").packed.fill_(1)
        assert path.read_bytes() == before
        assert int(file.tensor("output.weight").packed.max()) == 1  # one mapping, one memory


def test_from_tensor_shares_memory():
    t = torch.arange(6.0).reshape(2, 3)
    q = QuantTensor.from_tensor(t)
    assert q.packed.data_ptr() == t.data_ptr() == q.to_dense().data_ptr()
