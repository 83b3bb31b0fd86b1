"""Stops: tokens, strings across token borders, text that might still become a stop."""

import pytest

from torch_dflash.decoding.stop import StopChecker

WORDS = ["He", "llo", " wor", "ld", "!!", " END", "x"]


def run(checker, tokens):
    out = []
    for token in tokens:
        out.append(checker.push(token))
        if checker.reason:
            break
    return out


def test_stop_token_ends_and_releases_held_text():
    checker = StopChecker([5], ["world?"], WORDS.__getitem__)
    assert run(checker, [0, 1, 2, 5]) == ["He", "llo", " ", "wor"]
    assert checker.reason == "stop_token"


def test_stop_string_across_tokens_is_cut_out_and_never_shown():
    checker = StopChecker([], ["lo world"], WORDS.__getitem__)
    assert run(checker, [0, 1, 2, 3, 4]) == ["He", "l", "", ""]
    assert checker.reason == "stop_string"
    assert checker.flush() == ""


def test_a_false_start_is_released():
    checker = StopChecker([], ["lo!"], WORDS.__getitem__)
    assert run(checker, [0, 1, 2]) == ["He", "l", "lo wor"]
    assert checker.reason is None


def test_the_earliest_of_several_strings_wins():
    checker = StopChecker([], ["wor", "lo"], WORDS.__getitem__)
    assert "".join(run(checker, [0, 1, 2])) == "Hel"


def test_flush_gives_the_rest():
    checker = StopChecker([], ["!!!"], WORDS.__getitem__)
    assert run(checker, [3, 4]) == ["ld", ""]
    assert checker.flush() == "!!"


@pytest.mark.parametrize("strings, decode", [([""], WORDS.__getitem__), (["x"], None)])
def test_unusable_stop_strings_are_errors(strings, decode):
    with pytest.raises(ValueError, match="stop string"):
        StopChecker([], strings, decode)
