"""What the vLLM plugin makes of a speculative config, without vLLM: folders, flags, refusals."""

import dataclasses
import json
import logging
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_dflash_vllm.drafter_cache import CACHE_MARK, cache_root
from torch_dflash_vllm.drafter_plan import Target, plan

from torch_dflash.drafters.checkpoint import read_checkpoint
from torch_dflash.drafters.to_gguf import write_drafter
from torch_dflash.testing.tiny import tiny_drafter

GPU = Target(
    hidden_size=256, vocab_size=512, num_layers=6, max_model_len=1024, dtype=torch.bfloat16
)
CPU = dataclasses.replace(GPU, v1_runner=True, dtype=torch.float32)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/drafters"


@pytest.fixture
def drafter(tmp_path):
    def make(kind="dflash", **changes):
        return tiny_drafter(tmp_path / kind, kind, **changes)

    return make


def as_gguf(folder):
    path = folder.with_suffix(".gguf")
    write_drafter(path, read_checkpoint(folder), name="d", context_length=4096)
    return path


def config_of(spec):
    with open(os.path.join(spec["model"], "config.json")) as file:
        return json.load(file)


@pytest.mark.parametrize("kind, tokens", [("dflash", 7), ("dflash2", 7), ("dspark", 8)])
@pytest.mark.parametrize("gguf", [False, True])
def test_on_the_v2_runner_vllm_s_own_names_and_methods(drafter, kind, tokens, gguf):
    source = drafter(kind)
    spec = plan({"method": "dflash", "model": str(as_gguf(source) if gguf else source)}, GPU)
    assert spec["method"] == ("dspark" if kind == "dspark" else "dflash")
    assert spec["num_speculative_tokens"] == tokens
    assert "use_local_argmax_reduction" not in spec
    assert "draft_load_config" not in spec
    after = read_checkpoint(spec["model"])
    before = read_checkpoint(source)
    assert after.config.kind == kind
    assert "TD" not in config_of(spec)["architectures"][0]
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name].to_dense(), tensor.to_dense()), name


@pytest.mark.parametrize("head", ["gated", "rnn"])
@pytest.mark.parametrize("target", [GPU, CPU], ids=["gpu", "cpu"])
def test_markov_heads_that_vllm_does_not_have(drafter, head, target):
    spec = plan({"method": "dflash", "model": str(drafter("dspark", markov_head=head))}, target)
    assert config_of(spec)["markov_head_type"] == head
    joint = {"gated": "gate_proj", "rnn": "joint_proj"}[head]
    assert f"markov_head.{joint}.weight" in load_file(
        os.path.join(spec["model"], "model.safetensors")
    )


@pytest.mark.parametrize(
    "kind, name",
    [
        ("dflash", "DFlashDraftModel"),
        ("dflash2", "DFlashTD2DraftModel"),
        ("dspark", "DFlashTDSparkDraftModel"),
    ],
)
def test_on_the_v1_runner_all_are_dflash_to_vllm(drafter, kind, name):
    spec = plan(
        {"method": "dspark" if kind == "dspark" else None, "model": str(drafter(kind))}, CPU
    )
    assert spec["method"] == "dflash"
    assert spec["use_local_argmax_reduction"] is True
    assert config_of(spec)["architectures"] == [name]


def test_weights_of_a_folder_stay_where_they_are(drafter, cache):
    source = drafter()
    spec = plan({"method": "dflash", "model": str(source)}, CPU)
    [folder] = cache.iterdir()
    assert spec["model"] == str(folder)
    weights = folder / "model.safetensors"
    assert weights.is_symlink()
    assert weights.resolve() == source / "model.safetensors"


def test_names_that_vllm_does_not_know_are_written_anew(drafter, cache):
    source = drafter("dspark")
    tensors = load_file(source / "model.safetensors")
    tensors["markov_w1.weight"] = tensors.pop("markov_head.markov_w1.weight")
    save_file(tensors, source / "model.safetensors")
    spec = plan({"method": "dspark", "model": str(source)}, GPU)
    written = os.path.join(spec["model"], "model.safetensors")
    assert not os.path.islink(written)
    assert "markov_head.markov_w1.weight" in load_file(written)


