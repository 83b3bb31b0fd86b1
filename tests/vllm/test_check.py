"""``torch-dflash vllm-check`` beside a real vLLM."""

import json
import subprocess
import sys

import engines

COMMAND = [sys.executable, "-m", "torch_dflash", "vllm-check"]


def check(*arguments, **variables):
    return subprocess.run(
        [*COMMAND, *arguments], env=engines.environment(variables), capture_output=True, text=True
    )


def test_says_what_is_on_and_what_is_not():
    done = check("--json", TORCH_DFLASH_DISABLE="adaptive")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout[done.stdout.index("{") :])
    assert facts["vLLM"].startswith("0.32.0")
    assert facts["model runner"] == "V1"
    states = {name: f["state"] for name, f in facts["features"].items()}
    assert states["gdn"] == states["gguf"] == states["drafters"] == "on"
    assert facts["features"]["adaptive"] == {"state": "off", "detail": "TORCH_DFLASH_DISABLE"}


def test_fits_one_screen():
    done = check()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert any(line.split()[:2] == ["drafters", "on"] for line in lines)
