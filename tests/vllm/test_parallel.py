"""Two ranks: the layer split by K heads, an engine core and two workers in their own processes."""

import engines
from reference import check_native, prompts


def test_two_ranks_say_what_one_says(target, speculation):
    ran = engines.run(
        "generate:generate",
        engine={
            "model": target,
            "tensor_parallel_size": 2,
            "speculative_config": speculation,
        },
        jobs=[{"prompts": prompts(), "max_tokens": 48}],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        timeout=400,
    ).value
    check_native(ran["jobs"][0], prompts())
    assert ran["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 50
