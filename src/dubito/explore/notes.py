"""Marks, labels and notes that people give to images while they look: kept on the disk after every change.

They belong to image names, not to rows, so they survive another extraction. The file is replaced in one step.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from dubito.errors import ValueRangeError
from dubito.storage import parse_json, reading, write_json
from dubito.threads import Lock
from dubito.types import Json

FILE = "notes.json"
_EMPTY: Json = {"marked": False, "label": "", "note": ""}
_LONGEST = 10_000


@final
class Notes:
    """What people noted, by the name of the image.

    Args:
        folder: Where `notes.json` is; None keeps notes in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._lock = Lock()
        self._notes: dict[str, Json] = {}
        if self._path is not None and self._path.is_file():
            with reading(f"notes in '{self._path}'", "Repair the file, or move it away to begin anew."):
                notes = parse_json(self._path.read_bytes())
                self._notes = {str(name): _checked(one) for name, one in notes.items()}

    def __len__(self) -> int:
        return len(self._notes)

    def of(self, name: str) -> Json | None:
        """The mark, label and note of an image; None where nobody noted anything."""
        return self._notes.get(name)

    def items(self) -> Iterable[tuple[str, Json]]:
        """All of them."""
        return list(self._notes.items())

    def change(self, names: Iterable[str], changes: Mapping[str, Any]) -> None:
        """Change the same parts of the notes of some images and keep them; parts that are not named stay."""
        with self._lock:
            for name in names:
                note = _checked({**self._notes.get(name, _EMPTY), **changes})
                self._notes[name] = note
                if note == _EMPTY:
                    del self._notes[name]
            if self._path is not None:
                write_json(self._path, self._notes)


def _checked(note: Mapping[str, Any]) -> Json:
    """A note with its three parts and nothing else."""
    if unknown := set(note) - set(_EMPTY):
        raise ValueRangeError(f"a note has marked, label and note; got {', '.join(sorted(unknown))}. Leave that out.")
    whole = {**_EMPTY, **note}
    for part, default in _EMPTY.items():
        if type(whole[part]) is not type(default) or len(str(whole[part])) > _LONGEST:
            raise ValueRangeError(
                f"{part} of a note must be {'true or false' if part == 'marked' else 'a text'} of at most {_LONGEST:,} "
                f"letters; got {str(whole[part])[:40]!r}. Send another one."
            )
    return whole
