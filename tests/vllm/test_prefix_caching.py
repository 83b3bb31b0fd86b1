"""Prefix caching of a speculating hybrid: states are kept where a block of tokens ends."""

import engines
import pytest
from reference import check_native, long_prompt

PROMPTS = [long_prompt(600), long_prompt(300, 100)]  # blocks are 256 tokens
CYCLE = [7, 0, 3, 1, 5, 0, 0, 2]


@pytest.fixture(scope="module")
def ran(target, speculation):
    job = {"prompts": PROMPTS, "max_tokens": 48}
    return engines.run(
        "generate:named",
        engine={
            "model": target,
            "max_model_len": 1024,
            "enable_prefix_caching": True,
            "speculative_config": speculation,
        },
        jobs={"first": job, "again": job, "ragged": {**job, "cycle": CYCLE}},
    ).value


def test_the_first_time(ran):
    check_native(ran["jobs"]["first"], PROMPTS)


@pytest.mark.parametrize("job", ["again", "ragged"])
def test_from_the_cache(ran, job):
    results = ran["jobs"][job]
    assert [r["cached"] > 0 for r in results] == [True, False]
    check_native(results, PROMPTS)
