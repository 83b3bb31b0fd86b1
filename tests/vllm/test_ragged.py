"""bfloat16 with another draft length every step, with our Gated DeltaNet layer and without."""

import engines
from reference import prompts, violations

CYCLE = [7, 0, 3, 1, 5, 0, 0, 2]


def run(target, speculation, off="adaptive"):
    return engines.run(
        "ragged:ragged",
        engine={"model": target, "dtype": "bfloat16"},
        speculation=speculation,
        prompts=prompts(),
        cycle=CYCLE,
        max_tokens=48,
        env={"TORCH_DFLASH_DISABLE": off},
    ).value


def test_ours_says_what_plain_decoding_says(target, speculation):
    ran = run(target, speculation)
    assert ran["error"] is None
    assert violations(ran["plain"], ran["full"], "bfloat16") == []
    assert violations(ran["plain"], ran["ragged"], "bfloat16") == []


def test_vllm_0_32_alone_does_not(target, speculation):
    """The control: its convolution window is wrong after a step that drafted less."""
    ran = run(target, speculation, off="adaptive,gdn")
    if ran["error"]:  # it stops where the step before accepted more rows than this one has
        assert "_spec_forward" in ran["error"]
        assert "must match the size of tensor" in ran["error"]
    else:
        assert violations(ran["plain"], ran["ragged"], "bfloat16")
