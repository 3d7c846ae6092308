"""Every guarantee about files, once: written in one step, locked while written, and proof against damage.

A kill or a full disk at any instant leaves a file, or a saved folder, as it was before or as it should be after.

    FOLDER/
      DESCRIPTION.json          what is saved and which parts are its own, sealed by its own hash; replaced last
      NAME-HASH.EXT, NAME-HASH/   the parts, named by their content, so that new ones never overwrite old ones
      .lock                     held while somebody writes

Hashes reveal damage, not malice: whoever can change a file can compute them too. Nothing is ever pickled.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from dubito.errors import ArtefactError, DiskFullError, DubitoError, MissingPackageError

if TYPE_CHECKING:
    from torch import Tensor

Loaded = TypeVar("Loaded")
UNFINISHED = ".part"
LOCK = ".lock"
_DAMAGED = (SafetensorError, DubitoError, csv.Error, struct.error, zlib.error, zipfile.BadZipFile)
_UNREADABLE = (AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError, *_DAMAGED)
"""What reading files that are not as they were written may raise."""
_DESCRIBED = {"manifest.json": "a cache", "guard.json": "a guard", "index.json": "an index", "score.json": "a score"}
"""What a folder is, by the file that describes it."""
_BYTES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, data: bytes, *, writer: str | None = None) -> None:
    """Replace a file in one step: write beside it, flush to the disk, rename.

    Args:
        path: The file.
        data: Its content.
        writer: Eight hex digits that no other writer has, where several may write the same file at the same time.
    """
    part = path.with_name(path.name + (f".{writer}" if writer else "") + UNFINISHED)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in _FULL:
            raise DiskFullError(
                f"no space left for {path.name} ({len(data) / 1e6:.1f} MB) in '{path.parent}'. What was finished is "
                f"safe: free some space and run the same call again, it goes on from there."
            ) from error
        raise
    if os.name != "nt":  # the rename survives a power cut; Windows cannot open folders and does not need it
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step, its keys sorted so that equal values give equal bytes."""
    write_file(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text from the disk; ValueError where it is none, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_sealed(path: Path, entries: Mapping[str, Any], *, compact: bool = False) -> None:
    """Replace a JSON file in one step, with a hash of everything that it says, so that damage is seen.

    Args:
        path: The file.
        entries: What it says.
        compact: On one line, ten times faster, for files that are written often; all keys must be text.
    """
    if compact:
        text = json.dumps(dict(entries), sort_keys=True, allow_nan=False)
        write_file(path, f'{{"digest": "{_hash(text)}", {text[1:]}\n'.encode())
        return
    plain = json.loads(json.dumps(dict(entries), allow_nan=False))  # what reading it back will give
    write_json(path, {**plain, "digest": _digest(plain)})


def read_sealed(path: Path, *, format: int) -> dict[str, Any]:  # noqa: A002 (the name of the entry)
    """What `write_sealed` wrote, without the hash; ValueError for another format, or where it was changed since."""
    entries: Any = parse_json(path.read_bytes())
    written = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
    if written != format:
        raise ValueError(f"{path.name} must be of format {format}; got {written}")
    if entries.pop("digest", None) != _digest(entries):
        raise ValueError(f"{path.name} was changed after it was written")
    return dict(entries)


def write_csv(path: str | Path, lines: Iterable[Sequence[object]]) -> Path:
    """Replace a CSV in one step; its folder is made. Names that are not UTF-8 keep their bytes."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return export(path, encode(text.getvalue()))


def export(path: str | Path, data: bytes) -> Path:
    """Replace a user's file in one step and return its path; its folder is made."""
    place = Path(path)
    with writing(f"'{place.name}'", place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, data)
    return place


@contextlib.contextmanager
def locked(
    folder: Path,
    *,
    seconds: float = 0.0,
    busy: type[DubitoError] = ArtefactError,
    refused: type[DubitoError] = ArtefactError,
) -> Iterator[None]:
    """Hold a folder's lock, making the folder; the system releases it however the process ends.

    Raises:
        busy: Somebody else is writing there, and still is after so many seconds.
        refused: The folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=seconds)
        lock.acquire()
    except Timeout as error:
        repair = "Wait until it has ended, or choose another folder."
        raise busy(f"another process is writing into '{folder}'. {repair}") from error
    except OSError as error:
        raise refused(f"the folder '{folder}' cannot be written ({error.strerror}). Choose another one.") from error
    try:
        yield
    finally:
        lock.release()


def check_empty(
    folder: Path, others: Sequence[str], what: str, instead: str, *, error: type[DubitoError] = ArtefactError
) -> None:
    """Raise an error if a folder in which `what` is to be saved holds other things, and say what to choose instead."""
    if others:
        raise error(
            f"the {what} cannot be saved in '{folder}': it holds other things ({', '.join(others[:3])}) and no {what}. "
            f"Choose a new or empty folder, or {instead}."
        )


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what is safe: DiskFullError or ArtefactError."""
    try:
        yield
    except (OSError, DiskFullError) as error:
        if isinstance(error, DiskFullError) or error.errno in _FULL:
            raise DiskFullError(
                f"no space left for {what} in '{folder}'. What is in memory is safe, and so is what was saved there "
                f"before: free some space and save again."
            ) from error
        reason = error.strerror or error
        raise ArtefactError(f"{what} cannot be saved in '{folder}' ({reason}). Choose another place.") from error


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"], notes: Mapping[str, Any]) -> None:
    """Replace a safetensors file in one step: tensors, notes as JSON, and a hash of both."""
    from safetensors.torch import save  # noqa: PLC0415 (imports torch)

    whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    # One entry of metadata: several have no fixed order.
    digest = _digest(notes, f"\n{tensors_digest(whole)}")
    text = json.dumps({**notes, "digest": digest}, sort_keys=True)
    write_file(path, save(whole, {"notes": text}))


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """What `write_tensors` wrote; ValueError where it was changed since."""
    with safe_open(path, framework="pt") as file:
        notes: dict[str, Any] = parse_json(file.metadata()["notes"])
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
    if notes.pop("digest") != _digest(notes, f"\n{tensors_digest(tensors)}"):
        raise ValueError("its checksum does not match")
    return tensors, notes


def tensors_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """32 hex digits that change with any tensor's name, type, shape or value, and not with their order."""
    import torch  # noqa: PLC0415 (the command line starts without it)

    state = hashlib.blake2b(digest_size=16)
    for key, tensor in sorted(tensors.items()):
        flat = tensor.detach().to("cpu").contiguous().flatten()
        raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""  # hashed without a copy
        content = hashlib.blake2b(raw, digest_size=16).hexdigest()
        state.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|{content}\n".encode())
    return state.hexdigest()


@contextlib.contextmanager
def reading(what: str, repair: str, *, error: type[DubitoError] = ArtefactError) -> Iterator[None]:
    """Turn whatever a damaged file raises into one error that names it; that error and missing packages just pass.

    Args:
        what: What is being read, with its place.
        repair: What to do about it, a sentence.
        error: What to raise.

    >>> with reading("masks in 'masks.safetensors'", "Save them again."):
    ...     {}["layers"]
    Traceback (most recent call last):
    dubito.errors.ArtefactError: masks in 'masks.safetensors' cannot be read (no 'layers'). Save them again.
    """
    try:
        yield
    except (error, MissingPackageError):
        raise
    except _UNREADABLE as cause:
        reason = f"no {cause}" if type(cause) is KeyError else str(cause) or type(cause).__name__
        raise error(f"{what} cannot be read ({reason}). {repair}") from cause


def not_there(file: Path) -> str:
    """Why a folder lacks the file that describes it: what it is instead, where that is something that dubito wrote.

    >>> not_there(Path("nowhere/guard.json"))
    'there is no such folder'
    """
    kind = next((kind for name, kind in _DESCRIBED.items() if (file.parent / name).is_file()), None)
    if kind is not None:
        return f"that is {kind}"
    return f"{file.name} is not there" if file.parent.exists() else "there is no such folder"


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

    def save(self, folder: Path, write: Callable[[Path], Mapping[str, Any]]) -> None:
        """Replace what a folder holds: `write` puts the parts there and returns the description's entries.

        One writer at a time. What a failed writer has written is removed at once, and so are parts that the
        description no longer names.
        """
        self.check_place(folder)
        with writing(f"the {self.kind}", folder), locked(folder):
            try:
                write_sealed(folder / self.description, {"format": self.format, **write(folder)})
            finally:
                with contextlib.suppress(OSError):
                    self._sweep(folder)

    def read(self, folder: Path) -> dict[str, Any]:
        """The description, its format and seal checked."""
        path = folder / self.description
        if not path.is_file():
            raise ArtefactError(f"no {self.kind} in '{folder}': {not_there(path)}. Save one with {self.how}.")
        repair = f"Copy the whole folder again, make the {self.kind} again, or update dubito."
        with reading(f"the {self.kind} in '{folder}'", repair):
            return read_sealed(path, format=self.format)

    def load(self, folder: Path, read: Callable[[dict[str, Any]], Loaded]) -> Loaded:
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
        name = f"{stem}-{_size(part):x}-{checksum(part)}"
        place = folder / name
        if place.is_dir() and self.is_whole(place):
            shutil.rmtree(part)
        else:
            shutil.rmtree(place, ignore_errors=True)  # damaged: it was of no use to anybody
            part.replace(place)
        return name

    def part(self, folder: Path, name: Any, *, check: bool = True) -> Path:
        """The path of a part that the description names; its size is checked, and with `check` every byte."""
        if not isinstance(name, str) or not self._is_part(name):
            raise ArtefactError(
                f"{self.kind} in '{folder}' refers to {name!r}, which is not one of its parts. Save it again."
            )
        path = folder / name
        if not path.exists() or not self.is_whole(path, check=check):
            raise ArtefactError(
                f"{self.kind} in '{folder}': {name} is not the part that {self.description} was written with; it is "
                f"missing, damaged or replaced. Copy the whole folder again, or save the {self.kind} again."
            )
        return path

    @staticmethod
    def is_whole(path: Path, *, check: bool = True) -> bool:
        """Whether a part has the size, and with `check` the content, that its name says."""
        _, size, crc = path.name.partition(".")[0].rsplit("-", 2)
        return f"{_size(path):x}" == size and (not check or checksum(path) == crc)

    def check_place(self, folder: Path) -> None:
        """Raise ArtefactError for a folder of other things, such as images, or one that cannot be listed."""
        with writing(f"the {self.kind}", folder):
            with contextlib.suppress(ArtefactError):
                self.read(folder)
                return
            names = sorted({path.name for path in folder.iterdir()} - {LOCK}) if folder.is_dir() else []
        # A description that cannot be read is ours, and damaged, only where our parts lie beside it.
        if not any(self._is_ours(name) for name in names):
            check_empty(folder, names, self.kind, f"the folder of the {self.kind} to replace")

    def _sweep(self, folder: Path) -> None:
        """Remove our own parts that the description does not name."""
        file = folder / self.description
        named = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for path in folder.iterdir():
            if self._is_ours(path.name) and f'"{path.name}"' not in named:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _is_part(self, name: str) -> bool:
        return re.fullmatch(rf"({'|'.join(self.parts)})-[0-9a-f]+-[0-9a-f]{{8}}(\.[a-z]+)?", name) is not None

    def _is_ours(self, name: str) -> bool:
        unfinished = name.removesuffix(UNFINISHED)
        return self._is_part(name) or (name != unfinished and unfinished in (*self.parts, self.description))


def encode(text: str) -> bytes:
    """Text as UTF-8; names of files that are not UTF-8 keep the bytes that the system gave."""
    return text.encode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """Text that any terminal and page takes: a byte of a file name that is not UTF-8 becomes a question mark."""
    return text.encode(errors="replace").decode()


def _digest(entries: Mapping[str, Any], tensors: str = "") -> str:
    return _hash(json.dumps(entries, sort_keys=True) + tensors)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in _files(path))


def checksum(path: Path) -> str:
    """CRC-32 of a file, or of a folder's file names and contents in turn."""
    crc = 0
    for one in _files(path):
        if path.is_dir():
            crc = zlib.crc32(one.relative_to(path).as_posix().encode(), crc)
        with one.open("rb") as file:
            while piece := file.read(_BYTES):
                crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"
