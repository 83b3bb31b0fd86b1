"""Malformed drafter files, full disks, and what a hundred failures leave behind: nothing."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import hf_craft as craft
import pytest
import torch
from refusal import refused

from torch_dflash.cli.main import main
from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.to_gguf import write_drafter
from torch_dflash.gguf import GGUFFile, QuantTensor, Typed, typed_metadata, write_gguf

Q = "layers.1.self_attn.q_proj.weight"


def metadata(**changes):
    """Change keys of the file, given as ``(type, value)``; None removes."""

    def change(keys, tensors):
        for name, value in changes.items():
            key = name.replace("__", ".")
            keys.pop(key, None)
            if value is not None:
                keys[key] = Typed(*value)
        return keys, tensors

    return change


def replaced(name, make):
    def change(keys, tensors):
        return keys, {n: make(t) if n == name else t for n, t in tensors.items()}

    return change


def without(name):
    return lambda keys, tensors: (keys, {n: t for n, t in tensors.items() if n != name})


def added(name):
    return lambda keys, tensors: (keys, tensors | {name: QuantTensor.from_tensor(torch.ones(2))})


def nan_scale(tensor):
    packed = torch.zeros(tensor.rows, tensor.columns // 32 * 34, dtype=torch.uint8)
    packed[1, :2] = torch.tensor([0, 0x7E])
    return QuantTensor(packed, 8, tensor.shape)


def cropped(tensor):
    return QuantTensor(tensor.packed[:-1].contiguous(), tensor.ggml_type, (tensor.rows - 1, 64))


# name -> (what is done to keys and tensors, what the line says)
FILES = {
    "NaN scale": (replaced("fc.weight", nan_scale), r"'fc\.weight' .* finite scales.* row 1, quan"),
    "tensor missing": (without("blk.1.ffn_up.weight"), r"got all but 1: layers\.1\.mlp\.up_proj"),
    "tensor unknown": (added("blk.0.attn_sink"), r"1 unknown: blk\.0\.attn_sink"),
    "tensor misshaped": (replaced("blk.1.ffn_up.weight", cropped), r"must be \[96, 64\], got \[95"),
    "integers for weights": (
        replaced("blk.0.attn_q.weight", lambda t: QuantTensor.from_tensor(t.to_dense().int())),
        r"must be of type .* got I32",
    ),
    "per-tensor scales": (added("blk.0.ffn_up.scale"), r"per-tensor scales .* is not supported"),
    "key of another type": (
        metadata(dflash__block_count=("string", "2")),
        r"dflash\.block_count must be an integer, got '2'",
    ),
    "theta missing": (metadata(dflash__rope__freq_base=None), r"freq_base must be present, got no"),
    "ids missing": (metadata(dflash__target_layers=None), r"target_layers or .* pass the target"),
    "ids as floats": (
        metadata(dflash__target_layers=("array[float32]", [2.0, 5.0, 10.0])),
        r"target_layers\[0\] must be an integer, got 2\.0",
    ),
    "ids of layer -1": (
        metadata(dflash__target_layers=("array[int32]", [0, 5, 10])),
        r"must be at least 0, got \[-1, 4, 9\]",
    ),
    "mask token missing": (
        metadata(tokenizer__ggml__mask_token_id=None),
        r"mask_token_id must be present",
    ),
    "vocabulary of another size": (
        metadata(dflash__vocab_size=("uint32", 5), tokenizer__ggml__mask_token_id=("uint32", 9)),
        r"must be a token of the vocabulary of 5, got 9",
    ),
    "another drafter": (
        metadata(dflash__decoder_arch=("string", "laguna")),
        r"belongs to Laguna DFlash, which is not supported",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Bytes, keys and tensors of a valid file."""
    folder = tmp_path_factory.mktemp("whole")
    source = read_checkpoint(craft.folder(folder / "in", craft.config("dflash")))
    write_drafter(folder / "x.gguf", source, name="x")
    with GGUFFile.open(folder / "x.gguf") as file:
        stored = {n: file.tensor(n) for n in file.tensors}
        return (folder / "x.gguf").read_bytes(), typed_metadata(file), stored


@pytest.mark.parametrize("case", FILES)
def test_file(tmp_path, capsys, whole, case):
    change, said = FILES[case]
    keys, stored = change(dict(whole[1]), dict(whole[2]))
    source = tmp_path / "in.gguf"
    write_gguf(source, "dflash", keys, stored.items())
    for argv in (("convert", "-o", tmp_path / "x.gguf"), ("prepare", "-o", tmp_path / "out")):
        line = refused(capsys, tmp_path, argv[0], source, *argv[1:])
        assert str(source) in line
        assert re.search(said, line), line


