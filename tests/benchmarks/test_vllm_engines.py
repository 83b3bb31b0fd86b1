"""The files that the vLLM engines are measured with are what their readers take."""

import json

import torch
from torch_dflash_vllm.drafter_plan import Target, plan

from benchmarks.model import F32, Q4_K, Q5_K, Q6_K, Q8_0
from benchmarks.shapes import TINY
from benchmarks.vllm_engines.files import short, write_drafter, write_gguf_target, write_hf_target
from torch_dflash import load_target
from torch_dflash.gguf import GGUFFile
from torch_dflash.models.from_gguf import read_target_config

CONFIG = short(TINY.target, layers=2, vocab=384)


def test_a_gguf_target_has_the_shapes_and_runs(tmp_path):
    path = write_gguf_target(tmp_path / "t.gguf", CONFIG, torch.device("cpu"))
    with GGUFFile.open(path) as file:
        assert read_target_config(file).layer_kinds == ("gdn", "full")
        types = {t.ggml_type for t in file.tensors.values()}
    assert {Q4_K, Q5_K, Q6_K, Q8_0, F32} == types
    logits = load_target(path).prefill(torch.tensor([1, 2, 3]))
    assert logits[0].isfinite().all()


def test_a_folder_has_as_many_layers(tmp_path):
    config = json.loads((write_hf_target(tmp_path, CONFIG) / "config.json").read_text())
    assert config["layer_types"] == ["linear_attention", "full_attention"]


def test_a_drafter_fits_its_target(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_CACHE", str(tmp_path / "cache"))
    config = short(TINY.target, layers=4, vocab=384)
    folder = write_drafter(tmp_path / "d", config, 15)
    target = Target(
        hidden_size=256, vocab_size=384, num_layers=4, max_model_len=2048, dtype=torch.bfloat16
    )
    spec = plan({"method": "dflash", "model": str(folder)}, target)
    assert spec is not None
    assert spec["num_speculative_tokens"] == 15
