"""What we write, our reader, gguf-py's reader and the converter's own files agree on."""

import json
import os

import gguf as oracle
import numpy as np
import pytest
import torch

from torch_dflash.gguf import (
    TYPES,
    GGUFArray,
    GGUFError,
    GGUFFile,
    QuantTensor,
    Typed,
    group_v_heads,
    qwen35_metadata,
    qwen35_tensors,
    tile_v_heads,
    typed_metadata,
    write_gguf,
)
from torch_dflash.hf import open_safetensors, read_config

VALUES = {
    "a.u8": Typed("uint8", 255),
    "a.i8": Typed("int8", -128),
    "a.u16": Typed("uint16", 65535),
    "a.i16": Typed("int16", -32768),
    "a.u32": Typed("uint32", 2**32 - 1),
    "a.i32": Typed("int32", -(2**31)),
    "a.u64": Typed("uint64", 2**64 - 1),
    "a.i64": Typed("int64", -(2**63)),
    "a.f32": Typed("float32", 0.5),
    "a.f64": Typed("float64", 1e300),
    "a.bool": Typed("bool", False),
    "a.str": Typed("string", "naïve\n"),
    "a.empty": Typed("string", ""),
    "a.i32s": Typed("array[int32]", [11, 11, 10, 0]),
    "a.i64s": Typed("array[int64]", [1]),
    "a.bools": Typed("array[bool]", [True, False]),
    "a.strs": Typed("array[string]", ["", "é"]),
    "a.f32s": Typed("array[float32]", [0.25, -1.0]),
    "a.long": Typed("array[uint32]", [*range(5000)]),
}


def one_of_each_type() -> dict[str, QuantTensor]:
    rng = np.random.default_rng(3)
    out = {}
    for kind in TYPES.values():
        columns = 3 if kind.dtype else kind.elems * 2
        raw = rng.integers(0, 60, (5, kind.row_bytes(columns)), np.uint8)  # exponents stay finite
        out[f"t.{kind.name}"] = QuantTensor(torch.from_numpy(raw), kind.id, (5, columns))
    out["vector"] = QuantTensor.from_tensor(torch.arange(3.0))
    out["four"] = QuantTensor.from_tensor(torch.arange(16.0).reshape(2, 2, 2, 2))
    return out


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_round_trip(tmp_path, alignment):
    path, tensors = tmp_path / "x.gguf", one_of_each_type()
    write_gguf(path, "qwen35", VALUES, tensors.items(), alignment=alignment)
    with GGUFFile.open(path) as file:
        assert (file.version, file.architecture, file.alignment) == (3, "qwen35", alignment)
        assert {**typed_metadata(file)}.keys() == VALUES.keys()
        for key, (kind, value) in VALUES.items():
            got = file.metadata[key]
            assert file.metadata_type(key) == kind
            assert (got.to_list() if isinstance(got, GGUFArray) else got) == value
        assert [*file.tensors] == [*tensors]
        for name, t in tensors.items():
            got = file.tensor(name)
            assert (got.ggml_type, got.shape) == (t.ggml_type, t.shape)
            assert torch.equal(got.packed, t.packed)
            assert file.tensors[name].offset % alignment == 0
    reader = oracle.GGUFReader(path)
    assert reader.alignment == alignment
    for key, (_, value) in VALUES.items():
        assert reader.fields[key].contents() == value
    for t in reader.tensors:
        assert t.data.tobytes() == tensors[t.name].packed.numpy().tobytes()
        assert tuple(reversed(t.shape.tolist())) == tensors[t.name].shape


def test_rewriting_a_file_in_place(fixtures, tmp_path):
    """Its own tensors are views of the file that is being replaced."""
    path = tmp_path / "x.gguf"
    path.write_bytes((fixtures / "gguf/dspark/model.gguf").read_bytes())
    with GGUFFile.open(path) as file, GGUFFile.open(fixtures / "gguf/dspark/model.gguf") as want:
        tensors = [(name, file.tensor(name)) for name in file.tensors]
        write_gguf(path, file.architecture, typed_metadata(file), tensors)
        with GGUFFile.open(path) as again:
            assert again.metadata == want.metadata
            assert [*again.tensors] == [*want.tensors]
            for name in want.tensors:
                assert torch.equal(again.tensor(name).packed, want.tensor(name).packed)


T = QuantTensor.from_tensor(torch.zeros(2, 2))


