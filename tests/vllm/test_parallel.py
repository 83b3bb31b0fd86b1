"""Two ranks: the GGUF target split by K heads, workers in processes of their own; DFlash."""

import engines
from reference import check_native, prompts


def test_two_ranks_say_what_one_says(gguf):
    engine, env = gguf("dflash")
    ran = engines.run(
        "generate:generate",
        engine={**engine, "tensor_parallel_size": 2},
        jobs=[{"prompts": prompts(), "max_tokens": 48}],
        env={**env, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        timeout=400,
    ).value
    check_native(ran["jobs"][0], prompts())
    assert ran["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 50
