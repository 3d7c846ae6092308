"""A progress bar for long loops: how far, images per second, time left. Silent without a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@runtime_checkable
class Advance(Protocol):
    """Moves a bar on by some units; a note is shown beside it until the next one."""

    def __call__(self, count: int, note: str | None = None) -> None: ...  # noqa: D102


@contextmanager
def bar(title: str, total: int, *, done: int = 0, unit: str = "images", show: bool = True) -> Iterator[Advance]:
    """A bar on standard error; yields a function that advances it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=False) as progress:
        task = progress.add_task(title, total=total, completed=done, rate="", note="")

        def advance(count: int, note: str | None = None) -> None:
            progress.advance(task, count)
            speed = progress.tasks[0].speed
            rate = f"{speed:,.{0 if speed >= 1000 else 1}f} {unit}/s" if speed else ""
            progress.update(task, rate=rate)
            if note is not None:
                progress.update(task, note=note)

        yield advance
