"""`dubito explore`: a cache in the browser."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.storage import Place

if TYPE_CHECKING:
    from dubito.types import Classifier


@command
def explore(
    screen: Screen,
    cache: options.Cache,
    *,
    images: Annotated[str | None, option("The images of the cache, for pictures.", "IMAGES")] = None,
    guard: Annotated[Place | None, option("Show the verdicts of this guard, by `dubito guard fit`.", "DIR")] = None,
    watch: options.WatchFolder = None,
    ood: Annotated[list[Place], option("Out-of-distribution images; repeat it for several caches.", "CACHE")] = [],
    other: Annotated[Place | None, option("The same images by another model, to compare with.", "CACHE")] = None,
    learn_from: Annotated[Place | None, option("Images that scores learn from.", "CACHE")] = None,
    folder: Annotated[
        Path | None, option("Where layouts and notes are kept.", "DIR", show_default="CACHE.explore")
    ] = None,
    host: Annotated[str, option("Where to listen: with another one, others can reach it.", "HOST")] = "127.0.0.1",
    port: Annotated[int, option("Where to listen.", "N", show_default="the last one, or a free one")] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open a browser.")] = True,
    model: options.OtherModel = None,
    load: options.ModelOptions,
) -> None:
    """Walk through the images of a CACHE in the browser: map, filters, threshold, and every image in detail.

    The model is loaded only when it is needed: for an image that you drop, for tiles and for corruptions.
    """
    with screen.waiting("opening the cache"):
        table, learned = dubito.open(cache), None if learn_from is None else dubito.open(learn_from)
        loaded = None if guard is None else dubito.Guard.load(guard)
        explorer = dubito.explore(
            table,
            images,
            guard=loaded,
            watch=options.open_watch(loaded, watch),
            ood=options.open_sets(ood),
            other=None if other is None else dubito.open(other),
            learn_from=learned,
            model=_loader(screen, table, model, load),
            folder=folder,
            host=host,
            port=port,
            browser=browser,
        )
    screen.show(explorer)
    screen.note("Ctrl-C stops the explorer; the same command opens it again, at the same address.")
    screen.flush()
    explorer.wait()


def _loader(
    screen: Screen, table: "dubito.Table", name: str | None, load: options.ModelOptions
) -> "Callable[[], Classifier] | None":
    """What loads the model of a table; None where the table does not say which one it is."""
    what = f"'{table.name}'"
    try:
        options.stored_model(name, table, what)
    except BadParameter:
        return None

    def load_model() -> "Classifier":
        from dubito.errors import ModelError

        try:
            return load.load_stored(screen, name, table, what)
        except BadParameter as error:
            raise ModelError(error.message) from error

    return load_model
