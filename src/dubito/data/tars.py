"""Images in tar files, read in place: one file, or the shards of a large collection, as WebDataset writes them.

Each tar is read once from front to back for an index of its members; after that, images are ranges of bytes, in any
order. A compressed tar has no such ranges: every process unpacks it from the front.

Labels lie beside the images: `0001.jpg` with `0001.cls` (a class index or a class name) or `0001.json` (its key label
or cls). Where no image has one, they come from class folders, as in a folder.

A damaged header is passed over, and what follows it is found again by its checksum; a tar that is cut off has the
images before the cut. Either is warned of: nothing is lost in silence.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, cast, final

import numpy as np
from PIL import Image

from dubito.data.archives import REPAIR, UNPACKING, damaged, unwrap
from dubito.data.decode import LIMIT, decode, hash_content, too_large
from dubito.data.files import class_folders, report_others, separate
from dubito.data.image_set import ImageSet, hash_bytes, in_threads, some
from dubito.data.labels import to_labels
from dubito.errors import BrokenImageError, DamagedArchiveWarning, ImagesError, LeftOutFilesWarning, users_level
from dubito.storage import reading
from dubito.storage.locations import Place, RangeReader, to_readable
from dubito.threads import Local

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
"""Endings, in lower case, of tar files."""
_STREAMS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""By the first bytes of a compressed tar, what opens it."""
_BESIDE = (".cls", ".json")
_NOTE = 1 << 16
"""Bytes of a label beside an image, at most."""
_BLOCK, _HEADER = 512, 1 << 20
"""Bytes of a block, and of a header with the long names that precede it, at most."""
_THREADS = 8


