"""A progress bar for long loops: how far, images a second, time left. Silent where nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(
    title: str, total: int, *, done: int = 0, unit: str = "images", show: bool = True
) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields a function that advances it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=False) as progress:
        task = progress.add_task(title, total=total, completed=done, rate="")

        def advance(count: int) -> None:
            progress.advance(task, count)
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.1f} {unit}/s" if speed else "")

        yield advance
