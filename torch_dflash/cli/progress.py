"""A progress bar on standard error, where somebody looks at it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..gguf import Progress

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Show how many bytes are written; None where standard error is no terminal.

    Args:
        what: in front of the bar, such as the file's name.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import (
        Progress as Bar,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[tensor]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, tensor="")

        def step(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, tensor=name)

        yield step