def patched(old, new):
    return lambda raw: raw.replace(old, new, 1)


BYTES = {
    "cut in the header": (lambda raw: raw[:100], r"in\.gguf: .*fetch the file again|incomplete"),
    "cut in the data": (lambda raw: raw[:-5000], r"are missing; .*fetch the file again"),
    "no GGUF": (lambda raw: b"PK\3\4" + raw[4:], r"must start with 'GGUF'"),
    "a pointer": (lambda raw: b"version https://git-lfs", r"must have a header|LFS pointer"),
    "big endian": (lambda raw: raw[:4] + b"\0\0\0\3" + raw[8:], r"must be little-endian"),
    "tensors without end": (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], r"tensor count must fit"),
    "keys without end": (lambda raw: raw[:16] + b"\xff" * 8 + raw[24:], r"metadata count must fit"),
    "the same tensor twice": (
        patched(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"),
        r"tensor names must be unique, got 'blk\.0\.attn_q\.weight' twice",
    ),
    "another architecture": (patched(b"\6\0\0\0\0\0\0\0dflash", b"\6\0\0\0\0\0\0\0llamas"), r"gen"),
    "a name that is no text": (patched(b"general.name", b"general.nam\xff"), r"must be UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BYTES)
def test_bytes(tmp_path, capsys, whole, case):
    change, said = BYTES[case]
    source = tmp_path / "in.gguf"
    source.write_bytes(change(whole[0]))
    line = refused(capsys, tmp_path, "convert", source, "-o", tmp_path / "x.gguf")
    assert re.search(said, line), line


@pytest.mark.parametrize("command", ["convert", "prepare"])
def test_a_full_disk(tmp_path, command):
    """The file that was asked for is named, not the temporary one, and that is gone."""
    craft.folder(tmp_path / "in", craft.config("dflash"))
    code = (
        "import resource, signal, sys; from torch_dflash.cli.main import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000)); sys.exit(main(sys.argv[1:]))"
    )
    argv = [command, str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 1
    assert "torch-dflash: error: " in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert str(tmp_path / "out") in last
    assert "file too large; name another disk" in last
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_value_that_does_not_fit(tmp_path, capsys):
    source = craft.folder(tmp_path / "in", craft.config("dflash"), change=lambda t: t[Q].fill_(1e5))
    argv = ["convert", source, "-o", tmp_path / "x.gguf", "--outtype", "f16"]
    line = refused(capsys, tmp_path, *argv)
    assert "x.gguf: tensor 'layers.1.self_attn.q_proj.weight': values must be below 65520" in line
    assert "use bf16" in line


def nan(stored):
    stored["layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")


SPOILED = {
    "NaN": nan,
    "missing": lambda stored: stored.pop(Q),
    "misshaped": lambda stored: stored.update({Q: stored[Q][:-1].clone()}),
    "integers": lambda stored: stored.update({Q: stored[Q].int()}),
}


def test_a_hundred_failures_leave_no_memory(tmp_path, capsys):
    """Mappings, descriptors and half-read tensors go with the error, even if errors are kept."""
    big = craft.config("dflash", intermediate_size=16384)
    paths = []
    for case, spoil in SPOILED.items():
        path = craft.folder(tmp_path / case, big, change=spoil)
        paths.append(path)
    good = read_checkpoint(craft.folder(tmp_path / "good", big))
    write_drafter(tmp_path / "x.gguf", good, name="x")
    raw = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(raw[:-100])
    paths.append(tmp_path / "cut.gguf")
    del good, raw

    def fail_all():
        for path in paths:
            assert main(["convert", str(path), "-o", str(tmp_path / "y.gguf")]) == 1
        capsys.readouterr()

    def state():
        gc.collect()
        status = Path("/proc/self/status").read_text()
        anonymous = int(status.split("RssAnon:")[1].split()[0])
        return anonymous, len(os.listdir("/proc/self/fd"))

    for _ in range(4):
        fail_all()
    before = state()
    for _ in range(20):  # of five: a hundred loads
        fail_all()
    after = state()
    assert after[1] == before[1]
    # each file has 12 MB: one that stayed would show three times over
    assert after[0] - before[0] < 4 << 10
