import multiprocessing
import pickle
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest

from dubito.data.archives import ArchiveImages
from dubito.errors import BrokenImageError, ImagesError, LeftOutFilesWarning
from dubito.types import Images

FILES: dict[str, str | bytes] = {"dog/2.png": "red", "cat/1.png": "lime", "cat/0.png": "blue"}
COLOURS = [(0, 0, 255), (0, 255, 0), (255, 0, 0)]


def first_pixels(images: Images) -> list[tuple[int, int, int]]:
    return [images.read(i).getpixel((0, 0)) for i in range(len(images))]


def test_class_folders(archive):
    images = ArchiveImages(archive(FILES))
    assert isinstance(images, Images)
    assert images.ids == ["cat/0.png", "cat/1.png", "dog/2.png"]
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 1]
    assert images.classes == ("cat", "dog")
    assert first_pixels(images) == COLOURS


def test_a_shared_top_folder_is_no_class(archive):
    images = ArchiveImages(archive({f"photos/{path}": colour for path, colour in FILES.items()}))
    assert images.ids[0] == "photos/cat/0.png"
    assert images.classes == ("cat", "dog")
    assert ArchiveImages(archive({"photos/1.png": "red", "photos/2.png": "red"}, "flat.zip")).labels is None


def test_hidden_and_other_files_and_folders_are_passed_over(archive):
    path = archive({"a.png": "red", "__MACOSX/._a.png": b"x", ".b.png": "red", "a.txt": b"x", "dir/": b""})
    with pytest.warns(LeftOutFilesWarning, match=r"archive '.*': left out 1 \.txt, 1 hidden\."):
        assert ArchiveImages(path).ids == ["a.png"]


def test_archive_without_images(archive):
    with pytest.raises(ImagesError, match=r"archive '.*' must hold images .*; got 1 other files, with endings '\.txt'"):
        ArchiveImages(archive({"a.txt": b"x"}))


def test_not_a_zip(tmp_path: Path):
    path = tmp_path / "a.zip"
    path.write_bytes(b"PK but not really")
    with pytest.raises(ImagesError, match=r"archive '.*a\.zip' cannot be read \(.*\)\. Copy"):
        ArchiveImages(path)


def test_cut_off(archive):
    path = archive(FILES)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ImagesError, match=r"cannot be read \(.*\)\. Copy it again, or create it"):
        ArchiveImages(path)


def test_encrypted(archive):
    path = archive({"a.png": "red", "b.png": "red"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag of the first file in the directory
    path.write_bytes(data)
    with pytest.raises(
        ImagesError,
        match=r"must not be encrypted; 1 of 2 files are, such as 'a\.png'\. Unpack it with its password",
    ):
        ArchiveImages(path)


def test_a_damaged_member_is_one_broken_image(archive):
    path = archive({"a.png": "red", "b.png": "red"})
    data = bytearray(path.read_bytes())
    data[data.index(b"IDAT") + 6] ^= 0xFF
    path.write_bytes(data)
    images = ArchiveImages(path)
    with pytest.raises(
        BrokenImageError,
        match=rf"image '{path}/a\.png' must be a whole member of its archive; unpacking gave: Bad CRC-32",
    ):
        images.read(0)
    assert images.read(1).getpixel((0, 0)) == (255, 0, 0)


def test_duplicate_names(tmp_path: Path, archive):
    path = archive({"a.png": "red"})
    with ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("a.png", b"other")
    with pytest.raises(ImagesError, match=r"1 of 1 ids occur more than once: 'a\.png'"):
        ArchiveImages(path)


def test_digest_is_of_contents_not_of_compression_or_place(tmp_path: Path):
    def digest(name: str, method: int, content: bytes, member: str = "a.png") -> str:
        path = tmp_path / name
        with ZipFile(path, "w", method) as file:
            file.writestr(member, content)
        return ArchiveImages(path).digest()

    first = digest("1.zip", ZIP_STORED, b"x" * 100)
    assert digest("2.zip", ZIP_DEFLATED, b"x" * 100) == first
    assert digest("3.zip", ZIP_STORED, b"x" * 99 + b"y") != first
    assert digest("4.zip", ZIP_STORED, b"x" * 100, "b.png") != first


def test_pickling_after_reading(archive):
    images = ArchiveImages(archive(FILES))
    images.read(0)
    copy = pickle.loads(pickle.dumps(images))  # noqa: S301 (our own bytes)
    assert first_pixels(copy) == COLOURS
    assert copy.digest() == images.digest()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_while_the_parent_has_it_open(archive, method: str):
    images = ArchiveImages(archive(FILES))
    images.read(0)
    with multiprocessing.get_context(method).Pool(1) as pool:
        read = pool.map(images.read, range(3))
        assert first_pixels(images) == COLOURS
    assert [image.getpixel((0, 0)) for image in read] == COLOURS


def test_a_forked_child_does_not_move_the_file_position_of_its_parent(archive):
    images = ArchiveImages(archive(FILES))
    images.read(0)
    before = images._opened
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        colours = first_pixels(images)
        queue.put((colours, images._opened is before))

    process = context.Process(target=child)
    process.start()
    assert queue.get(timeout=30) == (COLOURS, False)
    process.join()
    assert images._opened is before


def test_an_archive_that_is_replaced_has_the_hash_of_what_was_read(archive):
    images = ArchiveImages(archive({"a.png": "red"}))
    fresh = ArchiveImages(archive({"a.png": "lime"}))
    image, hashed = images.read_hashed(0)
    assert image.getpixel((0, 0)) == (0, 255, 0)
    assert [hashed] == fresh.contents([0]) != images.contents([0])