def test_the_cache_goes_by_content(drafter, cache, tmp_path):
    path = as_gguf(drafter())
    first = plan({"method": "dflash", "model": str(path)}, GPU)
    before = os.stat(os.path.join(first["model"], "model.safetensors")).st_ino
    other = tmp_path / "elsewhere.gguf"
    path.rename(other)
    path.symlink_to(other)
    again = plan({"method": "dflash", "model": str(path)}, GPU)
    assert again["model"] == first["model"]
    assert os.stat(os.path.join(again["model"], "model.safetensors")).st_ino == before
    assert len([*cache.iterdir()]) == 1
    plan({"method": "dflash", "model": str(path)}, CPU)  # float32
    path.unlink()
    tiny_drafter(tmp_path / "new", "dflash", seed=1)
    (tmp_path / "new.gguf").unlink(missing_ok=True)
    as_gguf(tmp_path / "new").rename(path)
    plan({"method": "dflash", "model": str(path)}, GPU)
    assert len([*cache.iterdir()]) == 3


def test_a_plan_can_be_planned_again(drafter):
    spec = plan({"method": "dflash", "model": str(drafter("dspark"))}, GPU)
    assert os.path.exists(os.path.join(spec["model"], CACHE_MARK))
    assert plan(spec, GPU) == spec


def test_the_drafter_is_read_by_vllm_s_own_loader_beside_a_gguf_target(drafter):
    target = dataclasses.replace(GPU, load_format="dflash_gguf")
    spec = {"method": "dflash", "model": str(drafter())}
    assert plan(spec, target)["draft_load_config"] == {"load_format": "auto"}
    own = spec | {"draft_load_config": {"load_format": "dummy"}}
    assert plan(own, target)["draft_load_config"] == {"load_format": "dummy"}


def test_a_drafter_that_does_not_say_what_it_was_trained_for(drafter):
    with pytest.raises(ValueError, match="max_position_embeddings must be in its config"):
        plan({"method": "dflash", "model": str(drafter(max_position_embeddings=None))}, GPU)


def test_longer_sequences_than_trained_are_said_and_fit_the_table(drafter, caplog):
    with caplog.at_level(logging.WARNING, "vllm.torch_dflash"):
        spec = plan({"method": "dflash", "model": str(drafter(max_position_embeddings=512))}, GPU)
    assert "was trained for 512 positions, max_model_len is 1024" in caplog.text
    assert config_of(spec)["max_position_embeddings"] == 1024


