"""Peers: what is not there is said; what is packed keeps only what is measured."""

import struct
import sys
import types

import pytest
import torch

from benchmarks.peers import open_peers
from benchmarks.peers.build_llama import cut
from benchmarks.peers.pack import entries, only
from benchmarks.work import Absent, Conv, Norm, Peer

CUDA = torch.device("cuda")  # no device is touched


def test_without_a_folder_every_peer_is_absent():
    peers, found = open_peers(None, CUDA)
    assert set(found) == {"vLLM", "llama.cpp", "fla-core"}
    assert set(found.values()) == {"absent: no folder of peers was given"}
    for peer in peers.values():
        with pytest.raises(Absent, match="no folder of peers was given"):
            peer.norm(Norm(1, 256, CUDA))


def test_a_folder_without_files_names_the_file(tmp_path):
    _, found = open_peers(tmp_path, CUDA)
    assert found["llama.cpp"].startswith("absent: ")
    assert "libllama_peer.so or libllama_peer.so.xz, got neither" in found["llama.cpp"]
    assert "must hold fla, got none" in found["fla-core"]


def test_a_broken_library_costs_its_own_figures_alone(tmp_path):
    (tmp_path / "libllama_peer.so").write_bytes(b"no library")
    peers, found = open_peers(tmp_path, CUDA)
    assert found["llama.cpp"].startswith("absent: OSError")
    with pytest.raises(Absent, match="OSError"):
        peers["llama.cpp"].conv(Conv(1, 64, 4, 1, CUDA))


def test_a_peer_has_what_it_says_it_has():
    with pytest.raises(Absent, match="no such kernel"):
        Peer().norm(Norm(1, 256, CUDA))


def entry(kind, arch, payload):
    """One device program of a library, as nvcc lays it out."""
    size = -(-len(payload) // 8) * 8
    head = struct.pack("<HHIQI", kind, 0x101, 64, size, len(payload)).ljust(28, b"\0")
    head += struct.pack("<I", arch)
    return head.ljust(64, b"\0") + payload.ljust(size, b"\0")


def container(*programs):
    body = b"".join(programs)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.fixture
def library(monkeypatch):
    """Programs that are stored as they are; zstandard may not be installed."""
    stored = types.SimpleNamespace(decompressobj=lambda: types.SimpleNamespace(decompress=bytes))
    module = types.SimpleNamespace(ZstdDecompressor=lambda: stored)
    monkeypatch.setitem(sys.modules, "zstandard", module)
    wanted, other, older = b"marlin for sm_90", b"something else..", b"marlin for sm_80"
    first = container(entry(2, 80, older), entry(2, 90, wanted), entry(1, 90, b"marlin as PTX..."))
    return b"host code" + first + b"more" + container(entry(2, 90, other)) + b"end"


def test_the_programs_of_a_library(library):
    found = [(kind, arch, library[at : at + n]) for kind, arch, at, _, n in entries(library)]
    assert found == [
        (2, 80, b"marlin for sm_80"),
        (2, 90, b"marlin for sm_90"),
        (1, 90, b"marlin as PTX..."),
        (2, 90, b"something else.."),
    ]


def test_only_what_is_measured_stays(library):
    small = only(library, 90, b"marlin")
    assert len(small) == len(library)  # nothing moves
    assert small.startswith(b"host code")
    assert small.endswith(b"end")
    kept = [small[at : at + n].strip(b"\0") for _, _, at, _, n in entries(small)]
    assert kept == [b"", b"marlin for sm_90", b"", b""]


def test_a_source_file_is_cut_before_a_line():
    assert cut("a\n  static b(\nstatic b(\nc", "static b(", "x.cu") == "a\n  static b(\n"
    with pytest.raises(SystemExit, match=r"x\.cu: a line must begin with 'static b\(', got none"):
        cut("a\nc", "static b(", "x.cu")
