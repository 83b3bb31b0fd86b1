"""Hugging Face folders: what is read, and what is refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_dflash.hf import CheckpointError, open_safetensors, read_config

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.bfloat16)
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shards(folder: Path, weight_map: dict, files: dict) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_fixture(fixtures):
    folder = fixtures / "gguf/dspark_speculators_d2t"
    want = load_file(folder / "model.safetensors")
    got = open_safetensors(folder)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        dense = got[name].to_dense()
        assert got[name].shape == tuple(tensor.shape)
        assert torch.equal(dense.bool() if tensor.dtype == torch.bool else dense, tensor)
    assert read_config(folder)["block_size"] == 7


def test_shards_are_joined(tmp_path):
    shards(tmp_path, {"a": ONE, "b": TWO}, {ONE: {"a": A}, TWO: {"b": B}})
    got = open_safetensors(tmp_path)
    assert torch.equal(got["a"].to_dense(), A)
    assert torch.equal(got["b"].to_dense(), B)
    assert got["b"].type_name == "BF16"


def test_one_shard_that_has_the_usual_name(tmp_path):
    shards(tmp_path, {"a": "model.safetensors"}, {"model.safetensors": {"a": A}})
    assert torch.equal(open_safetensors(tmp_path)["a"].to_dense(), A)


def test_links_of_the_cache_are_followed(tmp_path):
    """Snapshots of the Hugging Face cache are links to blobs outside the folder."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": A}, tmp_path / "blobs/1f")
    os.symlink("../blobs/1f", tmp_path / "snapshot/model.safetensors")
    assert torch.equal(open_safetensors(tmp_path / "snapshot")["a"].to_dense(), A)


def mapped_file(address: int) -> str:
    """The file whose mapping holds an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, path = line.split()[0], line.partition("/")[2]
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= address < high:
            return "/" + path
    raise AssertionError(hex(address))


def test_nothing_is_copied(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(8 << 20), "b": torch.ones(3)}, path)
    got = open_safetensors(tmp_path)
    for name in "ab":
        assert mapped_file(got[name].packed.data_ptr()) == str(path)
        assert mapped_file(got[name].to_dense().data_ptr()) == str(path)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x\0.safetensors",
        "..",
        "",
        "pytorch_model.bin",
        5,
        None,
        ["x.safetensors"],
    ],
)
def test_shard_names_stay_in_the_folder(tmp_path, shard):
    outside = tmp_path / "x.safetensors"
    save_file({"a": A}, outside)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").mkdir()
    save_file({"a": A}, folder / "a/x.safetensors")
    shards(folder, {"a": shard}, {})
    with pytest.raises(CheckpointError, match=r"weight_map\['a'\] must be the name of a"):
        open_safetensors(folder)


BAD_FOLDERS = {
    "a shard is missing": (
        {"a": ONE, "b": TWO},
        {ONE: {"a": A}},
        rf"all 2 shards must be there, missing {TWO}; the download is incomplete",
    ),
    "a tensor is missing": ({"a": ONE, "b": ONE}, {ONE: {"a": A}}, "got none of b"),
    "a tensor is in two shards": (
        {"a": ONE, "b": TWO},
        {ONE: {"a": A}, TWO: {"a": A, "b": B}},
        f"tensor 'a' must be in {ONE} according to",
    ),
    "a tensor is not listed": (
        {"a": ONE},
        {ONE: {"a": A, "extra": B}},
        "tensor 'extra' must be in no shard according to",
    ),
    "two checkpoints": (
        {"a": ONE},
        {ONE: {"a": A}, "model.safetensors": {"a": A}},
        "must hold one checkpoint, got model.safetensors beside",
    ),
    "an empty map": ({}, {}, "weight_map must be a non-empty object"),
    "a list": (["a"], {}, "weight_map must be a non-empty object"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder(tmp_path, case):
    weight_map, files, message = BAD_FOLDERS[case]
    shards(tmp_path, weight_map, files)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(tmp_path)


def test_nothing_to_open(tmp_path):
    with pytest.raises(CheckpointError, match="got no safetensors file; pickled weights are not"):
        open_safetensors(tmp_path)
    save_file({"a": A}, tmp_path / "drafter.safetensors")
    with pytest.raises(CheckpointError, match=r"got drafter\.safetensors; name the file itself"):
        open_safetensors(tmp_path)
    assert torch.equal(open_safetensors(tmp_path / "drafter.safetensors")["a"].to_dense(), A)
    with pytest.raises(CheckpointError, match=r"no.safetensors: must be a file, got nothing there"):
        open_safetensors(tmp_path / "no.safetensors")


def test_damaged_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="must be a complete safetensors file, got: "):
            open_safetensors(path)
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="must be a complete safetensors file"):
        open_safetensors(path)


def test_values_and_dtypes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.tensor([[1.0, 2.0], [np.inf, np.nan]])}, path)
    with pytest.raises(CheckpointError, match=r"'a' must have finite values.* row 1, column 0"):
        open_safetensors(path)
    assert open_safetensors(path, check=False)["a"].shape == (2, 2)
    save_file({"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, path)
    with pytest.raises(CheckpointError, match=r"tensor 'w': .* got torch.float8_e4m3fn"):
        open_safetensors(path)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "must be UTF-8 JSON, got: Expecting value"),
        (b"[1]", "must hold an object, got list"),
        (b'{"a": 1, "a": 2}', "must be UTF-8 JSON, got: key 'a' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "must be UTF-8 JSON, got: key 'b' twice"),
        (b'{"a": "\xff"}', "must be UTF-8 JSON, got: 'utf-8' codec"),
        (b"[" * 200_000, "must be UTF-8 JSON, got: .*recursion"),
        (b" " * (8 << 20) + b"{}", "must have at most 8388608 bytes, got 8388610"),
    ],
)
def test_bad_config(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_config(tmp_path)


def test_config(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == {"hidden_size": 7}
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "nothing", tmp_path / "fifo"):
        with pytest.raises(CheckpointError, match="must be a file, got"):
            read_config(path)