@final
class TarImages(ImageSet):
    """The images of one or several tar files, compressed or not, in the order of the files.

    Args:
        places: The tar files.
        shards: A name for each of them, with which the ids of its images begin; by default, ids are paths inside.
        name: What errors call the set; by default the first tar file.
    """

    def __init__(self, *places: Place, shards: Sequence[str] | None = None, name: str | None = None) -> None:
        what = f"archive '{name or places[0]}'"
        with ThreadPoolExecutor(_THREADS) as pool:
            indexes = list(pool.map(_index, places))
        texts = _labels(indexes, what)
        paths = [path for index in indexes for path in index.images]
        others: Counter[str] = Counter()
        for index in indexes:
            others += index.others if texts is None else index.others - index.labels
        report_others(others, what, images=len(paths))
        prefixes = [""] * len(places) if shards is None else [f"{shard}/" for shard in shards]
        ids = [prefix + path for prefix, index in zip(prefixes, indexes, strict=True) for path in index.images]
        labels = class_folders(paths, what) if texts is None else to_labels(texts, f"labels of {what}")
        super().__init__(name or str(places[0]), ids, *labels)
        self.places = [place.absolute() for place in places]
        self._prefix = list(map(len, prefixes))
        self._compressed = [index.stream for index in indexes]
        self._shard = np.repeat(np.arange(len(places)), [len(index.images) for index in indexes])
        self._extents = np.array([extent for index in indexes for extent in index.extents], dtype=np.int64)
        self._ranges = RangeReader()
        self._local = Local()

    def read(self, index: int) -> Image.Image:
        """The image as RGB."""
        return unwrap(self.read_hashed(index)[0])

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image's bytes."""
        if not any(self._compressed):
            return in_threads(lambda row: self._content(row)[1], rows)
        return [self._content(row)[1] for row in rows]  # from front to back

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of its bytes, from one reading."""
        shard = self._shard[index]
        name = f"{self.places[shard]}/{self.ids[index][self._prefix[shard] :]}"
        content, hashed = self._content(index)
        if isinstance(content, Exception):
            return damaged(name, content), hashed
        try:
            return decode(content, name), hashed
        except BrokenImageError as broken:
            return broken, hashed

    def _content(self, index: int) -> tuple[bytes | Exception, bytes]:
        try:
            content = self._unpack(int(self._shard[index]), *self._extents[index].tolist())
        except UNPACKING as error:
            return error, hash_bytes(b"unreadable")
        return content, hash_content(content)

    def _unpack(self, shard: int, start: int, size: int) -> bytes:
        if start < 0:
            raise OSError("it is a link or another special file")
        if size > LIMIT:
            raise too_large()
        if self._compressed[shard] is None:
            content = self._ranges.read(self.places[shard], start, size)
        else:
            stream = self._open_stream(shard)
            stream.seek(start)
            content = stream.read(size)
        if len(content) < size:
            raise OSError(f"{size - len(content)} of {size} bytes are missing")
        return content

    def _open_stream(self, shard: int) -> Any:
        """What unpacks the whole file: one for every thread of every process, since it has a position."""
        of, stream = getattr(self._local, "opened", (None, None))
        if of != (os.getpid(), shard):
            stream = self._compressed[shard](to_readable(self.places[shard]))
            self._local.opened = ((os.getpid(), shard), stream)
        return stream


@dataclass
class _Index:
    """What a tar holds.

    Attributes:
        place: The tar.
        stream: What unpacks it, if it is compressed.
        images: The paths of its images.
        extents: Start and size of each image; the start of special files is -1.
        texts: The label beside each image, or None.
        others: How many other files there are, by ending.
        labels: How many of them hold labels.
        damage: What is wrong with it, or "".
    """

    place: Place
    stream: Any = None
    images: list[str] = field(default_factory=list)
    extents: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    others: "Counter[str]" = field(default_factory=Counter)
    labels: "Counter[str]" = field(default_factory=Counter)
    damage: str = ""

    def keep(self, rows: Sequence[int]) -> None:
        """Only some of the images."""
        self.images = [self.images[row] for row in rows]
        self.extents = [self.extents[row] for row in rows]
        self.texts = [self.texts[row] for row in rows]


def _index(place: Place) -> _Index:
    """What one tar holds. Of two files with one path the last counts, as when a tar is unpacked."""
    index = _Index(place)
    extents: dict[str, tuple[int, int]] = {}
    notes: dict[str, bytes] = {}
    with reading(f"archive '{place}'", REPAIR, error=ImagesError), place.open("rb") as file:
        start = file.read(6)
        file.seek(0)
        index.stream = next((opener for magic, opener in _STREAMS.items() if start.startswith(magic)), None)
        walk = _Walk(file if index.stream is None else index.stream(file))
        for member in walk:
            key = member.name.removeprefix("./")
            if member.isreg() and not member.issparse():
                extents[key] = (member.offset_data, member.size)
                if key.endswith(_BESIDE) and member.size <= _NOTE:
                    notes[key] = walk.read(member)
            elif not member.isdir():
                linked = member.linkname.removeprefix("./") if member.islnk() else ""
                extents[key] = extents.get(linked, (-1, 0))
    index.images, index.others = separate(extents)
    index.extents = [extents[path] for path in index.images]
    labels = _labels_beside(notes)
    index.texts = [labels.get(_key(path)) for path in index.images]
    index.labels = Counter(f".{path.rpartition('.')[2]}" for path in notes)
    index.damage = walk.damage
    if walk.end is not None:
        index.keep([row for row, (start, size) in enumerate(index.extents) if start + size <= walk.end])
    return index


@final
class _Headers:
    """A file of which no more than a header is read at once: one that is forged states any size."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        """That many bytes; ValueError where no header has as many."""
        if size > _HEADER:
            raise ValueError(f"a header of {size} bytes")
        return self._file.read(size)


class _Walk:
    """The members of a tar, one after the other.

    Attributes:
        damage: What was wrong on the way, or "".
        end: Where the file is cut off; None if it is whole.
    """

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.damage = ""
        self.end: int | None = None
        try:
            self._archive: Any = tarfile.TarFile(fileobj=cast("IO[bytes]", _Headers(file)))
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Members in order; after damage, those whose headers are whole again."""
        archive, passed = self._archive, -1
        while True:
            try:
                member = archive.next()
            except (tarfile.TarError, ValueError):
                member = None
            except UNPACKING:  # a compressed tar cannot be read any further
                self._cut(self._file.tell())
                return
            archive.members.clear()  # which would keep every member in memory
            if member is not None and member.offset <= passed:
                self.damage = "a header points backwards; what follows is left out"
                return
            if member is None and self._ended():
                return
            if member is None:
                archive.offset += _BLOCK
            archive.ignore_zeros = member is None  # looks for the next header that is whole
            if member is not None:
                passed = member.offset
                yield member

    def read(self, member: tarfile.TarInfo) -> bytes:
        """The content of a member; empty where the file is cut off."""
        try:
            self._file.seek(member.offset_data)
            return self._file.read(member.size)
        except UNPACKING:
            return b""

    def _ended(self) -> bool:
        """Whether nothing follows where a header should be: the end of the archive, or of the file."""
        try:
            self._file.seek(self._archive.offset)
            block = self._file.read(_BLOCK)
            if len(block) == _BLOCK and any(block):
                self.damage = self.damage or "a header is damaged; its file is left out"
                return False
            if len(block) < _BLOCK and not self._archive.ignore_zeros:
                self._cut(self._file.seek(0, os.SEEK_END) if not block else self._archive.offset)
        except UNPACKING:
            self._cut(self._file.tell())
        return True

    def _cut(self, end: int) -> None:
        self.end = end
        self.damage = "it is cut off: the mark of its end is missing"


