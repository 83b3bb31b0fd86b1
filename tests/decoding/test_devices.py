"""Models on another device: the same tokens, and no sequence that half moves along."""

import pytest
import torch

from torch_dflash.decoding.loop import Session
from torch_dflash.load import load_drafter, load_target
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

PROMPT = [5, 17, 300, 2, 44, 9, 81]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_hybrid(tmp_path_factory.mktemp("devices") / "target.gguf", seed=1, layers=3)


def drafter_of(folder, kind, target):
    shape = {"seed": 3, "num_target_layers": 3, "target_layer_ids": (0, 1)}
    return load_drafter(tiny_drafter(folder / kind, kind, **shape), target)


@pytest.mark.parametrize("state", ["journal", "snapshots"])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_moved_model_says_the_same(path, tmp_path, device, kind, state):
    want = Session(load_target(path, state=state)).generate(PROMPT, 24).tokens
    target = load_target(path, state=state).to(device)
    drafter = drafter_of(tmp_path, kind, target).to(device)
    assert Session(target).generate(PROMPT, 24).tokens == want
    assert Session(target, drafter).generate(PROMPT, 24).tokens == want


def test_moving_to_the_same_device_keeps_the_sequence(path, tmp_path):
    target = load_target(path)
    drafter = drafter_of(tmp_path, "dflash", target)
    target.prefill(torch.tensor(PROMPT))
    drafter.commit(torch.zeros(3, drafter.config.target_hidden_columns))
    assert target.to("cpu").length == len(PROMPT)
    assert drafter.to("cpu").length == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="one device only")
def test_moving_to_another_device_forgets_the_sequence(path, tmp_path):
    target = load_target(path)
    drafter = drafter_of(tmp_path, "dflash", target)
    target.prefill(torch.tensor(PROMPT))
    drafter.commit(torch.zeros(3, drafter.config.target_hidden_columns))
    assert target.to("cuda").length == 0
    assert target.state.kv.page_table.is_cuda
    assert drafter.to("cuda").length == 0
    assert drafter.cache.page_table.is_cuda
