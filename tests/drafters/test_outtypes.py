"""The type of every tensor of a converted drafter, and that its bytes are the operator's."""

import pytest
import torch

from torch_dflash import convert_drafter, ops
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.names import gguf_name
from torch_dflash.drafters.outtypes import FILE_TYPES, OUTTYPES
from torch_dflash.gguf import GGUFFile
from torch_dflash.hf import CheckpointError
from torch_dflash.testing.tiny import tiny_drafter

CAREFUL = ("fc.", "k_proj", "v_proj", "kernel_projection", "candidate_selector", "markov_head")


@pytest.fixture(scope="module", params=["dflash2", "dspark"])
def source(request, tmp_path_factory):
    # rank 16: no whole quant of any packed type
    return tiny_drafter(tmp_path_factory.mktemp("outtypes") / request.param, request.param)


@pytest.mark.parametrize("outtype", [t for t in OUTTYPES if t not in ("f32", "f16", "bf16")])
def test_packed(source, tmp_path, outtype):
    path, name = tmp_path / "x.gguf", OUTTYPES[outtype]
    convert_drafter(source, path, outtype=outtype)
    checkpoint = read_checkpoint(source)
    seen = set()
    with GGUFFile.open(path) as file:
        assert file.metadata["general.file_type"] == FILE_TYPES[name]
        for logical, tensor in checkpoint.tensors.items():
            stored = file.tensor(gguf_name(logical, "upstream"))
            values = tensor.to_dense()
            if values.dim() == 1 or "base_kernel" in logical or tensor.rows == 1:
                want, packed = "F32", None
            elif tensor.columns % 32:
                want, packed = "F16", None
            else:
                want = "Q8_0" if any(c in logical for c in CAREFUL) else name
                packed = ops.quantize(values.reshape(tensor.rows, -1), stored.ggml_type)
            seen.add(want)
            assert (stored.type_name, stored.shape) == (want, tensor.shape), logical
            if packed is None:
                assert torch.equal(stored.to_dense(), values.to(stored.type.dtype)), logical
            else:
                assert torch.equal(stored.packed, packed), logical
    assert seen == {"F32", "F16", "Q8_0", name}


def test_an_own_embedding_and_head_are_never_below_q8(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_drafter(tmp_path / "d", "dflash")
    tensors = load_file(folder / "model.safetensors")
    ends = ("embed_tokens.weight", "lm_head.weight")
    tensors |= {n: torch.randn(512, 256).bfloat16() for n in ends}
    save_file(tensors, folder / "model.safetensors")
    convert_drafter(folder, tmp_path / "x.gguf", outtype="Q4_K")  # in any case
    got = read_checkpoint(tmp_path / "x.gguf")
    assert {got.tensors[n].type_name for n in ends} == {"Q8_0"}
    assert got.tensors["layers.0.mlp.up_proj.weight"].type_name == "Q4_K"
    assert any("below 5 bits" in n for n in got.config.notes)


def test_a_packed_source_keeps_its_bytes_or_is_decoded(source, tmp_path):
    convert_drafter(source, tmp_path / "a.gguf", outtype="q8_0")
    convert_drafter(tmp_path / "a.gguf", tmp_path / "b.gguf")
    convert_drafter(tmp_path / "a.gguf", tmp_path / "c.gguf", outtype="f32")
    a, b, c = (read_checkpoint(tmp_path / f"{n}.gguf").tensors for n in "abc")
    for name, tensor in a.items():
        assert torch.equal(b[name].packed, tensor.packed)
        assert torch.equal(c[name].to_dense().float(), tensor.to_dense().float())
        assert c[name].type_name == "F32"


def test_unknown_types(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"outtype must be one of f32, .*, got 'q3_k'"):
        convert_drafter(source, tmp_path / "x.gguf", outtype="q3_k")
    with pytest.raises(CheckpointError, match=r"layout must be upstream or lucebox, got 'x'"):
        convert_drafter(source, tmp_path / "x.gguf", layout="x")
