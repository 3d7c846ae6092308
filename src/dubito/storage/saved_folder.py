"""How guards, indexes and other things are kept as folders: parts that are named by their content, and a description.

    FOLDER/
      DESCRIPTION.json            what is saved and which parts are its own, sealed by its own hash; replaced last
      NAME-HASH.EXT, NAME-HASH/   the parts, named by their content, so that new ones never overwrite old ones
      .lock                       held while somebody writes

A kill or a full disk at any instant leaves the folder as it was before, or as it should be after. In an object store,
parts are written on the disk and uploaded before the description is; loading fetches local copies of them.
"""

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from dubito.errors import ArtefactError, StoreError
from dubito.storage.copies import forget_copy, local_copy, staged
from dubito.storage.files import (
    LOCK,
    UNFINISHED,
    check_empty,
    checksum,
    locked,
    not_there,
    read_sealed,
    reading,
    size_of,
    write_sealed,
    writing,
)
from dubito.storage.lease import check_held
from dubito.storage.locations import Place, RemotePath, sizes_in

Loaded = TypeVar("Loaded")


@final
@dataclass(frozen=True)
class SavedFolder:
    """How one kind of thing is kept as a folder: a sealed description that names its parts by their content.

    Attributes:
        kind: What is saved there, for people: "guard".
        description: Its file: "guard.json".
        format: What this version writes and reads.
        parts: Stems of the parts, such as ("vectors", "score").
        how: What writes it: "Guard.save".
    """

    kind: str
    description: str
    format: int
    parts: tuple[str, ...]
    how: str

    def save(self, folder: Place, write: Callable[[Path], Mapping[str, Any]]) -> None:
        """Replace what a folder holds: `write` puts the parts there and returns the description's entries.

        One writer at a time. What a failed writer has written is removed at once, and so are parts that the
        description no longer names.
        """
        self.check_place(folder)
        with writing(f"the {self.kind}", folder), locked(folder):
            try:
                with staged(folder) as place:
                    described = write(place)
                write_sealed(folder / self.description, {"format": self.format, **described})
            finally:
                with contextlib.suppress(OSError, StoreError):
                    if isinstance(folder, RemotePath):
                        check_held(folder)  # else the parts may be those of whoever holds it now
                    self._sweep(folder)

    def read(self, folder: Place) -> dict[str, Any]:
        """The description, its format and seal checked."""
        path = folder / self.description
        if not path.is_file():
            raise ArtefactError(f"no {self.kind} in '{folder}': {not_there(path)}. Save one with {self.how}.")
        repair = f"Copy the whole folder again, make the {self.kind} again, or update dubito."
        with reading(f"the {self.kind} in '{folder}'", repair):
            return read_sealed(path, format=self.format)

    def load(self, folder: Place, read: Callable[[dict[str, Any]], Loaded]) -> Loaded:
        """What `read` makes of the description; where the folder is replaced meanwhile, of the new one."""
        repair = f"Copy the whole folder again, or make the {self.kind} again."
        while True:
            described = self.read(folder)
            try:
                with reading(f"the {self.kind} in '{folder}'", repair):
                    return read(described)
            except ArtefactError:
                if self.read(folder) == described:
                    raise

    def put_file(self, folder: Path, stem: str, ending: str, fill: Callable[[Callable[[bytes], Any]], Any]) -> str:
        """Write one part, named by its content; `fill` is called with a function that takes the bytes in turn."""
        part, crc = folder / f"{stem}{UNFINISHED}", 0
        with part.open("wb") as file:

            def put(piece: bytes) -> None:
                nonlocal crc
                file.write(piece)
                crc = zlib.crc32(piece, crc)

            fill(put)
            file.flush()
            os.fsync(file.fileno())
        name = f"{stem}-{part.stat().st_size:x}-{crc:08x}{ending}"
        part.replace(folder / name)
        return name

    def put_folder(self, folder: Path, stem: str, fill: Callable[[Path], Any]) -> str:
        """Write a part that is a folder of its own, named by its content; `fill` is called with an empty folder."""
        part = folder / f"{stem}{UNFINISHED}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        fill(part)
        name = f"{stem}-{size_of(part):x}-{checksum(part)}"
        place = folder / name
        if place.is_dir() and self.is_whole(place):
            shutil.rmtree(part)
        else:
            shutil.rmtree(place, ignore_errors=True)  # damaged: it was of no use to anybody
            part.replace(place)
        return name

    def part(self, folder: Place, name: Any, *, check: bool = True) -> Path:
        """A part that the description names, or a local copy of it; its size is checked, with `check` every byte."""
        if not isinstance(name, str) or not self._is_part(name):
            raise ArtefactError(
                f"{self.kind} in '{folder}' refers to {name!r}, which is not one of its parts. Save it again."
            )
        place, whole = folder / name, False
        with contextlib.suppress(FileNotFoundError, ValueError):
            path = local_copy(place, folder="." not in name)
            whole = self.is_whole(path, check=check)
            if not whole and forget_copy(place):
                whole = self.is_whole(local_copy(place, folder="." not in name), check=check)
        if not whole:
            raise ArtefactError(
                f"{self.kind} in '{folder}': {name} is not the part that {self.description} was written with; it is "
                f"missing, damaged or replaced. Copy the whole folder again, or save the {self.kind} again."
            )
        return path

    @staticmethod
    def is_whole(path: Path, *, check: bool = True) -> bool:
        """Whether a part has the size, and with `check` the content, that its name says."""
        _, size, crc = path.name.partition(".")[0].rsplit("-", 2)
        return f"{size_of(path):x}" == size and (not check or checksum(path) == crc)

    def check_place(self, folder: Place) -> None:
        """Raise ArtefactError for a folder of other things, such as images, or one that cannot be listed."""
        with writing(f"the {self.kind}", folder):
            with contextlib.suppress(ArtefactError):
                self.read(folder)
                return
            names = sorted(name for name in sizes_in(folder) if name != LOCK)
        # A description that cannot be read is ours, and damaged, only where our parts lie beside it.
        if not any(self._is_ours(name) for name in names):
            check_empty(folder, names, self.kind, f"the folder of the {self.kind} to replace")

    def _sweep(self, folder: Place) -> None:
        """Remove our own parts that the description does not name."""
        file = folder / self.description
        named = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for name in sizes_in(folder):
            path = folder / name
            if self._is_ours(name) and f'"{name}"' not in named:
                if isinstance(path, RemotePath):
                    path.remove()
                elif path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _is_part(self, name: str) -> bool:
        return re.fullmatch(rf"({'|'.join(self.parts)})-[0-9a-f]+-[0-9a-f]{{8}}(\.[a-z]+)?", name) is not None

    def _is_ours(self, name: str) -> bool:
        unfinished = name.removesuffix(UNFINISHED)
        return self._is_part(name) or (name != unfinished and unfinished in (*self.parts, self.description))
