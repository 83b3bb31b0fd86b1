from dataclasses import replace

import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import load_file

from torch_dflash.drafters.checkpoint import load_checkpoint
from torch_dflash.drafters.names import upstream_name
from torch_dflash.fields import CheckpointError


class Target:
    hidden_size, vocab_size, num_layers = 64, 32, 12


def values(checkpoint):
    return {name: tensor.to_dense() for name, tensor in checkpoint.tensors.items()}


GGUF_CASES = (
    "dflash dflash2 dflash2_scaled_taps3 dflash_interleaved_rope dflash_value_scale_sinks dspark"
)


@pytest.mark.parametrize(
    "name", [*GGUF_CASES.split(" "), "dspark_speculators_bonus", "dspark_speculators_d2t"]
)
def test_gguf_holds_the_tensors_of_its_source(fixtures, name):
    """Upstream's converter reorders interleaved rows and shifts d2t; reading undoes neither twice.

    The weights are exact in bf16, and the converter keeps bf16 or widens to float32, so all values
    must be equal.
    """
    source = load_checkpoint(fixtures / "gguf" / name)
    got = load_checkpoint(fixtures / "gguf" / name / "model.gguf")
    assert (source.format, got.format) == ("hf", "gguf")
    assert got.tokenizer == got.path
    # the full-vocabulary head that speculators ships is a copy of the target's: dropped upstream
    missing = source.tensors.keys() - got.tensors.keys()
    assert missing <= {"lm_head.weight"}
    a, b = values(source), values(got)
    for key in b:
        assert torch.equal(a[key].double(), b[key].double()), key
    assert got.config.rope_is_neox
    assert source.config.rope_is_neox
    if name == "dflash_interleaved_rope":
        assert any("NeoX order" in n for n in source.config.notes)
        stored = load_file(fixtures / "gguf" / name / "model.safetensors")
        key = "layers.1.self_attn.k_norm.weight"
        assert torch.equal(a[key], torch.cat((stored[key][0::2], stored[key][1::2])))
        assert not torch.equal(a[key], stored[key])


def reduced(d2t):
    return {
        "markov_head.markov_w2.weight": torch.ones(2, 10),
        "lm_head.weight": torch.ones(2, 64),
        "d2t": d2t,
    }


def test_row_58_d2t_offsets_and_absolute(folder, tmp_path):
    path = folder("dspark", tensors=reduced(torch.tensor([5, 5])), draft_vocab_size=2)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config.draft_vocab_size == 2
    assert checkpoint.tensors["d2t"].to_dense().tolist() == [5, 6]
    gguf = write_gguf(tmp_path / "x.gguf", checkpoint, d2t=torch.tensor([5, 6]))
    assert load_checkpoint(gguf).tensors["d2t"].to_dense().tolist() == [5, 6]


@pytest.mark.parametrize(
    "d2t,message",
    [
        (torch.tensor([5, 31]), r"must hold offsets .* vocabulary of 32, got ids 5..32"),
        (torch.tensor([-1, 5]), r"got ids -1..6"),
        (torch.tensor([5, 4]), r"must map every draft token to another token, got 1 repeats"),
        (torch.tensor([5.0, 5.0]), r"'d2t' must be of type I32 I64, got F32"),
        (torch.tensor([[5, 5]]), r"'d2t' must be \[2\], got \[1, 2\]|draft_vocab_size must agree"),
    ],
)
def test_malformed_d2t(folder, d2t, message):
    path = folder("dspark", tensors=reduced(d2t), draft_vocab_size=2)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_reduced_vocabulary_needs_head_and_table(folder):
    path = folder("dspark", tensors=reduced(None), draft_vocab_size=2)
    with pytest.raises(CheckpointError, match="got all but 1: d2t"):
        load_checkpoint(path)


