"""Malformed drafter folders: one line that names what is wrong, and nothing left."""

import json
import os
import pickle
import re
import shutil
import struct

import hf_craft as craft
import pytest
import torch
from refusal import refused
from safetensors.torch import load_file, save_file

ST, CONFIG = "model.safetensors", "config.json"


def text(content, name=CONFIG):
    return lambda path: (path / name).write_text(content)


def keys(**changes):
    """Change the config; ``d_`` is for ``dflash_config``, None removes."""

    def change(path):
        made = json.loads((path / CONFIG).read_text())
        for name, value in changes.items():
            scope = made["dflash_config"] if name.startswith("d_") else made
            name = name.removeprefix("d_")
            scope.pop(name, None)
            if value is not None:
                scope[name] = value
        (path / CONFIG).write_text(json.dumps(made))

    return change


def tensors(change):
    def apply(path):
        stored = load_file(path / ST)
        change(stored)
        save_file(stored, path / ST)

    return apply


def put(name, value):
    return tensors(lambda stored: stored.update({name: value}))


def drop(name):
    return tensors(lambda stored: stored.pop(name))


def spoil(name, value):
    def change(stored):
        stored[name] = stored[name].float().index_put((torch.tensor([1]),), torch.tensor(value))

    return tensors(change)


def index(change):
    """As two shards, with a changed index."""

    def apply(path):
        stored = load_file(path / ST)
        (path / ST).unlink()
        names = sorted(stored)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({n: stored[n] for n in part}, path / file)
        weight_map = {n: file for file, part in parts.items() for n in part}
        change(path, weight_map)
        made = json.dumps({"weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(made)

    return apply


def cut(size):
    def apply(path):
        whole = (path / ST).read_bytes()
        (path / ST).write_bytes(whole[:size])

    return apply


class Exploit:
    def __reduce__(self):
        return os.system, ("echo exploited",)


def exploit(path):
    (path / "mask_embedding.pt").write_bytes(pickle.dumps(Exploit()))


def pipe(path):
    (path / ST).unlink()
    os.mkfifo(path / ST)


NORM, FC, Q = "norm.weight", "fc.weight", "layers.1.self_attn.q_proj.weight"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONV = "layers.1.mlp_conv.kernel_projection.weight"
CODEBOOK = "candidate_selector.successor_codebook"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "factor": 0.5,
    "original_max_position_embeddings": 8,
}

# name -> (kind, what is done to the folder, what the line says)
FOLDERS = {
    "config missing": ("dflash", lambda p: (p / CONFIG).unlink(), r"config\.json: must be a file"),
    "config is no JSON": ("dflash", text("{"), r"config\.json: must be UTF-8 JSON"),
    "config is a list": ("dflash", text("[]"), r"config\.json: must hold an object, got list"),
    "config has a key twice": ("dflash", text('{"a": 1, "a": 2}'), r"key 'a' twice"),
    "config nested without end": ("dflash", text("[" * 99999), r"config\.json: must be UTF-8 JSON"),
    "config too large": ("dflash", text(" " * (9 << 20)), r"must have at most 8388608 bytes"),
    "weights missing": ("dflash", lambda p: (p / ST).unlink(), r"must hold model\.safetensors or"),
    "weights are a pipe": ("dflash", pipe, r"model\.safetensors: must be a file, got a folder or "),
    "weights cut": ("dflash", cut(20_000), r"must be a complete safetensors file.*fetch the file"),
    "weights empty": ("dflash", cut(0), r"must be a complete safetensors file"),
    "header of 2^60 bytes": (
        "dflash",
        lambda p: (p / ST).write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
        r"must be a complete safetensors file",
    ),
    "shard missing": (
        "dflash",
        index(lambda p, m: (p / "b.safetensors").unlink()),
        r"all 2 shards must be there, missing b\.safetensors; .* fetch them",
    ),
    "shard leads out": (
        "dflash",
        index(lambda p, m: m.update({NORM: "../b.safetensors"})),
        r"weight_map\['norm\.weight'\] must be the name of a \.safetensors file in this folder",
    ),
    "shard is absolute": (
        "dflash",
        index(lambda p, m: m.update({NORM: "/etc/passwd"})),
        r"must be the name of a \.safetensors file in this folder, got '/etc/passwd'",
    ),
    "shard is a number": ("dflash", index(lambda p, m: m.update({NORM: 7})), r"got 7"),
    "tensor in no shard": (
        "dflash",
        index(lambda p, m: m.update({"ghost": "a.safetensors"})),
        r"every tensor must be in its shard, got none of ghost",
    ),
    "tensor unlisted": (
        "dflash",
        index(lambda p, m: m.pop(NORM)),
        r"tensor 'norm\.weight' must be in no shard according to",
    ),
    "tensor in two shards": (
        "dflash",
        index(lambda p, m: shutil.copy(p / "a.safetensors", p / "b.safetensors")),
        r"tensor '.*' must be in a\.safetensors according to",
    ),
    "two checkpoints": (
        "dflash",
        index(lambda p, m: save_file({NORM: torch.ones(64)}, p / ST)),
        r"must hold one checkpoint, got model\.safetensors beside these shards; remove one",
    ),
    "tensor missing": ("dflash", drop(Q), r"must hold 25 tensors, got all but 1: layers\.1\.self_"),
    "tensor extra": ("dflash", put("surplus", torch.ones(3)), r"got 1 unknown: surplus"),
    "tensor twice by another name": ("dflash", put("model.norm.weight", torch.ones(64)), r"both m"),
    "tensor misshaped": ("dflash", put(Q, torch.ones(64, 63)), r"_proj\.weight' must be \[64, 64"),
    "tensor a scalar": ("dflash", put(NORM, torch.tensor(1.0)), r"norm\.weight' must have 1 dim"),
    "tensor empty": ("dflash", put(FC, torch.ones(64, 0)), r"fc\.weight'"),
    "integers for weights": ("dflash", put(Q, torch.ones(64, 64).int()), r"must be of type .* I32"),
    "FP8 for weights": (
        "dflash",
        put(Q, torch.ones(64, 64).to(torch.float8_e4m3fn)),
        r"q_proj\.weight'.* got torch\.float8_e4m3fn",
    ),
    "NaN": ("dflash", spoil(Q, float("nan")), r"q_proj\.weight' must have finite values.* row 1"),
    "infinity": ("dflash", spoil(NORM, float("inf")), r"norm\.weight' must have finite values"),
    "group of zero": ("dflash2", keys(d_conv_group_size=0), r"conv_group_size must be at least 1"),
    "group that does not divide": ("dflash2", keys(d_conv_group_size=7), r"conv_group_size must"),
    "taps of another number": ("dflash2", keys(d_conv_kernel_size=3), r"conv_kernel_size must agr"),
    "half a selector": ("dflash2", drop(CODEBOOK), r"selector must be whole, got all but candidat"),
    "codebook one row short": ("dflash2", put(CODEBOOK, torch.ones(319, 32)), r"319"),
    "convolution of another layer": ("dflash2", put(CONV, torch.ones(15, 64)), r"must be \[16, 64"),
    "selector wider than words": ("dflash2", keys(d_selector_top_k=999), r"must be at most the vo"),
    "w1 without w2": ("dspark", drop(W2), r"Markov head must be whole, got all but markov_head"),
    "rank against rank": ("dspark", put(W2, torch.ones(320, 31)), r"w2\.weight' must be \[320, 32"),
    "head of no kind": ("dspark", keys(d_markov_head_type="lstm"), r"must be vanilla, gated or rn"),
    "confidence of another width": (
        "dspark",
        put("confidence_head.proj.weight", torch.ones(1, 65)),
        r"confidence_head\.proj\.weight' must be \[1, 64\] or \[1, 96\], got \[1, 65\]",
    ),
    "d2t beyond the vocabulary": (
        "dspark",
        lambda p: (
            keys(draft_vocab_size=2)(p),
            put(W2, torch.ones(2, 32))(p),
            put("lm_head.weight", torch.ones(2, 64))(p),
            put("d2t", torch.tensor([5, 400]))(p),
        ),
        r"'d2t' must hold offsets .* vocabulary of 320, got ids 5\.\.401",
    ),
    "mask token missing": ("dflash", keys(d_mask_token_id=None), r"mask_token_id .*must be presen"),
    "mask token negative": ("dflash", keys(d_mask_token_id=-1), r"must be a token of the vocab"),
    "mask token a string": ("dflash", keys(d_mask_token_id="9"), r"must be an integer, got '9'"),
    "layer twice": ("dflash", keys(d_target_layer_ids=[1, 1, 9]), r"must not repeat a layer"),
    "layer below 0": ("dflash", keys(d_target_layer_ids=[-1, 4, 9]), r"must be at least 0"),
    "layer beyond the target": ("dflash", keys(d_target_layer_ids=[1, 4, 11]), r"must be below 11"),
    "layers that do not fill fc": ("dflash", keys(d_target_layer_ids=[1, 4]), r"must fill the 192"),
    "no theta": ("dflash", keys(rope_parameters={}), r"rope_theta .*must be present.*copy it from"),
    "rope of no kind": (
        "dflash",
        keys(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        r"must be default, linear or yarn, got 'longrope'",
    ),
    "yarn that shrinks": ("dflash", keys(rope_parameters=YARN), r"factor must be at least 1, got "),
    "window missing": ("dflash", keys(layer_types=["sliding_attention"] * 2), r"must be present f"),
    "layer of no kind": ("dflash", keys(layer_types=["full_attention", "x"]), r"layer_types\[1\] "),
    "width against the tensors": ("dflash", keys(hidden_size=10**15), r"hidden_size must agree wi"),
    "layers a string": ("dflash", keys(num_hidden_layers="2"), r"must be an integer, got '2'"),
    "block of none": ("dflash", keys(block_size=0, d_block_size=None), r"block_size must be at le"),
    "eps infinite": ("dflash", keys(rms_norm_eps=1e999), r"rms_norm_eps must be a finite number"),
    "another activation": ("dflash", keys(hidden_act="gelu"), r"hidden_act must be silu, got 'gel"),
    "another drafter": ("dflash", keys(architectures=["DominoDraftModel"]), r"is Domino, .* use a"),
    "promise of a head": ("dflash", keys(architectures=["DSparkDraftModel"]), r"probably incomple"),
    "a pickle that runs": ("dflash", exploit, r"mask_embedding\.pt: must hold a tensor or a dict"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_folder(tmp_path, capsys, case):
    kind, spoil, said = FOLDERS[case]
    source = craft.folder(tmp_path / "in", craft.config(kind))
    spoil(source)
    line = refused(capsys, tmp_path, "convert", source, "-o", tmp_path / "x.gguf")
    assert f"{tmp_path}/in" in line
    assert re.search(said, line), line
    again = refused(capsys, tmp_path, "prepare", source, "-o", tmp_path / "out")
    assert again == line
