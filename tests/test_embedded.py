"""The embedded model: every drafter gives the plain text, and two of them are worth having."""

import pytest

from benchmarks.held_out import measure
from torch_dflash.load import DRAFTERS

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def results():
    return measure(NEW_TOKENS)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_held_out_text_is_identical(results, kind):
    assert results[kind].identical
    assert results[kind].emitted == 32 * (NEW_TOKENS - 1)  # the first token is the prompt's


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_held_out_acceptance(results, kind):
    assert results[kind].length >= 2.5
