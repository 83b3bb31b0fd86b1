"""The plugin in a real engine: loaded once, said in one line, switched off by one variable."""

import engines

PROMPT = [[271, 300, 17, 5]]


def start(target, **env):
    job = {"prompts": PROMPT, "max_tokens": 4}
    return engines.run(
        "generate:generate", engine={"model": target, "dtype": "bfloat16"}, jobs=[job], env=env
    )


def test_registers_in_an_engine_and_says_so(target):
    ran = start(target)
    [[result]] = ran.value["jobs"]
    assert len(result["tokens"]) == 4
    lines = [x for x in ran.log.splitlines() if "torch-dflash on vLLM 0.32" in x]
    assert len(lines) == 1, ran.log[-3000:]
    assert {name: state for name, (state, _) in ran.value["features"].items()} >= {
        "gdn": "on",
        "align_copies": "on",
    }
