"""Runs functions of this folder in processes of their own: an engine per process, real vLLM.

A process is a clean vLLM: plugins, patches and the allocator of one test never reach another, and
its memory is returned.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that we start
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # threads that wait spin, and CI has two cores
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Run:
    """What a function returned, and what its process wrote."""

    value: Any
    log: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a child: this one's, quiet and offline, with the plugin importable."""
    paths = [str(ROOT), str(ROOT / "integrations/vllm"), str(HERE), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(p for p in paths if p)
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(extra or {})}


def run(
    function: str, *, env: Mapping[str, str] | None = None, timeout: float = 300, **arguments: Any
) -> Run:
    """Call ``module:function(**arguments)`` of this folder in a new process.

    Args:
        function: where it is; what it takes and returns must be JSON.
        env: added to the environment.
        timeout: seconds.
        arguments: of the function; paths become strings.

    Raises:
        AssertionError: the process failed; the text ends with its log's last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        call = json.dumps([function, arguments, str(answer)], default=str)
        code = "import sys, engines; engines.serve(sys.argv[1])"
        with log.open("w") as out:
            try:
                status: int | str = subprocess.run(
                    [sys.executable, "-c", code, call],
                    env=environment(env),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"no answer in {timeout:.0f} s"
        text = log.read_text()
        if status != 0:
            tail = "\n".join(text.splitlines()[-60:])
            raise AssertionError(f"{function} ended with {status}:\n{tail}")
        return Run(json.loads(answer.read_text()), text)


def serve(call: str) -> None:
    """In the child: call and write down the answer."""
    import importlib

    function, arguments, answer = json.loads(call)
    module, name = function.split(":")
    value = getattr(importlib.import_module(module), name)(**arguments)
    Path(answer).write_text(json.dumps(value))
    sys.stdout.flush()
    os._exit(0)  # threads of an engine may never end by themselves
