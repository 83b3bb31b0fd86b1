"""The embedded files: their size, types and metadata are what the documents say."""

import json
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGUFReader

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "torch_dflash" / "assets" / "tiny"
TRAIN = ROOT / "tools" / "train"
DRAFTERS = ("dflash", "dflash2", "dspark")


@pytest.fixture(scope="module")
def readers():
    return {name: GGUFReader(TINY / f"{name}.gguf") for name in ("target", *DRAFTERS)}


def types(reader):
    return {t.name: t.tensor_type.name for t in reader.tensors}


def value(reader, key):
    return reader.fields[key].contents()


def test_four_files_fit_in_24_mb():
    assert sum(p.stat().st_size for p in TINY.glob("*.gguf")) <= 24_000_000


def test_target_covers_every_type_the_matmul_decodes_specially(readers):
    got = types(readers["target"])
    assert got["token_embd.weight"] == "Q6_K"
    for i in (0, 1, 3, 4):
        assert got[f"blk.{i}.attn_qkv.weight"] == "Q5_K"
        assert got[f"blk.{i}.attn_gate.weight"] == "Q4_K"
        assert got[f"blk.{i}.ssm_out.weight"] == "Q8_0"
    for i in range(6):
        assert got[f"blk.{i}.ffn_gate.weight"] == ("Q4_K" if i % 2 else "IQ4_XS")
        assert got[f"blk.{i}.ffn_up.weight"] == "Q4_K"
        assert got[f"blk.{i}.ffn_down.weight"] == ("Q6_K" if i in (0, 3) else "Q4_K")
    assert "output.weight" not in got  # tied


def test_target_dimensions(readers):
    r = readers["target"]
    assert value(r, "general.architecture") == "qwen35"
    assert value(r, "qwen35.attention.recurrent_layers") == [True, True, False, True, True, False]
    assert value(r, "qwen35.rope.dimension_sections") == [11, 11, 10, 0]
    assert value(r, "tokenizer.ggml.pre") == "qwen35"
    assert len(value(r, "tokenizer.ggml.tokens")) == 4096
    assert value(r, "tokenizer.ggml.tokens")[4092:] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|mask|>",
    ]
    assert value(r, "tokenizer.ggml.eos_token_id") == 4092


@pytest.mark.parametrize(("name", "block"), [("dflash", 8), ("dflash2", 8), ("dspark", 7)])
def test_drafters(readers, name, block):
    r = readers[name]
    got = types(r)
    assert value(r, "general.architecture") == "dflash"
    assert value(r, "dflash.block_size") == block
    assert value(r, "dflash.target_layers") == [1, 3, 5]  # layer ids 0, 2, 4
    assert value(r, "dflash.attention.causal") is False
    assert value(r, "tokenizer.ggml.mask_token_id") == 4095
    assert ("selector_hidden.weight" in got) == (name == "dflash2")
    assert ("markov_w1.weight" in got) == (name == "dspark")
    assert got["fc.weight"] == "Q5_K"
    kinds = Counter(v for k, v in got.items() if k.endswith(("attn_k.weight", "attn_v.weight")))
    assert kinds == {"Q8_0": 4}


def test_drafters_share_the_targets_vocabulary(readers):
    tokens = value(readers["target"], "tokenizer.ggml.tokens")
    merges = value(readers["target"], "tokenizer.ggml.merges")
    for name in DRAFTERS:
        assert value(readers[name], "tokenizer.ggml.tokens") == tokens
        assert value(readers[name], "tokenizer.ggml.merges") == merges


def test_held_out_packages_were_not_trained_on():
    sources = json.loads((TRAIN / "manifest.json").read_text())["sources"]
    role = {s["package"]: s["role"] for s in sources}
    held = json.loads((TRAIN / "held_out.json").read_text())
    assert len(held) == 32
    assert {role[row["file"].split("/")[0]] for row in held} == {"held out"}
    prompts = json.loads((TRAIN / "prompts.json").read_text())
    assert [p["file"] for p in prompts] == [row["file"] for row in held]
