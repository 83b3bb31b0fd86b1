"""What every subcommand says about itself, and about a flag that it does not have."""

import argparse
import re

import pytest

from torch_dflash.cli.main import main, parser


def subcommands():
    [commands] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices


@pytest.mark.parametrize("name", subcommands())
def test_every_flag_has_its_help(name):
    command = subcommands()[name]
    assert command.description
    assert [a.dest for a in command._actions if not a.help] == []
    assert [a.dest for a in command._actions if a.choices and a.metavar] == []  # they are shown


@pytest.mark.parametrize("name", subcommands())
def test_a_mistyped_flag_shows_the_usage_of_its_subcommand(name, capsys):
    needed = ["x" for a in subcommands()[name]._actions if not a.option_strings and a.nargs != "?"]
    needed += [w for a in subcommands()[name]._actions if a.option_strings and a.required
               for w in (a.option_strings[0], (a.choices or ["x"])[0])]  # fmt: skip
    with pytest.raises(SystemExit, match="2"):
        main([name, *needed, "--nonsense"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"usage: torch-dflash {name} [-h]")
    assert err.endswith(f"torch-dflash {name}: error: unrecognized arguments: --nonsense\n")


@pytest.mark.parametrize(
    "args, near",
    [
        (["generate", "--promt=x"], "--prompt"),
        (["generate", "--drafttokens", "3"], "--draft-tokens"),
        (["requantize", "a", "b", "--type", "q4_k", "--tensor-typ3", "x=y"], "--tensor-type"),
    ],
)
def test_the_flag_that_was_meant(args, near, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(args)
    assert re.search(rf"error: unrecognized arguments: --.*; did you mean {near}\?\n$",
                     capsys.readouterr().err)  # fmt: skip
