"""The hybrid without speculation: the plugin says what it does, its layer keeps its contract."""

import engines
import pytest
from reference import check_native, prompts


@pytest.fixture(scope="module")
def ran(target):
    jobs = {"greedy": {"prompts": prompts()}}
    return engines.run("layer:generate_and_check", engine={"model": target}, jobs=jobs)


def test_says_once_what_it_did(ran):
    lines = [x for x in ran.log.splitlines() if "torch-dflash on vLLM 0.32" in x]
    assert len(lines) == 1, ran.log[-3000:]
    states = {name: state for name, (state, _) in ran.value["features"].items()}
    names = ("gdn", "align_copies", "norms", "cpu_sampling")
    assert {n: states[n] for n in names} == dict.fromkeys(names, "on")


def test_plain_decoding_is_the_native_runners(ran):
    check_native(ran.value["jobs"]["greedy"], prompts())
    check_native(ran.value["again"]["greedy"], prompts())


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_the_layer_in_steps_that_a_gpu_meets(ran, state):
    """Up to 17 ragged rows, padded graphs, chunked prefill; the norm fused or not."""
    found = dict(ran.value["layer"][f"torch.{state}"])
    # float32 sums of 128 squares and four products beside float64: a few times 2^-24
    assert found.pop("error of the norm") < 16 * 2.0**-24
    assert found == dict.fromkeys(found, True)
    assert len(found) == 5