@pytest.mark.parametrize(
    "metadata, tensors, message",
    [
        ({"k": Typed("uint32", -1)}, [], "'k' must be uint32, got -1"),
        ({"k": Typed("uint32", 2**32)}, [], "'k' must be uint32, got 4294967296"),
        ({"k": Typed("uint32", True)}, [], "'k' must be uint32, got True"),
        ({"k": Typed("uint32", 1.0)}, [], "'k' must be uint32, got 1.0"),
        ({"k": Typed("int8", 128)}, [], "'k' must be int8, got 128"),
        ({"k": Typed("bool", 1)}, [], "'k' must be bool, got 1"),
        ({"k": Typed("string", 5)}, [], "'k' must be string, got 5"),
        ({"k": Typed("float32", 1e39)}, [], r"'k' must be float32, got 1e\+39"),
        ({"k": Typed("float32", float("nan"))}, [], "'k' must be float32, got nan"),
        ({"k": Typed("float16", 1.0)}, [], "'k' must have a type of GGUF, got 'float16'"),
        ({"k": Typed("array[array[int8]]", [1])}, [], "'k' must have a type of GGUF"),
        ({"k": Typed("array[int8]", [])}, [], r"'k' must be a non-empty list, got \[\]"),
        ({"k": Typed("array[int8]", [1, 200])}, [], "'k' must be int8, got 200"),
        ({"k": Typed("array[int8]", 7)}, [], "'k' must be a non-empty list, got 7"),
        ({"general.alignment": Typed("uint32", 64)}, [], "general.alignment must be given as an"),
        ({}, [("t", T), ("t", T)], "tensor names must be unique, got 't' twice"),
        ({}, [("", T)], "a tensor name must have 1 to 63 bytes"),
        ({}, [("é" * 32, T)], "a tensor name must have 1 to 63 bytes"),
        ({}, [("t", QuantTensor.from_tensor(torch.zeros(0, 2)))], r"dimensions >= 1, got \[0, 2\]"),
        ({}, [("t", QuantTensor.from_tensor(torch.zeros(1, 1, 1, 1, 1)))], "1 to 4 dimensions"),
        (
            {},
            [("t", QuantTensor.from_tensor(torch.tensor(1.0)))],
            r"dimensions >= 1, got \[",
        ),
    ],
)
def test_what_the_format_cannot_hold(tmp_path, metadata, tensors, message):
    path = tmp_path / "x.gguf"
    path.write_text("the old file")
    with pytest.raises(GGUFError, match=message):
        write_gguf(path, "qwen35", metadata, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    assert path.read_text() == "the old file"


@pytest.mark.parametrize("alignment", [0, 4, 48, -32])
def test_alignment_is_checked(tmp_path, alignment):
    with pytest.raises(GGUFError, match=f"alignment must be a power of two .* got {alignment}"):
        write_gguf(tmp_path / "x.gguf", "qwen35", {}, [], alignment=alignment)
    assert not [*tmp_path.iterdir()]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    """Tensors that raise half-way, and a disk that fills up."""

    def broken():
        yield "t", T
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "x.gguf", "qwen35", VALUES, broken())

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_gguf(tmp_path / "x.gguf", "qwen35", VALUES, [("t", T)])
    assert not [*tmp_path.iterdir()]


def test_folder_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: must be a folder to write x.gguf to"):
        write_gguf(tmp_path / "nowhere/x.gguf", "qwen35", {}, [])


@pytest.mark.parametrize("nk, nv, width", [(2, 4, 3), (3, 6, 1), (2, 6, 2), (3, 3, 2)])
def test_v_heads(nk, nv, width):
    """G6 of the golden values, element by element: tiled head r*nk + k is head k*(nv/nk) + r."""
    t = torch.arange(nv * width * 2).reshape(nv * width, 2)
    tiled = tile_v_heads(t, nk, nv, width)
    heads, source = tiled.reshape(nv, width, 2), t.reshape(nv, width, 2)
    for k in range(nk):
        for r in range(nv // nk):
            assert torch.equal(heads[r * nk + k], source[k * (nv // nk) + r])
    assert torch.equal(group_v_heads(tiled, nk, nv, width), t)


@pytest.mark.parametrize("case", ["nk2_nv4", "nk2_nv6", "nk3_nv3_tied", "types_nk2_nv4"])
def test_target_equals_the_converters(fixtures, tmp_path, case):
    """Same metadata (types too) and same tensors, bit for bit, as llama.cpp's converter wrote."""
    folder = fixtures / "hybrid" / case
    config = read_config(folder)
    metadata = qwen35_metadata(config, name=case.title(), file_type=32)
    write_gguf(
        tmp_path / "x.gguf", "qwen35", metadata, qwen35_tensors(config, open_safetensors(folder))
    )
    with (
        GGUFFile.open(tmp_path / "x.gguf") as ours,
        GGUFFile.open(fixtures / "gguf" / f"target_{case}.gguf") as theirs,
    ):
        want = typed_metadata(theirs)
        got = typed_metadata(ours)
        for key in [k for k in want if k.startswith("tokenizer.") or k == "general.size_label"]:
            del want[key]
        assert got == want
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in theirs.tensors:
            a, b = ours.tensor(name), theirs.tensor(name)
            assert (a.ggml_type, a.shape) == (b.ggml_type, b.shape), name
            if name.endswith("ssm_a"):  # exp differs by an ulp between numpy and torch
                torch.testing.assert_close(a.to_dense(), b.to_dense(), rtol=2e-7, atol=0)
            else:
                assert torch.equal(a.packed, b.packed), name


def test_target_dtype(fixtures):
    folder = fixtures / "hybrid/nk2_nv4"
    tensors = dict(
        qwen35_tensors(read_config(folder), open_safetensors(folder), dtype=torch.float16)
    )
    assert tensors["blk.0.attn_qkv.weight"].type_name == "F16"
    assert tensors["blk.0.ssm_conv1d.weight"].type_name == "F32"
    assert tensors["output_norm.weight"].type_name == "F32"


def test_target_refuses_what_it_cannot_place(fixtures):
    config = read_config(fixtures / "hybrid/nk2_nv4")
    with pytest.raises(GGUFError, match=r"tensor 'mtp.fc.weight' must belong to a dense Qwen3.5"):
        dict(qwen35_tensors(config, {"mtp.fc.weight": T}))
    with pytest.raises(GGUFError, match=r"config.json: head_dim must be int, got None"):
        qwen35_metadata(json.loads("{}") | {"rope_parameters": {}}, name="x")


def test_what_is_no_file_is_not_replaced(tmp_path):
    """A rename over a device, which root may do, takes it from every other process."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(GGUFError, match=rf"{name}: must be new or a regular file to write, go"):
            write_gguf(tmp_path / name, "dflash", {}, [])
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link", "pipe"]
