"""A GGUF file as the folder that vLLM starts from."""

import json
import os

import pytest
from torch_dflash_vllm.gguf.folder import file_of, materialise, open_target
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from torch_dflash.fields import CheckpointError
from torch_dflash.gguf import GGUFError, Typed, tokenizer_from_gguf
from torch_dflash.load import ASSETS
from torch_dflash.testing.tiny_dense import tiny_dense

EMBEDDED = ASSETS / "target.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(path, **options):
    file, config = open_target(path)
    with file:
        return materialise(file, config, **options)


def test_the_hybrids_config_reads_as_transformers_own():
    folder = made(EMBEDDED)
    config = AutoConfig.from_pretrained(folder)
    assert type(config).__name__ == "Qwen3_5TextConfig"
    assert config.architectures == ["Qwen3_5ForCausalLM"]
    assert config.layer_types == (["linear_attention"] * 2 + ["full_attention"]) * 2
    sizes = [config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size]
    assert sizes == [512, 1024, 256, 4096]
    linear = [config.linear_num_key_heads, config.linear_num_value_heads]
    assert linear == [2, 4]
    assert config.rope_parameters["rope_theta"] == 1e5
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert config.quantization_config == {"quant_method": "dflash_gguf", "file": str(EMBEDDED)}
    assert file_of(folder) == str(EMBEDDED)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == [4092, 4094]


def test_tokens_and_text_are_the_files_own():
    folder = made(EMBEDDED)
    file, _ = open_target(EMBEDDED)
    with file:
        own = tokenizer_from_gguf(file)
    copy = AutoTokenizer.from_pretrained(folder)
    for text in ("def f(x):\n    return x + 1  # héllo 你好", "<|im_end|> a\tb", "e\u0301", ""):
        assert copy.encode(text) == own.encode(text)
        assert copy.decode(copy.encode(text)) == own.decode(own.encode(text), skip_control=False)
    chat = [{"role": "user", "content": "hi"}]
    assert copy.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        own.apply_chat_template(chat)
    )
    assert copy.eos_token_id == own.eos_id


def test_begin_and_end_tokens_are_added_as_the_file_says(tmp_path):
    keys = {
        "tokenizer.ggml.pre": Typed("string", "llama-bpe"),
        "tokenizer.ggml.bos_token_id": Typed("uint32", 497),
        "tokenizer.ggml.add_bos_token": Typed("bool", True),
        "tokenizer.ggml.add_eos_token": Typed("bool", True),
    }
    path = tiny_dense(tmp_path / "t.gguf", "llama", metadata=keys)
    copy = AutoTokenizer.from_pretrained(made(path))
    file, _ = open_target(path)
    with file:
        own = tokenizer_from_gguf(file)
    assert copy.encode("ab") == own.encode("ab") == [497, 64, 65, 496]
    assert copy.encode("ab", add_special_tokens=False) == [64, 65]
    assert copy.encode("a", "b") == [497, 64, 496, 497, 65, 496]


def test_dense_configs_say_where_the_biases_are(tmp_path):
    llama = tiny_dense(tmp_path / "l.gguf", "llama", bias=True)
    config = json.loads((made(llama) / "config.json").read_text())
    assert (config["qkv_bias"], config["attention_bias"]) == (True, True)
    plain = tiny_dense(tmp_path / "p.gguf", "llama")
    config = json.loads((made(plain) / "config.json").read_text())
    assert (config["qkv_bias"], config["attention_bias"]) == (False, False)
    qwen = tiny_dense(tmp_path / "q.gguf", "qwen3", bias=True, tied=True)
    config = json.loads((made(qwen) / "config.json").read_text())
    assert (config["attention_bias"], config["tie_word_embeddings"]) == (True, True)


def test_a_folder_is_made_once_and_anew_when_the_file_changes(tmp_path, cache):
    path = tiny_dense(tmp_path / "x.gguf", "llama")
    first = made(path)
    (first / "mark").touch()
    assert made(path) == first
    assert (first / "mark").exists()
    tiny_dense(path, "llama", layers=3)
    os.utime(path, ns=(1, 1))
    second = made(path)
    assert second != first
    assert json.loads((second / "config.json").read_text())["num_hidden_layers"] == 3
    assert sorted(p.name for p in (cache / "gguf").iterdir()) == sorted([first.name, second.name])


def test_recommended_sampling_is_handed_on(tmp_path):
    keys = {
        "general.sampling.temp": Typed("float32", 0.5),
        "general.sampling.top_k": Typed("int32", 20),
    }
    folder = made(tiny_dense(tmp_path / "s.gguf", "llama", metadata=keys))
    values = json.loads((folder / "generation_config.json").read_text())
    assert values == {"eos_token_id": [496, 498], "temperature": 0.5, "top_k": 20}


def test_an_unknown_tokenizer_is_only_needed_where_no_other_is_given(tmp_path):
    keys = {"tokenizer.ggml.model": Typed("string", "llama")}
    path = tiny_dense(tmp_path / "s.gguf", "llama", metadata=keys)
    with pytest.raises(GGUFError, match=r"must be 'gpt2'.*or give a tokenizer folder with --token"):
        made(path)
    folder = made(path, tokenizer=False)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json"]
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [496]}


def test_a_bias_that_vllm_has_no_place_for(tmp_path):
    path = tmp_path / "b.gguf"
    tiny_dense(path, "llama", bias=True)
    path.write_bytes(path.read_bytes().replace(b"llama", b"qwen3"))
    with pytest.raises(CheckpointError, match=r"attn_output.bias|attn_q_norm"):
        made(path)


def test_other_folders_are_not_ours(tmp_path):
    assert file_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert file_of(tmp_path) is None
    assert file_of("org/model") is None
