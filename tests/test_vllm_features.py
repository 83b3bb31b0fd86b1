"""The plugin's registry of features, without vLLM: what is switched on where, and what is said."""

import logging
import os
import subprocess
import sys

import pytest
from torch_dflash_vllm import features
from torch_dflash_vllm.features import Declined, Feature

STABLE = Feature("steady", "unused", stable=True)
FRAGILE = Feature("brittle", "unused", stable=False)
ASKED = Feature("quiet", "unused", stable=True, default=False)


@pytest.fixture
def register(monkeypatch, caplog):
    """Registers fakes on a vLLM of the given version: (outcomes, log)."""
    monkeypatch.setattr(features, "_state", {})
    monkeypatch.setattr(features, "_outcomes", {})
    monkeypatch.delenv("TORCH_DFLASH_REPORTED", raising=False)
    monkeypatch.setattr(features, "FEATURES", (STABLE, FRAGILE, ASKED))
    monkeypatch.setattr(features, "_apply", lambda f: f"replaced by {f.name}")

    def run(version="0.32.0+cpu"):
        monkeypatch.setattr(features, "_vllm_version", lambda: version)
        with caplog.at_level(logging.DEBUG, "vllm.torch_dflash"):
            features.register()
        return {n: o.state for n, o in features.outcomes().items()}, caplog

    yield run
    os.environ.pop("TORCH_DFLASH_REPORTED", None)


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0"])
def test_a_checked_version_gets_everything(register, version):
    states, log = register(version)
    assert states == {"steady": "on", "brittle": "on", "quiet": "off"}
    [line] = log.messages
    assert line.startswith(f"torch-dflash on vLLM {version}; on: steady (replaced by steady), ")
    assert line.endswith("off: quiet (on with TORCH_DFLASH_ENABLE=quiet)")


def test_an_unknown_version_gets_the_stable_ones_and_says_so(register):
    states, log = register("0.34.1")
    assert states == {"steady": "on", "brittle": "declined", "quiet": "off"}
    assert "this version is unknown, only stable features are on" in log.text
    assert "brittle (checked with vLLM 0.32 and 0.33, this is 0.34.1)" in log.text


def test_each_can_be_switched(register, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_DISABLE", "steady, brittle")
    monkeypatch.setenv("TORCH_DFLASH_ENABLE", "quiet")
    assert register()[0] == {"steady": "off", "brittle": "off", "quiet": "on"}


def test_all_can_be_switched_off(register, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_DISABLE", "all")
    assert register()[0] == {"steady": "off", "brittle": "off", "quiet": "off"}


def test_an_unknown_name_is_said(register, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_DISABLE", "stedy")
    assert "must name features of torch-dflash (steady, brittle, quiet, all), got stedy" in (
        register()[1].text
    )


def test_a_failure_switches_one_off_and_never_leaves(register, monkeypatch):
    def apply(feature):
        if feature is STABLE:
            raise Declined("Layer must take 3 arguments, got 4")
        raise KeyError("gone")

    monkeypatch.setattr(features, "_apply", apply)
    states, log = register()
    assert states == {"steady": "declined", "brittle": "declined", "quiet": "off"}
    assert features.outcomes()["steady"].detail == "Layer must take 3 arguments, got 4"
    assert "Traceback" in log.text
    assert "KeyError: 'gone'" in features.outcomes()["brittle"].detail


def test_twice_is_once(register):
    register()
    _, log = register()
    assert len(log.messages) == 1


def test_a_child_process_does_not_repeat_the_line(register, monkeypatch):
    monkeypatch.setenv("TORCH_DFLASH_REPORTED", "0.32.0")
    _, log = register()
    assert [r.levelname for r in log.records] == ["DEBUG"]


def test_what_an_engine_declines_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(features, "_declined", {})
    for _ in range(3):
        features.decline("gdn", "layer 3: interleaved heads")
    assert caplog.messages == ["torch-dflash: gdn leaves to vLLM: layer 3: interleaved heads"]


def test_importing_the_plugin_imports_neither_torch_nor_vllm():
    code = "import sys, torch_dflash_vllm; print(sorted({'torch', 'vllm'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_every_feature_module_exists():
    for feature in features.FEATURES:
        assert features.importlib.util.find_spec(f"torch_dflash_vllm.{feature.module}")
