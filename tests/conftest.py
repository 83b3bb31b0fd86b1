"""What every test may ask for: the folder of reference cases, and the devices that are there."""

import os
from pathlib import Path

import pytest
import torch

FIXTURES = Path(
    os.environ.get("DFLASH_FIXTURES", Path(__file__).parents[1].parent / "shared/fixtures")
)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Numbers computed by other implementations (see its README)."""
    if not (FIXTURES / "gguf").is_dir():
        pytest.skip(f"reference cases are not at {FIXTURES}; set DFLASH_FIXTURES")
    return FIXTURES


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
