"""Files that are written in one step, locked while they are written, and proof against damage.

A kill or a full disk at any instant leaves a file as it was before or as it should be after: on the disk it is written
beside the old one and renamed, in an object store it appears when it is whole. Hashes reveal damage, not malice:
whoever can change a file can compute them too. Nothing is ever pickled.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout
from safetensors import safe_open

from dubito.errors import ArtefactError, DiskFullError, DubitoError, MissingPackageError, StoreError, first_words
from dubito.storage.lease import LeaseTakenError, check_held, leased
from dubito.storage.locations import Place, RemotePath, to_path

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".part"
LOCK = ".lock"
_DESCRIBED = {"manifest.json": "a cache", "guard.json": "a guard", "index.json": "an index", "score.json": "a score"}
"""What a folder is, by the file that describes it."""
_BYTES = 1 << 22
_LONGEST = 500
"""Letters of the reason why a file cannot be read."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_file(path: Place, data: bytes, *, writer: str | None = None) -> None:
    """Replace a file in one step: on the disk, write beside it, flush to the disk, rename.

    Args:
        path: The file.
        data: Its content.
        writer: Eight hex digits that no other writer has, where several may write the same file at the same time.

    Raises:
        StoreError: The store refuses, or this process held the lease of the file's folder and has lost it.
    """
    if isinstance(path, RemotePath):
        check_held(path.parent)
        path.write_bytes(data)
        return
    part = path.parent / (path.name + (f".{writer}" if writer else "") + UNFINISHED)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # what forbids to write may also forbid to remove
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


def remove_file(path: Place) -> None:
    """Remove a file, if it is there; StoreError if this process held the lease of its folder and has lost it."""
    if isinstance(path, RemotePath):
        check_held(path.parent)
    path.unlink(missing_ok=True)


