"""A CSV of picks that people fill in: read as spreadsheets save it, and written anew without losing what they wrote.

A file has a header with a column id, and a column label for the answers; further columns are people's own. Commas,
semicolons or tabs, any line ends, UTF-8 with or without a mark in front.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dubito.data.image_set import some
from dubito.errors import ArtefactError
from dubito.storage import write_csv

_NONE_YET = ("", "-1", "-1.0")


@final
@dataclass(frozen=True)
class Answers:
    """What stands in one file.

    Attributes:
        header: The names of its columns, in small letters.
        lines: By id, the cells by column.
    """

    header: Sequence[str]
    lines: Mapping[str, Mapping[str, str]]

    @property
    def labels(self) -> dict[str, str]:
        """By id, the label, where there is one."""
        told = {name: cells.get("label", "").strip() for name, cells in self.lines.items()}
        return {name: label for name, label in told.items() if label not in _NONE_YET}


def read_answers(path: str | Path) -> Answers:
    """The lines of a file that has a column id; ArtefactError if there is none."""
    header, *lines = _cells(Path(path))
    if "id" not in header:
        raise ArtefactError(f"'{path}' must have a column id; it has {', '.join(filter(None, header)) or 'none'}.")
    found: dict[str, dict[str, str]] = {}
    for number, line in enumerate(lines, 2):
        if any(line[len(header) :]):
            raise ArtefactError(
                f"'{path}' must have {len(header)} cells a line, as its header has; line {number} has {len(line)}. "
                f"Quote cells that contain the separator."
            )
        cells = dict(zip(header, line, strict=False))
        if not any(map(str.strip, line)):
            continue
        first = found.setdefault(cells.get("id", ""), cells)
        if first.get("label", "").strip() != cells.get("label", "").strip():
            raise ArtefactError(
                f"'{path}' must give every image one label; '{cells['id']}' has '{first.get('label', '')}' and, in "
                f"line {number}, '{cells.get('label', '')}'. Leave one line for each image."
            )
    return Answers(header, found)


def write_picks(path: str | Path, lines: Sequence[Sequence[str]]) -> Path:
    """Write picks, a header first, as CSV with a column label, and return its path.

    What people wrote into an earlier file of these picks stays: labels, and columns of their own. A file with labels
    of other images is not replaced.
    """
    place, (header, *body) = Path(path), lines
    earlier = _earlier(place)
    names = {line[0] for line in body}
    lost = [name for name in earlier.labels if name not in names]
    if lost:
        raise ArtefactError(
            f"'{place}' has labels of {len(lost)} images that are not among these picks: {some(lost)}. It is left as "
            f"it is, so that they are not lost. Give another place, or move it away."
        )
    own = ["label", *(key for key in earlier.header if key and key not in (*header, "label"))]
    kept = [[earlier.lines.get(line[0], {}).get(key, "") for key in own] for line in body]
    return write_csv(place, [[*header, *own], *([*line, *cells] for line, cells in zip(body, kept, strict=True))])


def _earlier(place: Path) -> Answers:
    """The answers in a file; none if there is no such file, or if it is another one."""
    ours = place.is_file() and {"id", "label"} <= set(_cells(place)[0])
    return read_answers(place) if ours else Answers((), {})


def _cells(path: Path) -> list[list[str]]:
    """Every line of a CSV, the header first and in small letters."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        # Spreadsheets separate by semicolons where the comma is the decimal point.
        first = next(iter(text.splitlines()), "")
        header, *lines = [*csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count))] or [[]]
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be read ({error.strerror}). Give a CSV with a column id.") from error
    except UnicodeDecodeError as error:
        raise ArtefactError(
            f"'{path}' must be a CSV in UTF-8; it is not ({error.reason}). Save it as 'CSV UTF-8'."
        ) from error
    except csv.Error as error:
        raise ArtefactError(f"'{path}' must be a CSV; it is not ({error}). Save it as 'CSV UTF-8'.") from error
    return [[cell.strip().lower() for cell in header], *lines]