def _labels(indexes: Sequence[_Index], what: str) -> list[str] | None:
    """The label beside every image, or None without; where a tar is damaged, images that lost theirs are left out."""
    labelled = any(text for index in indexes for text in index.texts)
    for index in indexes:
        if labelled and index.damage:
            index.keep([row for row, text in enumerate(index.texts) if text])
    _report_damage(indexes, what)
    texts = [text for index in indexes for text in index.texts if text]
    without = [path for index in indexes for path, text in zip(index.images, index.texts, strict=True) if not text]
    if labelled and without:
        count = f"{len(without)} of {len(without) + len(texts)} images have none"
        message = f"{what}: labels beside the images are not used, since {count}: {some(without)}."
        warnings.warn(message, LeftOutFilesWarning, stacklevel=users_level())
    return texts if labelled and not without else None


def _report_damage(indexes: Sequence[_Index], what: str) -> None:
    """Warn of tars that are cut off or damaged; ImagesError where no image is left."""
    broken = [index for index in indexes if index.damage]
    if not broken:
        return
    if not any(index.images for index in indexes):
        raise ImagesError(f"{what} cannot be read ({broken[0].damage}). {REPAIR}")
    listed = "; ".join(f"'{index.place}': {index.damage}, {len(index.images)} images are left" for index in broken[:3])
    count = f"{len(broken)} of {len(indexes)} tar files" if len(indexes) > 1 else "the tar file"
    message = f"{what}: {count} cannot be read as a whole ({listed}). {REPAIR}"
    warnings.warn(message, DamagedArchiveWarning, stacklevel=users_level())


def _labels_beside(notes: dict[str, bytes]) -> dict[str, str]:
    """By key the text of a label in a .cls or .json file."""
    labels = {}
    for path, content in notes.items():
        with_label: Any = content.decode("utf-8", "replace").strip()
        if path.endswith(".json"):
            try:
                entries = json.loads(content)
            except (ValueError, RecursionError):
                continue
            with_label = entries.get("label", entries.get("cls")) if isinstance(entries, dict) else None
        if isinstance(with_label, str | int):
            labels[_key(path)] = str(with_label)
    return labels


def _key(path: str) -> str:
    """The path up to the first dot of the file's name, which files that belong together share."""
    folder, _, file = path.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
