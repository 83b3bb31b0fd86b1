"""Entry point: parses the command line, turns errors into one line each."""

import argparse
import difflib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..jsonfile import next_step
from .printable import printable

__all__ = ["main", "parser"]


class _Subcommand(argparse.ArgumentParser):
    """Refuses what it does not know, with its own usage; argparse would leave it to the parent."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse all, or end the process with what is wrong."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [f for action in self._actions for f in action.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], flags, 1, 0.75)
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        return known, unknown


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    from . import convert, doctor, generate, inspect, requantize, vllm_check

    out = argparse.ArgumentParser(
        prog="torch-dflash",
        description="Speculative decoding with DFlash, DFlash2 and DSpark drafters.",
    )
    commands = out.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Subcommand
    )
    for module in (generate, convert, requantize, inspect, doctor, vllm_check):
        module.add_parser(commands)
    return out


def _line(error: Exception) -> str:
    """What went wrong; KeyError would print its message in quotes, OSError a number first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        step = next_step(str(error.filename))
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            step = "name another disk, nothing was left on this one"
        return f"{error.filename}: {error.strerror.lower()}; {step}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


@contextmanager
def _terminated() -> Iterator[None]:
    """Within the block, SIGTERM unwinds the stack: a half-written file does not stay behind."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        exit status: 0, 1 for an error that was printed, 130 when interrupted (143: SystemExit, when
        terminated).
    """
    if hasattr(sys.stdout, "reconfigure"):  # a name or text that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _terminated():
            args = parser().parse_args(argv)
            return int(args.run(args))
    except BrokenPipeError:  # the reader has seen enough; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError, ImportError, KeyError) as error:
        text = _line(error) or type(error).__name__
        if isinstance(error, RuntimeError):  # torch adds where it was raised
            text = text.splitlines()[0]
        print(f"torch-dflash: error: {printable(text)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("torch-dflash: interrupted", file=sys.stderr)
        return 130
