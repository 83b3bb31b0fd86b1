import os
from pathlib import Path

import pytest

FIXTURES = Path(
    os.environ.get("DFLASH_FIXTURES", Path(__file__).parents[2].parent / "shared/fixtures")
)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    if not (FIXTURES / "gguf").is_dir():
        pytest.skip(f"reference cases are not at {FIXTURES}; set DFLASH_FIXTURES")
    return FIXTURES
