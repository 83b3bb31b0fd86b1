"""Real vLLM engines; `make test-vllm` builds the environment that has vLLM and runs this folder."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers, in child processes too

# draft lengths that do not depend on how fast this machine is
FULL_LENGTH = {"TORCH_DFLASH_DISABLE": "adaptive"}
HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["*.py"]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders made from GGUF files stay out of the user's cache."""
    os.environ.setdefault("TORCH_DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded hybrid as a Hugging Face folder, float32."""
    from hf_target import write_hf_target

    return write_hf_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its DFlash drafter as a Hugging Face folder, float32."""
    import torch

    from torch_dflash.convert import prepare_drafter
    from torch_dflash.load import ASSETS

    folder = tmp_path_factory.mktemp("drafter") / "dflash"
    target = ASSETS / "target.gguf"
    prepare_drafter(ASSETS / "dflash.gguf", folder, target=target, dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def speculation(dflash: Path) -> dict[str, object]:
    """``speculative_config`` of the drafter at full length."""
    return {"method": "dflash", "model": str(dflash), "num_speculative_tokens": 7}


@pytest.fixture(scope="session")
def gguf(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[dict[str, object], dict[str, str]]]:
    """Engine arguments and environment of the GGUF target with a GGUF drafter, by its kind."""
    from torch_dflash.load import ASSETS

    cache = str(tmp_path_factory.mktemp("drafters"))
    env = {"TORCH_DFLASH_CACHE": cache, **FULL_LENGTH}

    def arguments(kind: str) -> tuple[dict[str, object], dict[str, str]]:
        drafter = {"method": "dflash", "model": str(ASSETS / f"{kind}.gguf")}
        return {"model": str(ASSETS / "target.gguf"), "speculative_config": drafter}, env

    return arguments