def write_gguf(path, checkpoint, arch="dflash", flat=False, **changes):
    """A minimal file in upstream's layout, by gguf-py."""
    c = checkpoint.config
    writer = GGUFWriter(path, arch)
    for key, value in {
        "block_count": c.num_layers,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", c.rope.theta)
    ids = [i + 1 for i in c.target_layer_ids]
    writer.add_key_value(
        f"{arch}.target_layers", ids, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT32
    )
    for logical, tensor in checkpoint.tensors.items():
        value = changes[logical] if logical in changes else tensor.to_dense()
        if value is None:
            continue
        name = upstream_name(logical)
        if flat and logical == "confidence_head.proj.weight":
            value = value[0]
        writer.add_tensor(
            name, value.float().numpy() if value.is_floating_point() else value.numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LUCEBOX = {
    "fc.weight": "dflash_fc.weight",
    "hidden_norm.weight": "dflash_hidden_norm.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv.base",
    "attention_conv.kernel_projection.weight": "attn_conv.proj.weight",
    "mlp_conv.base_kernel": "ffn_conv.base",
    "mlp_conv.kernel_projection.weight": "ffn_conv.proj.weight",
    "candidate_selector.predecessor_codebook": "dflash.selector.pred_cb",
    "candidate_selector.successor_codebook": "dflash.selector.succ_cb",
    "candidate_selector.hidden_projection.weight": "dflash.selector.hproj.weight",
    "markov_head.markov_w1.weight": "dflash.dspark.markov.w1",
    "markov_head.markov_w2.weight": "dflash.dspark.markov.w2",
    "confidence_head.proj.weight": "dflash.dspark.confidence.weight",
    "confidence_head.proj.bias": "dflash.dspark.confidence.bias",
}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_lucebox_file(folder, tmp_path, kind):
    """Its own names, raw ids, no tokenizer, keys one level deeper: the same drafter."""
    source = load_checkpoint(folder(kind))
    c, arch = source.config, "qwen35-dflash-draft"
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, arch)
    keys = {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "dflash.n_target_layers": 3,
        "dflash.n_target_features": 192,
        "dflash.block_size": 8,
        "dflash.mask_token_id": 9,
    }
    if kind == "dflash2":
        keys |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6}
        keys = {
            f"dflash.dflash2.{k}" if k.startswith(("conv", "sel")) else k: v
            for k, v in keys.items()
        }
    if kind == "dspark":
        keys |= {"dflash.dspark.enabled": 1, "dflash.dspark.markov_rank": 10}
        keys |= {"dflash.dspark.vocab_size": 32, "dflash.dspark.confidence_dim": 74}
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", 1e7)
    writer.add_key_value(
        f"{arch}.dflash.target_layer_ids", [1, 4, 9], GGUFValueType.ARRAY, GGUFValueType.INT64
    )
    for logical, tensor in source.tensors.items():
        layer = logical.split(".", 2)
        name = LUCEBOX.get(logical) or f"blk.{layer[1]}.{LUCEBOX[layer[2]]}"
        writer.add_tensor(name, tensor.to_dense().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = load_checkpoint(path, target=Target())
    want = replace(
        c,
        rms_norm_eps=got.config.rms_norm_eps,  # float32 in the file
        context_length=None,
        selector_top_k=16 if kind == "dflash2" else None,
    )
    assert got.config == want
    a, b = values(source), values(got)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].float(), b[name]), name
    notes = [n for n in got.config.notes if "selector_top_k" not in n]
    assert notes == []


def test_gguf_flat_confidence_without_bias(folder, tmp_path):
    source = load_checkpoint(folder("dspark"))
    changes = {"confidence_head.proj.bias": None}
    got = load_checkpoint(write_gguf(tmp_path / "x.gguf", source, flat=True, **changes))
    weight, bias = (got.tensors[f"confidence_head.proj.{n}"] for n in ("weight", "bias"))
    assert weight.shape == (1, 74)
    want = source.tensors["confidence_head.proj.weight"].to_dense().float()
    assert torch.equal(weight.to_dense(), want)
    assert bias.to_dense().tolist() == [0.0]
    assert got.config.confidence == "hidden+markov"
    reader = GGUFReader(tmp_path / "x.gguf")
    assert next(t for t in reader.tensors if t.name == "conf_proj.weight").shape.tolist() == [74]


def test_gguf_without_vocabulary_takes_the_targets(folder, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", load_checkpoint(folder()))
    with pytest.raises(CheckpointError, match="pass the target, or vocab_size="):
        load_checkpoint(path)
    checkpoint = load_checkpoint(path, target=Target())
    assert checkpoint.config.vocab_size == 32
    assert checkpoint.config.sources["vocab_size"] == "the target's vocabulary"
    assert checkpoint.tokenizer is None
