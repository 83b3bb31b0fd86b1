"""DFLASH_REFERENCE and --reference: operators through their float64 references."""

import os
import subprocess
import sys

import pytest
import torch

from torch_dflash import ops
from torch_dflash.decoding.loop import Session
from torch_dflash.load import load_drafter, load_target
from torch_dflash.switch import reference_of, replaced, switchable
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switch")
    hybrid = tiny_hybrid(folder / "target.gguf", layers=3, interval=3, vocab=300)
    names = ("dflash", "dflash2", "dspark")
    args = {"vocab": 300, "num_target_layers": 3, "target_layer_ids": (0, 1)}
    return hybrid, [tiny_drafter(folder / n, n, **args) for n in names]


@pytest.mark.parametrize("name", switchable())
def test_each_operator_can_be_switched(files, name):
    """The greedy text stays: the errors of float32 are far below the margins of this model."""
    prompt = [3, 1, 4, 1, 5]
    plain = Session(load_target(files[0])).generate(prompt, 6).tokens
    with replaced({name: reference_of(name)}):
        for folder in files[1]:
            target = load_target(files[0])
            assert Session(target, load_drafter(folder, target)).generate(prompt, 6).tokens == plain


def test_a_reference_is_really_what_runs():
    calls = []
    with replaced({"quant_act": lambda *a: calls.append(a) or reference_of("quant_act")(*a)}):
        ops.quant_act(torch.ones(1, 256), 1)
    assert len(calls) == 1
    ops.quant_act(torch.ones(1, 256), 1)
    assert len(calls) == 1


def test_mutated_and_packed_arguments():
    x, residual, weight = torch.randn(3, 300), torch.randn(3, 300), torch.randn(300)
    by_kernel, by_reference = residual.clone(), residual.clone()
    kernel = ops.add_rms_norm(x, by_kernel, weight, 1e-6, False, 1)
    reference = reference_of("add_rms_norm")(x, by_reference, weight, 1e-6, False, act_mode=1)
    assert torch.equal(by_kernel, by_reference)
    assert not torch.equal(by_kernel, residual)
    assert (reference.dtype, reference.shape) == (kernel.dtype, kernel.shape)


def test_unknown_operators_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no reference of operator 'qmn'; known: accept, .*, qmm"):
        reference_of("qmn")


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_environment_variable():
    code = "import torch_dflash; print(torch_dflash.ops.qmm.__code__.co_name)"
    done = run(code, DFLASH_REFERENCE="qmm,gdn_step")
    assert done.stdout == "through\n"
    assert done.stderr == "operators through their float64 reference: qmm, gdn_step\n"
    assert run(code, DFLASH_REFERENCE="").stdout == "qmm\n"
    wrong = run(code, DFLASH_REFERENCE="qmm, nonsense")
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith(
        "ValueError: DFLASH_REFERENCE must name operators, got 'qmm, nonsense': no reference of "
        "operator 'nonsense'; known: accept, "
    )
    assert wrong.stderr.count("Traceback") == 1