def write_json(path: Place, value: Any) -> None:
    """Replace a JSON file in one step, its keys sorted so that equal values give equal bytes."""
    write_file(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text from the disk; ValueError where it is none, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_sealed(path: Place, entries: Mapping[str, Any], *, compact: bool = False) -> None:
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


def read_sealed(path: Place, *, format: int) -> dict[str, Any]:  # noqa: A002 (the name of the entry)
    """What `write_sealed` wrote, without the hash; ValueError for another format, or where it was changed since."""
    entries: Any = parse_json(path.read_bytes())
    written = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
    if written != format:
        raise ValueError(f"{path.name} must be of format {format}; got {written}")
    return unsealed(entries, path.name)


def unsealed(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entries of a sealed JSON file without their hash; ValueError where they are not what it was computed of."""
    plain = {key: value for key, value in entries.items() if key != "digest"}
    if entries.get("digest") != _digest(plain):
        raise ValueError(f"{name} was changed after it was written")
    return plain


def write_csv(path: str | Path, lines: Iterable[Sequence[object]]) -> Path:
    """Replace a CSV in one step; its folder is made. Names that are not UTF-8 keep their bytes."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return export(path, encode(text.getvalue()))


def export(path: str | Path, data: bytes) -> Path:
    """Replace a user's file in one step and return its path; its folder is made."""
    place = to_path(path, "a file to write")
    with writing(f"'{place.name or place}'", place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, data)
    return place


@contextlib.contextmanager
def locked(
    folder: Place,
    *,
    seconds: float = 0.0,
    busy: type[DubitoError] = ArtefactError,
    refused: type[DubitoError] = ArtefactError,
) -> Iterator[None]:
    """Hold a folder's lock, making the folder; on a disk, the system releases it however the process ends.

    In an object store, the lock is a lease (`lease.py`).

    Raises:
        busy: Somebody else is writing there, and still is after so many seconds.
        refused: The folder cannot be made or written.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(folder, RemotePath):
                stack.enter_context(leased(folder, seconds=seconds))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(folder / LOCK, timeout=seconds))
        except (Timeout, LeaseTakenError) as error:
            repair = "Wait until it has ended, or choose another folder."
            raise busy(f"another process is writing into '{folder}'. {repair}") from error
        except StoreError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            raise refused(f"the folder '{folder}' cannot be written ({error}). Choose another one.") from error
        except OSError as error:
            raise refused(f"the folder '{folder}' cannot be written ({error.strerror}). Choose another one.") from error
        try:
            yield
        except OSError as error:
            inside = str(error.filename or "").startswith(str(folder))
            if error.errno not in _FORBIDDEN or not inside:
                raise
            raise refused(
                f"the folder '{folder}' can no longer be written ({error.strerror}). What was finished is safe: make "
                f"it writable, and run the same call again."
            ) from error


def check_empty(
    folder: Place, others: Sequence[str], what: str, instead: str, *, error: type[DubitoError] = ArtefactError
) -> None:
    """Raise an error if a folder in which `what` is to be saved holds other things, and say what to choose instead."""
    if others:
        raise error(
            f"the {what} cannot be saved in '{folder}': it holds other things ({', '.join(others[:3])}) and no {what}. "
            f"Choose a new or empty folder, or {instead}."
        )


@contextlib.contextmanager
def writing(what: str, folder: Place) -> Iterator[None]:
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


def write_tensors(path: Place, tensors: Mapping[str, "Tensor"], notes: Mapping[str, Any]) -> None:
    """Replace a safetensors file in one step: tensors, notes as JSON, and a hash of both."""
    from safetensors.torch import save  # noqa: PLC0415 (imports torch)

    whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    # One entry of metadata: several have no fixed order.
    digest = _digest(notes, f"\n{tensors_digest(whole)}")
    text = json.dumps({**notes, "digest": digest}, sort_keys=True)
    write_file(path, save(whole, {"notes": text}))


def read_tensors(path: Place) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """What `write_tensors` wrote; ValueError where it was changed since."""
    with _on_disk(path) as local, safe_open(local, framework="pt") as file:
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
    """Turn whatever a damaged file raises into one error that names it.

    Errors of that type, of stores and of missing packages pass as they are.

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
    except (error, MissingPackageError, StoreError):
        raise
    except Exception as cause:  # every package that reads files has errors of its own
        reason = f"no {cause}" if type(cause) is KeyError else str(cause) or type(cause).__name__
        reason = "it does not fit in memory" if isinstance(cause, MemoryError) else reason
        reason = reason if len(reason) < _LONGEST else first_words(reason, _LONGEST)  # it may quote the file
        raise error(f"{what} cannot be read ({reason}). {repair}") from cause


def not_there(file: Place) -> str:
    """Why a folder lacks the file that describes it: what it is instead, where that is something that dubito wrote.

    >>> not_there(Path("nowhere/guard.json"))
    'there is no such folder'
    """
    kind = next((kind for name, kind in _DESCRIBED.items() if (file.parent / name).is_file()), None)
    if kind is not None:
        return f"that is {kind}"
    return f"{file.name} is not there" if file.parent.exists() else "there is no such folder"


def application_folder(kind: Literal["data", "caches"]) -> Path:
    """The folder of dubito among those that the system has for data or caches of applications."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = {"data": "~/Library/Application Support", "caches": "~/Library/Caches"}[kind]
    else:
        names = {"data": ("XDG_DATA_HOME", "~/.local/share"), "caches": ("XDG_CACHE_HOME", "~/.cache")}
        base = os.environ.get(names[kind][0]) or names[kind][1]
    return Path(base).expanduser() / "dubito"


def encode(text: str) -> bytes:
    """Text as UTF-8; names of files that are not UTF-8 keep the bytes that the system gave."""
    return text.encode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """Text that any terminal and page takes: a byte of a file name that is not UTF-8 becomes a question mark."""
    return text.encode(errors="replace").decode()


@contextlib.contextmanager
def _on_disk(path: Place) -> Iterator[Path]:
    """A file on the disk as it is, or a remote one for as long as this lasts."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dubito-") as folder:
        path.download(Path(folder) / path.name)
        yield Path(folder) / path.name


def _digest(entries: Mapping[str, Any], tensors: str = "") -> str:
    return _hash(json.dumps(entries, sort_keys=True) + tensors)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
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
