"""Results as CSV, replaced in one step."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from dubito.cache.shard import write_file
from dubito.errors import ArtefactError


def write_csv(path: str | Path, lines: Iterable[Sequence[object]]) -> Path:
    """Replace a CSV in one step; its folder is made."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, text.getvalue().encode())
    except OSError as error:
        raise ArtefactError(f"'{place}' cannot be written ({error.strerror}). Give another place.") from error
    return place
