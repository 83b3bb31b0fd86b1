import logging
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_dflash.drafters.checkpoint import load_checkpoint
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.names import logical_names
from torch_dflash.drafters.resolve import Overrides
from torch_dflash.fields import CheckpointError


class Target:
    hidden_size, vocab_size, num_layers = 64, 32, 12


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
def test_gated_and_recurrent_heads_load(fixtures, name):
    checkpoint = load_checkpoint(fixtures / "dspark" / name)
    assert checkpoint.config.markov_head_type == name
    matrix = {"gated": "gate_proj", "rnn": "joint_proj"}[name]
    assert f"markov_head.{matrix}.bias" in checkpoint.tensors


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
