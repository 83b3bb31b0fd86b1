"""``torch-dflash vllm-check`` without vLLM; tests/vllm has it with one."""

import importlib.util
import json
import sys
import types

import pytest
from torch_dflash_vllm.check import loaded

from torch_dflash.cli.main import main
from torch_dflash.cli.vllm_check import screen

FACTS = {
    "vLLM": "0.32.0 (checked: 0.32, 0.33)",
    "loaded by vLLM": "yes",
    "features": {
        "gdn": {"state": "on", "detail": "decode and verify"},
        "norms": {"state": "off", "detail": "on with TORCH_DFLASH_ENABLE=norms"},
        "gguf": {"state": "declined", "detail": "word " * 30},
    },
}


@pytest.fixture
def installed(monkeypatch):
    """A vLLM that is found, and a plugin that reports what it is told to."""

    def make(**changes):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n: True if n == "vllm" else found(n)
        )
        check = types.SimpleNamespace(report=lambda: FACTS | changes)
        monkeypatch.setitem(sys.modules, "torch_dflash_vllm.check", check)

    return make


def test_without_vllm_one_line_with_the_next_step(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "vllm" else found(n))
    assert main(["vllm-check"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "torch-dflash: error: vllm-check: vLLM must be installed here, got nothing; "
        "pip install vllm==0.33.0 beside torch-dflash (0.32 and 0.33 are checked)\n"
    )


def test_one_screen_and_json(installed, capsys):
    installed()
    assert main(["vllm-check"]) == 0
    text = capsys.readouterr().out
    assert text == screen(FACTS) + "\n"
    assert "\n  gdn            on        decode and verify\n" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert main(["vllm-check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FACTS


def test_a_plugin_that_vllm_does_not_load_is_a_failure(installed, capsys):
    installed(**{"loaded by vLLM": "no: VLLM_PLUGINS is 'x'; add torch_dflash to it"})
    assert main(["vllm-check"]) == 1
    assert "add torch_dflash to it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "environment, plugins, said",
    [
        ({}, ["torch_dflash"], "yes"),
        ({"VLLM_PLUGINS": "gguf, torch_dflash"}, ["gguf", "torch_dflash"], "yes"),
        (
            {"VLLM_PLUGINS": "gguf"},
            ["torch_dflash"],
            "no: VLLM_PLUGINS is 'gguf'; add torch_dflash",
        ),
        ({"VLLM_PLUGINS": ""}, ["torch_dflash"], "no: VLLM_PLUGINS is ''"),
        ({}, ["gguf"], "no: the entry point torch_dflash is missing; install torch-dflash"),
    ],
)
def test_whether_vllm_loads_the_plugin(environment, plugins, said):
    assert loaded(environment, plugins).startswith(said)
