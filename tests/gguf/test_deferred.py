"""Tensors that are computed while they are written: the same bytes, a piece at a time."""

import os
import subprocess
import sys

import pytest
import torch

from torch_dflash.gguf import DeferredTensor, GGUFError, GGUFFile, QuantTensor, retyped, write_gguf
from torch_dflash.gguf import deferred as module
from torch_dflash.testing.tiny import random_quant

F32, F16, BF16, Q6_K = 0, 1, 30, 14


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 600)  # values: two rows of 256


@pytest.mark.parametrize("source", [F32, F16, BF16, Q6_K])
@pytest.mark.parametrize("to", [F32, F16, BF16])
def test_pieces_are_the_whole(small_pieces, source, to):
    tensor = random_quant(7, 256, source, torch.Generator().manual_seed(1), 1.0)
    got = retyped(tensor, to)
    if source == to:
        assert got is tensor
        return
    pieces = [*got.pieces()]
    assert [len(p) for p in pieces] == [2, 2, 2, 1]
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[to]
    want = tensor.to_dense().to(dtype)
    assert torch.equal(torch.cat(pieces).view(dtype), want)
    assert got.nbytes == want.nbytes
    assert next(iter(got.pieces())).equal(pieces[0])  # made anew every time


def test_written_like_any_other(small_pieces, tmp_path):
    tensor = random_quant(7, 256, BF16, torch.Generator().manual_seed(1), 1.0)
    seen = []
    write_gguf(
        tmp_path / "x.gguf",
        "x",
        {},
        [("a", retyped(tensor, F16)), ("b", tensor), ("c", retyped(tensor, F32))],
        alignment=64,
        progress=lambda *a: seen.append(a),
    )
    with GGUFFile.open(tmp_path / "x.gguf") as file:
        for name, dtype in (("a", torch.float16), ("b", torch.bfloat16), ("c", torch.float32)):
            assert torch.equal(file.tensor(name).to_dense(), tensor.to_dense().to(dtype))
            assert file.tensors[name].offset % 64 == 0
    total = 7 * 256 * (2 + 2 + 4)
    assert [n for n, _, _ in seen] == ["a"] * 4 + ["b"] + ["c"] * 4
    assert seen[-1] == ("c", total, total)


def test_what_does_not_fit(small_pieces, tmp_path):
    values = torch.zeros(7, 256)
    values[5, 3] = 70000.0
    tensor = QuantTensor.from_tensor(values)
    path = tmp_path / "x.gguf"
    with pytest.raises(ValueError, match=r"fc: values must be below 65520 .* rows 4..5; use bf16"):
        write_gguf(path, "x", {}, [("fc", retyped(tensor, F16, "fc"))])
    with pytest.raises(ValueError, match=r"odd: rows must be a multiple of 256 .* Q6_K, got 255"):
        retyped(QuantTensor.from_tensor(torch.zeros(2, 255)), Q6_K, "odd")
    with pytest.raises(GGUFError, match="unique"):
        write_gguf(path, "x", {}, [("a", tensor), ("a", retyped(tensor, F16))])
    assert not [*tmp_path.iterdir()]


def test_a_full_disk(tmp_path):
    """Nothing is left, and the error names the file that was asked for."""
    code = (
        "import resource, signal, sys; from torch_dflash.gguf import *;"
        "import torch; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "t = QuantTensor.from_tensor(torch.zeros(1000, 256));"
        "write_gguf(sys.argv[1], 'x', {}, [('a', t)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.gguf"], capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"OSError: [Errno 27] File too large: '{tmp_path / 'x.gguf'}'"
    assert not [*tmp_path.iterdir()]


def test_memory_stays_at_one_piece(tmp_path):
    """A tensor of 192 MB as float32 is written with a fraction of that."""
    code = (
        "import resource, sys, torch; from torch_dflash.gguf import *; import torch_dflash;"
        "q = QuantTensor(torch.ones(24 * 4096, 420, dtype=torch.uint8), 14, (24 * 4096, 512));"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10;"
        "before = peak();"
        "write_gguf(sys.argv[1], 'x', {}, [('a', retyped(q, 0))]);"
        "print(peak() - before)"
    )
    path = tmp_path / "x.gguf"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert os.path.getsize(path) > 192 << 20, done.stderr
    assert int(done.stdout) < 48  # MB: some pieces of 4, and what threads and buffers take


def test_a_deferred_tensor_describes_itself():
    tensor = DeferredTensor(Q6_K, (2, 3, 256), lambda: ())
    assert (tensor.rows, tensor.columns, tensor.type_name) == (6, 256, "Q6_K")
    assert tensor.nbytes == 6 * 210