def test_what_is_not_ours_is_left_alone(drafter, caplog):
    quantized = drafter(quantization_config={"quant_method": "fp8"})
    with caplog.at_level(logging.WARNING, "vllm.torch_dflash"):
        assert plan({"method": "ngram", "num_speculative_tokens": 3}, GPU) is None
        assert plan({"method": "eagle3", "model": str(quantized)}, GPU) is None
        assert plan({"method": "dspark", "num_speculative_tokens": 3}, GPU) is None
        assert plan({"model": "org/a-draft-model"}, GPU) is None
        assert not caplog.records
        assert plan({"method": "dflash", "model": "org/name-DFlash"}, GPU) is None
        assert plan({"method": "dflash", "model": str(quantized)}, GPU) is None
    assert "whether it fits the target is not checked" in caplog.messages[0]
    assert "is quantized: left to vLLM" in caplog.messages[1]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("TORCH_DFLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/torch-dflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache/torch-dflash"


def remove(folder, name):
    (folder / name).unlink()
    return folder


TP3 = dataclasses.replace(GPU, tensor_parallel_size=3)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
REFUSED = {
    "nothing there": (lambda d, p: str(p / "gone"), {}, GPU, "model must be .* nothing is"),
    "no such file": (lambda d, p: "./gone.gguf", {}, GPU, "nothing is; check the path"),
    "another file": (lambda d, p: str(d() / "config.json"), {}, GPU, "folder or .gguf file"),
    "no config": (lambda d, p: str(remove(d(), "config.json")), {}, GPU, "must be a file"),
    "no weights": (
        lambda d, p: str(remove(d(), "model.safetensors")),
        {},
        GPU,
        "must hold model.safetensors",
    ),
    "GGUF for EAGLE": (
        lambda d, p: str(as_gguf(d())),
        {"method": "eagle3"},
        GPU,
        "method must be dflash or dspark for a .gguf drafter, got 'eagle3'",
    ),
    "a target as drafter": (
        lambda d, p: os.path.join(os.environ["TINY"], "target.gguf"),
        {},
        GPU,
        "this is not a drafter; give it as the target",
    ),
    "method": (lambda d, p: str(d()), {"method": "dspark"}, GPU, "method must be dflash"),
    "hidden size": (lambda d, p: str(d(hidden=512)), {}, GPU, "hidden size 512, target has 256"),
    "vocabulary": (lambda d, p: str(d(vocab=300)), {}, GPU, "vocabulary 300, target has 512"),
    "depth": (lambda d, p: str(d(num_target_layers=9)), {}, GPU, "9 where the target has 6"),
    "layer ids": (
        lambda d, p: str(d(target_layer_ids=(0, 2, 5), num_target_layers=None)),
        {},
        GPU,
        "must be below 5",
    ),
    "mask token": (
        lambda d, p: str(d(dflash_config={"mask_token_id": 512, "target_layer_ids": [0, 2, 4]})),
        {},
        GPU,
        "mask_token_id must be a token of the vocabulary of 512, got 512",
    ),
    "no mask token": (
        lambda d, p: str(d(dflash_config={"target_layer_ids": [0, 2, 4]})),
        {},
        GPU,
        "mask_token_id",
    ),
    "too many tokens": (
        lambda d, p: str(d()),
        {"num_speculative_tokens": 8},
        GPU,
        r"num_speculative_tokens must be 1\.\.7 .*block size 8\), got 8",
    ),
    "no tokens": (lambda d, p: str(d()), {"num_speculative_tokens": 0}, GPU, r"must be 1\.\.7"),
    "text for tokens": (lambda d, p: str(d()), {"num_speculative_tokens": "4"}, GPU, "got '4'"),
    "ranks": (
        lambda d, p: str(d()),
        {},
        TP3,
        "tensor_parallel_size must divide the drafter, got 3 ranks for 4 attention heads and 2 kv "
        "heads and an FFN of 256",
    ),
    "YaRN ends": (
        lambda d, p: str(d(rope_parameters=YARN)),
        {},
        GPU,
        "ends at 512 positions, got max_model_len 1024; pass --max-model-len 512 or less",
    ),
    "sampled drafts on the CPU": (
        lambda d, p: str(d("dflash2")),
        {"draft_sample_method": "probabilistic"},
        CPU,
        "draft_sample_method must be greedy for dflash2",
    ),
    "logits on the CPU": (
        lambda d, p: str(d("dspark")),
        {"use_local_argmax_reduction": False},
        CPU,
        "use_local_argmax_reduction must be true for dspark",
    ),
    "two kinds of attention on the CPU": (
        lambda d, p: str(d(is_causal=False, **SLIDING)),
        {},
        CPU,
        "same attention in every layer",
    ),
    "gated head, vLLM 0.32 on a GPU": (
        lambda d, p: str(d("dspark", markov_head="gated")),
        {},
        dataclasses.replace(GPU, chain_hook=False),
        "must be vanilla on a GPU in this vLLM, got 'gated'; take vLLM 0.33",
    ),
    "rnn head of few candidates": (
        lambda d, p: str(d("dspark", markov_head="rnn", dspark_draft_topk=4)),
        {},
        GPU,
        "must be vanilla beside dspark_draft_topk on a GPU, got 'rnn'",
    ),
    "embedding scale": (
        lambda d, p: str(d("dspark", input_embedding_scale=2.0)),
        {},
        GPU,
        "input_embedding_scale must be 1 for DSpark",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_invocation_is_refused_before_anything_is_written(
    drafter, cache, tmp_path, monkeypatch, name
):
    from torch_dflash.load import ASSETS

    monkeypatch.setenv("TINY", str(ASSETS))
    model, flags, target, message = REFUSED[name]
    spec = {"method": "dflash", "model": model(drafter, tmp_path)} | flags
    with pytest.raises(ValueError, match=message):
        plan(spec, target)
    assert not cache.exists()
