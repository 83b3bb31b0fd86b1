"""Which models become ours, and with which arguments."""

import sys
from types import SimpleNamespace

import pytest
from torch_dflash_vllm.gguf import engine_args
from torch_dflash_vllm.gguf.engine_args import install, resolve

from torch_dflash.load import ASSETS

EMBEDDED = str(ASSETS / "target.gguf")
DEFAULTS = {
    "model": EMBEDDED,
    "tokenizer": None,
    "quantization": None,
    "load_format": "auto",
    "config_format": "auto",
    "hf_config_path": None,
    "enable_lora": False,
    "cpu_offload_gb": 0,
    "quantization_config": None,
    "skip_tokenizer_init": False,
    "served_model_name": None,
    "tensor_parallel_size": 1,
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A cache of its own, and no other GGUF plugin."""
    monkeypatch.setenv("TORCH_DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_DFLASH_GGUF", raising=False)
    installed(monkeypatch, False)


def installed(monkeypatch, there):
    """vLLM's list of quantization methods, with or without the other plugin's."""
    methods = SimpleNamespace(QUANTIZATION_METHODS=["fp8", "gguf"] if there else ["fp8"])
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization", methods)


def args(**changes):
    return SimpleNamespace(**{**DEFAULTS, **changes})


def ours(a):
    return a.load_format == "dflash_gguf" and a.model != EMBEDDED


def test_a_gguf_path_is_enough():
    a = args()
    resolve(a)
    assert ours(a)
    assert a.quantization == "dflash_gguf"
    assert a.served_model_name == [EMBEDDED]
    once = vars(a).copy()
    resolve(a)  # vLLM's other entry calls it again
    assert vars(a) == once


def test_the_folder_itself_is_a_model_too():
    a = args()
    resolve(a)
    b = args(model=a.model)
    resolve(b)
    assert (b.model, b.load_format, b.served_model_name) == (a.model, "dflash_gguf", None)


def test_other_models_are_left_alone():
    for model in ("org/model", "/models/folder", "model.gguf.safetensors"):
        a = args(model=model)
        resolve(a)
        assert vars(a) == vars(args(model=model))


@pytest.mark.parametrize(
    "asked", [{}, {"quantization": "gguf"}, {"load_format": "gguf"}, {"config_format": "gguf"}]
)
def test_the_other_plugin_keeps_its_files(monkeypatch, asked, caplog):
    installed(monkeypatch, True)
    engine_args._say_left.cache_clear()
    a = args(**asked)
    with caplog.at_level("INFO"):
        resolve(a)
    assert vars(a) == vars(args(**asked))
    assert ("left to vllm-gguf-plugin; --quantization dflash_gguf" in caplog.text) == (not asked)


@pytest.mark.parametrize("flag", ["quantization", "load_format", "config_format"])
def test_one_flag_makes_a_file_ours(monkeypatch, flag):
    installed(monkeypatch, True)
    a = args(**{flag: "dflash_gguf"})
    resolve(a)
    assert ours(a)
    assert a.config_format == "auto"


def test_or_one_variable(monkeypatch):
    installed(monkeypatch, True)
    monkeypatch.setenv("TORCH_DFLASH_GGUF", "1")
    a = args()
    resolve(a)
    assert ours(a)
    installed(monkeypatch, False)
    monkeypatch.setenv("TORCH_DFLASH_GGUF", "0")
    a = args()
    resolve(a)
    assert vars(a) == DEFAULTS
    monkeypatch.setenv("TORCH_DFLASH_GGUF", "yes")
    with pytest.raises(ValueError, match="TORCH_DFLASH_GGUF must be 0 or 1, got 'yes'"):
        resolve(args())


def test_a_given_tokenizer_and_name_stay():
    a = args(tokenizer="org/words", served_model_name="m")
    resolve(a)
    assert ours(a)
    assert (a.tokenizer, a.served_model_name) == ("org/words", "m")


def test_both_entries_of_vllm_resolve_first():
    seen = []

    class EngineArgs(SimpleNamespace):
        def create_model_config(self):
            seen.append(self.model)

        def create_engine_config(self):
            seen.append(self.model)
            self.create_model_config()

    install(EngineArgs)
    wrapped = EngineArgs.create_engine_config
    install(EngineArgs)
    assert EngineArgs.create_engine_config is wrapped
    EngineArgs(**DEFAULTS).create_engine_config()
    EngineArgs(**DEFAULTS).create_model_config()
    assert len(seen) == 3
    assert EMBEDDED not in seen
    assert engine_args.ASK == "TORCH_DFLASH_GGUF"
