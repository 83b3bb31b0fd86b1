"""The hybrid without speculation: the plugin says once what it does, and float32 runs at all."""

import engines
import pytest
from reference import check_native, prompts


@pytest.fixture(scope="module")
def ran(target):
    jobs = {"greedy": {"prompts": prompts()}}
    return engines.run("generate:named", engine={"model": target}, jobs=jobs)


def test_says_once_what_it_did(ran):
    lines = [x for x in ran.log.splitlines() if "torch-dflash on vLLM 0.32" in x]
    assert len(lines) == 1, ran.log[-3000:]
    states = {name: state for name, (state, _) in ran.value["features"].items()}
    names = ("gdn", "align_copies", "norms", "cpu_sampling")
    assert {n: states[n] for n in names} == dict.fromkeys(names, "on")


def test_plain_decoding_is_the_native_runners(ran):
    check_native(ran.value["jobs"]["greedy"], prompts())
