"""Whole loops against z-lab's on a dense target: the same tokens, the same accepted lengths."""

import json

import pytest
from safetensors.torch import load_file

from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.stop import StopChecker
from torch_dflash.drafters import drafter_for
from torch_dflash.drafters.checkpoint import load_checkpoint
from torch_dflash.models import load_target
from torch_dflash.policies import FixedPolicy
from torch_dflash.testing.tiny import dense_gguf_from_hf


@pytest.fixture(scope="module")
def target(fixtures, tmp_path_factory):
    folder = fixtures / "loop/target"
    path = tmp_path_factory.mktemp("loop") / "target.gguf"
    dense_gguf_from_hf(
        path,
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    return load_target(path)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_loop(kind, target, fixtures):
    folder = fixtures / "loop" / kind
    checkpoint = load_checkpoint(folder)
    drafter = drafter_for(checkpoint.config, checkpoint.tensors, target.vocabulary)
    runs = json.loads((folder / "runs.json").read_text())
    for run in runs:
        drafter.block_rows = run["block_size"]
        session = Session(target, drafter, FixedPolicy(run["block_size"] - 1))
        out = session.generate(
            run["prompt"], run["max_new_tokens"], stop=StopChecker(run.get("stop", []))
        )
        assert out.tokens == run["output"]
        assert out.stats.emitted_lengths == run["acceptance_lengths"]
        plain = Session(target).generate(
            run["prompt"], run["max_new_tokens"], stop=StopChecker(run.get("stop", []))
        )
        assert plain.tokens == run["output"]
    assert len(runs) >= 10
