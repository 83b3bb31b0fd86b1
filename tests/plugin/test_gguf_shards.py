"""Ranks' parts of GGUF tensors, put together again."""

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from torch_dflash_vllm.gguf.shards import MISALIGNED, GDNShard, check_parallel, take_columns
from torch_dflash_vllm.gguf.values import log_decay

from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFFile, group_v_heads
from torch_dflash.models import read_target_config
from torch_dflash.testing.tiny import random_quant, tiny_hybrid
from torch_dflash.testing.tiny_dense import tiny_dense


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q6_K, Q.IQ4_XS, Q.Q8_0, Q.Q4_0, Q.BF16])
def test_columns_are_those_of_the_dense_matrix(kind):
    w = random_quant(5, 1024, kind, torch.Generator().manual_seed(0), 1.0)
    ranges = [(256, 512), (768, 1024), (0, 256)]
    dense = w.to_dense()
    want = torch.cat([dense[:, a:b] for a, b in ranges], 1)
    got = take_columns(w, ranges, "w", torch.float32)
    assert got.ggml_type == w.ggml_type
    assert torch.equal(got.to_dense(), want)


def test_a_cut_quant_is_refused_or_dequantized(monkeypatch, caplog):
    w = random_quant(3, 512, Q.Q5_K, torch.Generator().manual_seed(0), 1.0)
    with pytest.raises(CheckpointError, match=r"'blk.1.x' must be cut between quants of 256 col"):
        take_columns(w, [(0, 384)], "blk.1.x", torch.float32)
    monkeypatch.setenv(MISALIGNED, "dequantize")
    got = take_columns(w, [(0, 384)], "blk.1.x", torch.float32)
    assert got.type_name == "F32"
    assert torch.equal(got.to_dense(), w.to_dense()[:, :384])
    assert "blk.1.x (Q5_K): columns [(0, 384)] cut quants of 256" in caplog.text
    monkeypatch.setenv(MISALIGNED, "maybe")
    with pytest.raises(ValueError, match=f"{MISALIGNED} must be refuse or dequantize, got 'maybe'"):
        take_columns(w, [(0, 384)], "blk.1.x", torch.float32)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid") / "h.gguf"
    with GGUFFile.open(tiny_hybrid(path, layers=3)) as file:
        yield file, read_target_config(file)


@pytest.mark.parametrize("size", [1, 2])
def test_v_heads_of_the_ranks_are_the_grouped_heads(hybrid, size):
    _, c = hybrid
    nk, nv, dv = c.num_key_heads, c.num_value_heads, c.value_head_dim
    tiled = torch.arange(c.value_size)
    want = group_v_heads(tiled, nk, nv, dv)
    shards = [GDNShard(c, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([s.v_rows() for s in shards]), want)
    for s in shards:
        q, k, v = s.qkv_rows().split([c.key_size // size] * 2 + [c.value_size // size])
        assert torch.equal(k - q, torch.full_like(q, c.key_size))
        assert torch.equal(v - 2 * c.key_size, s.v_rows())


@pytest.mark.parametrize("size", [1, 2])
def test_the_output_projection_of_all_ranks_adds_up(hybrid, size):
    """Tiled columns times tiled heads = grouped columns times grouped heads, summed over ranks."""
    _, c = hybrid
    g = torch.Generator().manual_seed(1)
    weight = random_quant(7, c.value_size, Q.F32, g, 1.0)
    x = torch.randn(3, c.value_size, generator=g)  # grouped, as vLLM's layer returns it
    grouped = group_v_heads(weight.to_dense().T, c.num_key_heads, c.num_value_heads,
                            c.value_head_dim).T  # fmt: skip
    total = torch.zeros(3, 7)
    for rank, part in enumerate(x.chunk(size, 1)):
        s = GDNShard(c, rank, size)
        w = take_columns(weight, s.out_columns(), "ssm_out", torch.float32).to_dense()
        heads = part.reshape(3, s.k_heads, s.ratio, c.value_head_dim).transpose(1, 2).reshape(3, -1)
        total += heads @ w.T
    # float32 sums of 256 products of about 1, in two orders: errors stay below 256 * 2^-24 * 16
    assert (total - x @ grouped.T).abs().max() < 256 * 2**-24 * 16


def test_what_divides_and_what_does_not(hybrid, tmp_path, monkeypatch):
    file, config = hybrid
    check_parallel(config, file, 1)
    check_parallel(config, file, 2)  # Q8_0: quants of 32
    with pytest.raises(CheckpointError, match=r"head_count 2 must be .* got 4; this .* by 1, 2$"):
        check_parallel(config, file, 4)
    path = tiny_hybrid(tmp_path / "k.gguf", layers=3, types={"ssm_out.weight": int(Q.Q4_K)})
    with GGUFFile.open(path) as other:
        c = read_target_config(other)
        text = r"blk.0.ssm_out.weight \(Q4_K, quants of 256\) by 64 columns and 1 more; this file "
        with pytest.raises(CheckpointError, match=text + "splits by 1, or hold"):
            check_parallel(c, other, 2)
        monkeypatch.setenv(MISALIGNED, "dequantize")
        check_parallel(c, other, 2)
    dense = tiny_dense(tmp_path / "d.gguf", "llama", vocab=500, heads=6, kv_heads=6, head_dim=128,
                       ffn=768)  # fmt: skip
    with GGUFFile.open(dense) as other, pytest.raises(CheckpointError, match="filled up, 512"):
        check_parallel(read_target_config(other), other, 3)


def test_log_decay_gives_the_files_decay_back():
    g = torch.Generator().manual_seed(0)
    trained = torch.randn(500, generator=g).mul(3)
    for a_log in (trained, trained.bfloat16().float()):
        A = -a_log.exp()
        error = (log_decay(A).exp() + A).abs() / A.abs()
        # a step of A_log near 8 is 2^-20, of its exponential half that relatively
        assert error.max() <= 2**-21
    assert torch.equal(log_decay(A), a_log)  # bfloat16 values come back themselves
