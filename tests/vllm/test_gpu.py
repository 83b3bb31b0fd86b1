"""The embedded hybrid from GGUF on a GPU (vLLM 0.33, its V2 runner), full graphs and without."""

import engines
import pytest
import torch
from reference import long_prompt, prompts, violations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [*prompts(), long_prompt(200), long_prompt(150, 100)]
ENGINE = {
    "dtype": "bfloat16",
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "additional_config": {"gdn_prefill_backend": "triton"},
    "kernel_config": {"enable_jit_warmup": False},
}


def run(engine, env):
    return engines.run(
        "gpu_jobs:positions", engine={**ENGINE, **engine}, env=env, prompts=PROMPTS, timeout=600
    ).value


@pytest.fixture(scope="module")
def plain(gguf):
    engine, env = gguf("dflash2")
    out = run({"model": engine["model"]}, env)
    return out["positions"]["started"]["results"]


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_every_position_gives_the_plain_tokens(gguf, plain, kind):
    out = run(*gguf(kind))
    assert out["layers"] == 4
    assert out["features"]["gdn"][0] == "on"
    for name, position in out["positions"].items():
        assert violations(plain, position["results"], "bfloat16") == [], name
        assert (position["replays"] > 0) == (name in ("started", "again")), name
        assert position["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 150, name
