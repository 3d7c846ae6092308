"""Where the page and the figure of a map go: what cannot be written is told, if possible before a long layout."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dubito.errors import ArtefactError, DiskFullError, ValueRangeError
from dubito.explain.pictures import new_figure


def check_places(to: str | Path | None, png: str | Path | None) -> None:
    """Raise before a long layout for what could not be written after it."""
    places = {name: Path(path).absolute() for name, path in (("to", to), ("png", png)) if path is not None}
    for name, path in places.items():
        if path.is_dir():
            raise ValueRangeError(f"draw_map: {name} must be a file; '{path}' is a folder. Give '{path}/map.html'.")
        there = next(one for one in path.parents if os.path.exists(one))  # noqa: PTH110 (a Path would raise)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "is no folder" if not there.is_dir() else "may not be written"
            raise ArtefactError(f"draw_map: '{path}' cannot be written ('{there}' {why}). Give another place.")
    if len({*places.values()}) < len(places):
        raise ValueRangeError(f"draw_map: to and png must be two files; got '{to}' for both. Name them apart.")
    if png is not None:
        known = new_figure(1, 1)[0].canvas.get_supported_filetypes()
        if ending(png) not in known:
            raise ValueRangeError(
                f"draw_map: png must end in one of {', '.join(sorted(known))}; got '{png}'. Name it map.png."
            )


def ending(path: str | Path) -> str:
    """As matplotlib calls a kind of figure."""
    return Path(path).suffix[1:].lower()


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Errors of ours where the place cannot be used, or the disk is full."""
    try:
        yield
    except DiskFullError as error:
        raise DiskFullError(
            f"no space left for '{path}'. What was there before is safe: free some space and run the same call again."
        ) from error
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be written ({error.strerror or error}). Give another place.") from error
