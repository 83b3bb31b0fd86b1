"""Real vLLM engines; `make test-vllm` builds the environment that has vLLM and runs this folder."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers, also for pickling by name

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["*.py"]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded hybrid as a Hugging Face folder, float32."""
    from hf_target import write_hf_target

    return write_hf_target(tmp_path_factory.mktemp("target"))
