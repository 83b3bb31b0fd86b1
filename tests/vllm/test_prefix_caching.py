"""Prefix caching of a hybrid in GGUF with DFlash2: states are kept where a block of tokens ends.

The same engine samples: many short requests, whose tokens must have the target's probabilities.
"""

import random

import engines
import pytest
from reference import check_native, long_prompt, prompts, quantile

# Blocks are 256 tokens. The first ends just behind one: a wrong window there shows at once.
PROMPTS = [long_prompt(514), long_prompt(300, 100)]
CROSSING = [long_prompt(490, 30), long_prompt(236, 7), long_prompt(505, 200)]
SAMPLES = 320
CYCLE = [7, 0, 3, 1, 5, 0, 0, 2]


@pytest.fixture(scope="module")
def ran(gguf):
    engine, env = gguf("dflash2")
    job = {"prompts": PROMPTS, "max_tokens": 48}
    return engines.run(
        "generate:named",
        engine={**engine, "max_model_len": 1024, "enable_prefix_caching": True},
        env=env,
        jobs={
            "first": job,
            "again": job,
            "ragged": {**job, "cycle": CYCLE},
            "crossing": {"prompts": CROSSING, "max_tokens": 64},
            "sampled": {
                "prompts": prompts()[:1],
                "temperature": 1.0,
                "n": SAMPLES,
                "max_tokens": 3,
                "seed": 5,
                "ignore_eos": True,
            },
        },
        timeout=400,
    ).value


def test_the_first_time(ran):
    check_native(ran["jobs"]["first"], PROMPTS)


@pytest.mark.parametrize("job", ["again", "ragged"])
def test_from_the_cache(ran, job):
    results = ran["jobs"][job]
    assert [r["cached"] > 0 for r in results] == [True, False]
    check_native(results, PROMPTS)


def test_decoding_past_the_end_of_a_block(ran):
    check_native(ran["jobs"]["crossing"], CROSSING)


@pytest.mark.parametrize("position", [1, 2])
def test_sampled_tokens_have_the_targets_probabilities(ran, position):
    """Tokens of verifications. Kolmogorov and Smirnov: p below 0.001 beyond 1.95 / sqrt(n)."""
    draw = random.Random(position).random
    [prompt] = prompts()[:1]
    tokens = [r["tokens"] for r in ran["jobs"]["sampled"]]
    assert ran["metrics"]["sampled"]["vllm:spec_decode_num_accepted_tokens"] > 20
    values = sorted(quantile(prompt + t[:position], t[position], draw()) for t in tokens)
    assert len(values) == SAMPLES
    n = len(values)
    distance = max(max(v - i / n, (i + 1) / n - v) for i, v in enumerate(values))
    assert distance < 1.95 / n**0.5
