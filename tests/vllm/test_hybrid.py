"""The hybrid in vLLM in float32, every request speculative: what the native runner says, exactly.

One engine runs all jobs. It has room for two requests, so that prompts start while others are
verified.
"""

import engines
import pytest
from reference import check_native, long_prompt, native, prompts, tokenizer

CYCLE = [7, 0, 3, 1, 5, 0, 0, 2]
WORD = "zq#xj~vk?W"  # nothing that the model would say
BLOCKS = 38  # two requests fit, and then one of them grows


@pytest.fixture(scope="module")
def ran(target, speculation):
    p, near_end = prompts(), long_prompt(440)
    crowd = [long_prompt(236, 40 * i) for i in range(4)]
    jobs = {
        "greedy": {"prompts": p, "max_tokens": 96},
        "cycle": {"prompts": p, "max_tokens": 64, "cycle": CYCLE},
        "near_end": {"prompts": [near_end, p[0]], "max_tokens": 200},
        "crowd": {"prompts": crowd, "max_tokens": 60},
        "stop": {"prompts": p, "max_tokens": 96, "stop": ["self", "return "]},
        "one_choice": {"prompts": p, "temperature": 1.3, "top_k": 1},
        "three": {"prompts": p[:2], "temperature": 1.3, "top_k": 1, "n": 3},
        "warm": {"prompts": p[:1], "temperature": 1.0, "n": 4, "seed": 3},
        "again": {"prompts": p[:1], "temperature": 1.0, "n": 4, "seed": 3},
        "grammar": {"prompts": p[:3], "choice": [WORD], "max_tokens": 64},
        "after": {"prompts": p[:3], "max_tokens": 32},
    }
    return engines.run(
        "generate:named",
        engine={
            "model": target,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": BLOCKS,
            "speculative_config": speculation,
        },
        jobs=jobs,
        env={"TORCH_DFLASH_DISABLE": "adaptive"},  # lengths that do not depend on the machine
        timeout=400,
    ).value


def counter(ran, job, name):
    return ran["metrics"][job].get(f"vllm:{name}", 0)


def test_our_layer_ran(ran):
    assert ran["features"]["gdn"][0] == "on"


def test_greedy(ran):
    check_native(ran["jobs"]["greedy"], prompts())
    assert counter(ran, "greedy", "spec_decode_num_accepted_tokens") > 100


def test_ragged_rows_and_another_length_every_step(ran):
    check_native(ran["jobs"]["cycle"], prompts())
    assert counter(ran, "cycle", "spec_decode_num_accepted_tokens") > 50


def test_drafts_cut_off_by_the_context_length(ran):
    near_end, other = ran["jobs"]["near_end"]
    assert len(near_end["tokens"]) == 512 - 440
    check_native([near_end, other], [long_prompt(440), prompts()[0]])


def test_preemption(ran):
    assert counter(ran, "crowd", "num_preemptions") > 0
    check_native(ran["jobs"]["crowd"], [long_prompt(236, 40 * i) for i in range(4)])


def test_stop_strings(ran):
    for result, prompt in zip(ran["jobs"]["stop"], prompts(), strict=True):
        text = tokenizer().decode(native(prompt, 96))
        ends = {text.find(s): s for s in ("self", "return ") if s in text}
        assert result["text"] == (text[: min(ends)] if ends else text)
        assert result["stop"] == (ends[min(ends)] if ends else None)
    assert any(r["stop"] for r in ran["jobs"]["stop"])


def test_sampling_among_one_is_greedy(ran):
    check_native(ran["jobs"]["one_choice"], prompts())
    check_native(ran["jobs"]["three"], [p for p in prompts()[:2] for _ in range(3)])


def test_temperature_and_n(ran):
    warm = [r["tokens"] for r in ran["jobs"]["warm"]]
    assert warm == [r["tokens"] for r in ran["jobs"]["again"]]
    assert len({tuple(t) for t in warm}) == 4


def test_a_grammar_that_rejects_every_draft(ran):
    for result in ran["jobs"]["grammar"]:
        assert result["text"] == WORD
    assert counter(ran, "grammar", "spec_decode_num_accepted_tokens") == 0
    check_native(ran["jobs"]["after"], prompts()[:3])
