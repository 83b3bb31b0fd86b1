import json
import logging
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import load_file, save_file

from torch_dflash.drafters.checkpoint import load_checkpoint, read_checkpoint
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.names import logical_names, upstream_name
from torch_dflash.drafters.resolve import Overrides
from torch_dflash.fields import CheckpointError


class Target:
    hidden_size, vocab_size, num_layers = 64, 32, 12


@pytest.fixture
def folder(tmp_path, hf, shapes_of):
    """``folder(kind, tensors=..., **changes)``: a random checkpoint on disk."""

    def make(kind="dflash", tensors=None, **changes):
        config = hf(kind, **changes)
        generator = torch.Generator().manual_seed(3)
        state = {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes_of(hf(kind)).items()
        }
        state |= tensors or {}
        state = {k: v for k, v in state.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(state, tmp_path / "model.safetensors")
        return tmp_path

    return make


def values(checkpoint):
    return {name: tensor.to_dense() for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_folder_tensors_come_back_bit_for_bit(folder, kind):
    path = folder(kind)
    checkpoint = load_checkpoint(path, target=Target())
    assert (checkpoint.format, checkpoint.path, checkpoint.tokenizer) == ("hf", path, None)
    assert checkpoint.config.kind == kind
    stored = load_file(path / "model.safetensors")
    assert checkpoint.tensors.keys() == stored.keys()
    for name, value in values(checkpoint).items():
        assert torch.equal(value, stored[name])
    assert checkpoint.nbytes == sum(2 * t.numel() for t in stored.values())


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


def test_row_28_heads_inside_the_one_file(folder):
    checkpoint = load_checkpoint(folder("dspark"))
    assert checkpoint.config.kind == "dspark"
    assert "markov_head.markov_w1.weight" in checkpoint.tensors
    assert "confidence_head.proj.weight" in checkpoint.tensors


@pytest.mark.parametrize(
    "alias,logical",
    [
        ("markov_w1.weight", "markov_head.markov_w1.weight"),
        ("dspark_markov_head.markov_w1.weight", "markov_head.markov_w1.weight"),
        ("model.markov_head.markov_w1.weight", "markov_head.markov_w1.weight"),
        ("confidence_proj.bias", "confidence_head.proj.bias"),
        ("dspark_confidence_head.weight", "confidence_head.proj.weight"),
        ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.layers.3.self_attn.sinks", "layers.3.self_attn.attention_sink_bias"),
        ("encoder.fc.weight", "fc.weight"),
        ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
        (
            "candidate_selector.successor_codebook.weight",
            "candidate_selector.successor_codebook",
        ),
    ],
)
def test_other_spellings(alias, logical):
    assert logical_names("x", [alias], gguf=False) == {logical: alias}


def test_prefixed_folder_loads(folder):
    path = folder("dflash2")
    stored = load_file(path / "model.safetensors")
    save_file({f"model.{k}": v for k, v in stored.items()}, path / "model.safetensors")
    assert load_checkpoint(path).tensors.keys() == stored.keys()


def test_ignored_tensors_are_noted(folder):
    extra = {
        "t2d": torch.zeros(32, dtype=torch.bool),
        "rotary_emb.inv_freq": torch.ones(8),
        "verifier_norm.weight": torch.ones(64),
    }
    notes = load_checkpoint(folder(tensors=extra)).config.notes
    assert notes == ("tensors of no use here: rotary_emb.inv_freq, t2d, verifier_norm.weight",)


def test_own_embedding_and_head_are_kept(folder):
    extra = {"embed_tokens.weight": torch.ones(32, 64), "lm_head.weight": torch.ones(32, 64)}
    assert extra.keys() <= load_checkpoint(folder(tensors=extra)).tensors.keys()
    checkpoint = load_checkpoint(folder(tensors=extra, has_embed_tokens=False))
    assert "embed_tokens.weight" not in checkpoint.tensors
    assert any("has_embed_tokens is false" in n for n in checkpoint.config.notes)


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


def save_mask(path, value):
    torch.save(value, path / "mask_embedding.pt")


@pytest.mark.parametrize("shape", [(64,), (1, 64)])
@pytest.mark.parametrize("token", [9, None])
def test_mask_embedding(folder, shape, token):
    path, row = folder(), torch.linspace(-1, 1, 64)
    bare = row.view(shape)
    save_mask(path, bare if token is None else {"mask_token_id": token, "embedding": bare})
    checkpoint = load_checkpoint(path)
    assert torch.equal(checkpoint.tensors["mask_embedding"].to_dense(), row)


def test_mask_embedding_states_the_token(folder):
    path = folder(d_mask_token_id=None)
    save_mask(path, {"mask_token_id": 0, "embedding": torch.ones(64)})
    config = load_checkpoint(path).config
    assert (config.mask_token_id, config.sources["mask_token_id"]) == (0, "mask_embedding.pt")
    assert load_checkpoint(path, overrides=Overrides(mask_token_id=0)).config.mask_token_id == 0


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    "value,message",
    [
        (torch.ones(63), r"embedding must be \[64\], got \[63\]"),
        ({"mask_token_id": 8, "embedding": torch.ones(64)}, "must be the drafter's 9, got 8"),
        ({"mask_token_id": "9", "embedding": torch.ones(64)}, "must be an integer, got '9'"),
        ({"weight": torch.ones(64)}, "must be a float32, float16 or bfloat16 tensor, got NoneType"),
        (torch.ones(64, dtype=torch.int64), "bfloat16 tensor, got torch.int64"),
        (torch.full((64,), float("nan")), "must be finite"),
    ],
)
def test_malformed_mask_embedding(folder, value, message):
    path = folder()
    save_mask(path, value)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_mask_embedding_never_runs_code(folder, capsys):
    path = folder()
    for data in (pickle.dumps(Evil(), protocol=2), b"", b"\x80\x02junk"):
        (path / "mask_embedding.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match="must hold a tensor or a dict"):
            load_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_types_and_nan(folder):
    extra = {"norm.weight": torch.ones(64, dtype=torch.float64)}
    with pytest.raises(
        CheckpointError, match=r"'norm.weight' must be of type BF16 F16 F32, got F64"
    ):
        load_checkpoint(folder(tensors=extra))
    extra = {"norm.weight": torch.full((64,), float("nan"))}
    with pytest.raises(CheckpointError, match=r"tensor 'norm.weight' must have finite values"):
        load_checkpoint(folder(tensors=extra))


@pytest.mark.parametrize("name", ["gated", "rnn"])
def test_heads_that_do_not_run_yet_can_be_inspected(fixtures, name):
    path = fixtures / "dspark" / name
    assert read_checkpoint(path).config.markov_head_type == name
    with pytest.raises(CheckpointError, match=f"'vanilla', got '{name}'.*not implemented yet"):
        load_checkpoint(path)


def test_row_43_missing_drafter_or_wrong_target(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"must be a folder with .* got nothing there"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="got another file"):
        load_checkpoint(tmp_path / "x.bin")

    class Other(Target):
        hidden_size = 128

    with pytest.raises(CheckpointError, match="hidden size 64, target has 128"):
        load_checkpoint(folder(), target=Other())


def test_notes_are_logged_once_each(folder, caplog):
    path = folder(d_new_idea=3)
    with caplog.at_level(logging.WARNING, logger="torch_dflash"):
        load_checkpoint(path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: dflash_config.new_idea = 3 is not a key we know: ignored"
    ]


def test_overrides(folder, hf):
    rope = replace(config_from_hf(hf()).rope, theta=1e6)
    config = load_checkpoint(
        folder(), overrides=Overrides(mask_token_id=3, causal=True, rope=rope)
    ).config
    assert config.mask_token_id == 3
    assert config.rope == rope
    assert all(layer.causal for layer in config.layers)
    assert config.sources["mask_token_id"] == config.sources["rope.theta"] == "override"
    assert config.sources["layers"].endswith("causal: override")


def test_tokenizer_is_found(folder):
    path = folder()
    (path / "tokenizer.json").write_text("{}")
    assert load_checkpoint(path).tokenizer == path


def test_incomplete_folder(folder):
    path = folder()
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must hold model.safetensors"):
        load_checkpoint(path)
    shutil.rmtree(path)
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"config.json: must be a file, got nothing there"):
        load_checkpoint(path)
