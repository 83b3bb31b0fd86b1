"""The synthetic model: types, bytes, floors."""

import math
from collections import Counter

import pytest
import torch

from benchmarks import model
from benchmarks.shapes import QWEN_27B, TINY
from torch_dflash.gguf.types import TYPES
from torch_dflash.models.tensors import target_table
from torch_dflash.nn import QuantGLU, QuantLinear

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return model.target(TINY.target, TINY.context, CPU)


@pytest.fixture(scope="module")
def drafter(target):
    return model.drafter(TINY.drafter, target, CPU)


def matrices():
    """``(name, type, bytes)`` of every matrix of the 27B target that a step multiplies with."""
    for name, shape in target_table(QWEN_27B.target).items():
        if len(shape) == 2 and name != "token_embd.weight" and "conv1d" not in name:
            kind = TYPES[model.q4_k_m(QWEN_27B.target, name)]
            yield name, kind.name, shape[0] * kind.row_bytes(shape[1])


def test_a_27b_step_reads_what_a_q4_k_m_file_holds():
    # of llama-quantize: 64 layers, half of ffn_down and of attn_v in Q6_K, attn_qkv in Q5_K
    assert sum(size for *_, size in matrices()) == pytest.approx(15.813e9, rel=1e-4)
    found = Counter((name.rsplit(".", 2)[-2], kind) for name, kind, _ in matrices())
    assert found["ffn_down", "Q6_K"] == found["ffn_down", "Q4_K"] == 32
    assert found["attn_v", "Q6_K"] == found["attn_v", "Q4_K"] == 8
    assert found["attn_qkv", "Q5_K"] == 48
    assert found["ssm_beta", "Q8_0"] == 48
    assert found["output", "Q6_K"] == 1


def test_the_shapes_are_the_published_ones():
    assert QWEN_27B.matmuls == {
        "gate+up": (34816, 5120),
        "down": (5120, 17408),
        "qkv": (10240, 5120),
    }
    assert QWEN_27B.target.layer_kinds.count("gdn") == 48
    assert (QWEN_27B.drafter.num_layers, QWEN_27B.drafter.block_size) == (5, 8)


def test_a_step_gives_finite_rows(target):
    recurrent = target.state.recurrent
    recurrent.accepted.fill_(8)
    recurrent.conv_accepted.fill_(8)
    out = target.verify(torch.arange(8))
    assert out.logits.isfinite().all()
    assert out.logits.std() > 0
    target.commit(1)
    target.state.length = TINY.context


def test_a_draft_gives_tokens(drafter):
    from torch_dflash.decoding.sampling import GREEDY

    tokens = drafter.propose(torch.tensor([1]), 7, GREEDY).tokens
    assert tokens.shape == (1, 7)
    assert ((tokens >= 0) & (tokens < TINY.drafter.vocab_size)).all()


def gguf_bytes(modules):
    """Of all matrices, counted from the bytes they give back."""
    return sum(
        part.numel()
        for top in modules
        for m in top.modules()
        if isinstance(m, (QuantLinear, QuantGLU))
        for part in m.packed()
    )


def test_the_floor_of_a_verification(target):
    rows, t = 8, TINY.target
    parts = model.target_floor(target, rows).parts
    assert parts["weights"] == gguf_bytes([target])
    gdn = t.layer_kinds.count("gdn")
    state = t.num_value_heads * t.value_head_dim * t.key_head_dim
    assert parts["states"] == 4 * gdn * state
    journal = t.num_key_heads * t.key_head_dim + t.num_value_heads * (t.value_head_dim + 1)
    assert parts["journals"] == 4 * gdn * rows * journal
    full = t.layer_kinds.count("full")
    assert parts["keys and values"] == 2 * 2 * full * (TINY.context + rows) * t.kv_size
    assert model.target_floor(target, rows).nbytes == sum(parts.values())


def test_the_floor_of_a_draft(target, drafter):
    parts = model.drafter_floor(drafter, target, 8).parts
    whole = [drafter.layers, drafter.hidden_projection, target.vocabulary.head]
    assert parts["weights"] == gguf_bytes(whole)
    assert parts["keys and values"] == 2 * 2 * (TINY.context + 8) * math.prod(
        (TINY.drafter.num_layers, TINY.drafter.num_kv_heads, TINY.drafter.head_dim)
    )
    d = TINY.drafter
    kv, hidden = 2 * d.num_kv_heads * d.head_dim, d.hidden_size
    values = hidden * d.target_hidden_columns + d.num_layers * kv * hidden
    assert model.append_floor(drafter).nbytes == values // 32 * 34  # Q8_0
