import os
import pickle
import shutil
from pathlib import Path

import pytest

from dubito.data import Subset
from dubito.data.files import FileImages, class_folders, is_hidden, is_image, only_images, open_folder
from dubito.data.open import open_csv
from dubito.errors import BrokenImageError, ImagesError, LeftOutFilesWarning
from dubito.types import Images


def test_class_folders_sorted_and_nested(folder):
    images = open_folder(folder({"dog/2.png": "red", "cat/deep/1.png": "lime", "cat/0.png": "blue"}))
    assert isinstance(images, Images)
    assert images.ids == ["cat/0.png", "cat/deep/1.png", "dog/2.png"]
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 1]
    assert images.classes == ("cat", "dog")
    assert [images.read(i).getpixel((0, 0)) for i in range(3)] == [(0, 0, 255), (0, 255, 0), (255, 0, 0)]


def test_flat(folder):
    images = open_folder(folder({"b.png": "red", "a.png": "lime"}))
    assert (images.ids, images.labels, images.classes) == (["a.png", "b.png"], None, None)


def test_images_beside_class_folders_mean_no_labels(folder):
    images = open_folder(folder({"cat/1.png": "red", "dog/2.png": "red", "cover.png": "lime"}))
    assert (len(images), images.labels) == (3, None)


def test_hidden_and_other_files_are_passed_over(folder):
    root = folder({"a.png": "red", ".b.png": "red", "__MACOSX/a.png": "red", ".git/a.png": "red", "a.txt": b"x"})
    with pytest.warns(LeftOutFilesWarning, match=r"folder '.*photos': left out 2 hidden, 1 \.txt\."):
        assert open_folder(root).ids == ["a.png"]


def test_links_are_followed_but_not_in_circles(folder):
    root = folder({"cat/1.png": "red", "dog/2.png": "lime"})
    (root / "dog" / "back").symlink_to(root)
    (root / "fox").symlink_to(root / "dog")
    (root / "gone.png").symlink_to(root / "nowhere.png")
    assert open_folder(root).ids == [
        "cat/1.png",
        "dog/2.png",
        "fox/2.png",
        "gone.png",
    ]


def test_empty_folder(tmp_path: Path):
    with pytest.raises(ImagesError, match=r"folder '.*' must hold images \(.*\); it is empty\. Check the path"):
        open_folder(tmp_path)


def test_folder_without_images(folder):
    with pytest.raises(
        ImagesError, match=r"must hold images \(.*\); got 2 other files, with endings '\.csv', '\.txt'\."
    ):
        open_folder(folder({"a.txt": b"x", "deep/b.csv": b"x"}))


def test_a_folder_that_cannot_be_listed(folder, monkeypatch):
    root = folder({"cat/1.png": "red"})
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "cat":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ImagesError, match=r"cannot be read \(.* Permission denied: '.*cat'\)\. Repair"):
        open_folder(root)


def test_a_relative_root_survives_another_working_folder(folder, monkeypatch):
    root = folder({"a.png": "red"})
    monkeypatch.chdir(root.parent)
    images = open_folder(Path(root.name))
    monkeypatch.chdir(root)
    assert images.name == "photos"
    assert images.read(0).getpixel((0, 0)) == (255, 0, 0)


def test_a_broken_file_is_named_with_its_path(folder):
    root = folder({"cat/1.jpg": b"", "dog/1.png": "red"})
    with pytest.raises(BrokenImageError, match=rf"image '{root}/cat/1\.jpg' must be an image file; it has 0 bytes"):
        open_folder(root).read(0)


FILES: dict[str, str | bytes] = {"a.png": "red", "b.png": "lime", "c.png": b"broken"}


def test_digest_knows_contents_names_and_order_but_no_place(folder):
    root = folder(FILES)
    images = open_folder(root)
    digest = images.digest()
    assert len(digest) == 32
    assert open_folder(root).digest() == digest
    assert open_folder(folder(FILES, "copy")).digest() == digest
    assert FileImages(root, images.ids[::-1]).digest() != digest
    assert Subset(images, [2, 1, 0]).digest() == FileImages(root, images.ids[::-1]).digest()
    (root / "c.png").write_bytes(b"brokem")
    assert images.digest() != digest
    (root / "c.png").write_bytes(b"broken")
    assert images.digest() == digest
    (root / "c.png").rename(root / "d.png")
    assert open_folder(root).digest() != digest


def test_digest_of_a_file_larger_than_a_block(folder):
    large = bytes(3 << 20)
    first = open_folder(folder({"a.png": large}, "one")).digest()
    assert open_folder(folder({"a.png": large[:-1] + b"x"}, "two")).digest() != first


def test_digest_of_a_file_that_went_away(folder):
    root = folder(FILES)
    images = open_folder(root)
    before = images.digest()
    (root / "a.png").unlink()
    assert images.digest() != before


def test_pickling_sends_paths_only(folder):
    root = folder({"a.png": os.urandom(100_000), "b.png": "red"})
    images = open_folder(root)
    data = pickle.dumps(images)
    assert len(data) < 1000
    copy = pickle.loads(data)  # noqa: S301 (our own bytes)
    assert (copy.ids, copy.digest()) == (images.ids, images.digest())
    assert copy.read(1).getpixel((0, 0)) == (255, 0, 0)


def test_names_that_are_no_utf8(folder):
    root = folder({"a.png": "red"})
    odd = os.fsencode(root) + b"/caf\xe9.png"
    try:
        shutil.copy(root / "a.png", odd)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    images = open_folder(root)
    assert len(images) == 2
    assert images.read(1).getpixel((0, 0)) == (255, 0, 0)
    assert len(images.digest()) == 32


LISTED = {"b/1.png": "red", "a/2.png": "lime", "a/3.png": "blue"}


def listing(root: Path, text: str) -> Path:
    path = root / "list.csv"
    path.write_text(text)
    return path


def test_paths_and_class_names_in_the_order_of_the_file(folder):
    path = listing(folder(LISTED), "path,label\nb/1.png,dog\na/2.png,cat\n./a/3.png,dog\n")
    images = open_csv(path)
    assert images.name == str(path)
    assert images.ids == ["b/1.png", "a/2.png", "a/3.png"]
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == ([1, 0, 1], ("cat", "dog"))
    assert images.read(0).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "label,FileName\n7,b/1.png\n5,a/2.png\n",
        "x,label,file\n1,7,b/1.png\n2,5,a/2.png\n",
        "picture,truth\nb/1.png,7\na/2.png,5\n",
        "truth,image\n7,b/1.png\n5,a/2.png\n",
    ],
)
def test_where_paths_and_labels_stand(folder, text: str):
    images = open_csv(listing(folder(LISTED), text))
    assert images.ids == ["b/1.png", "a/2.png"]
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == ([7, 5], None)


@pytest.mark.parametrize("text", ["path\nb/1.png\n", "path,width,height\nb/1.png,1,2\n"])
def test_without_labels(folder, text: str):
    images = open_csv(listing(folder(LISTED), text))
    assert (images.ids, images.labels) == (["b/1.png"], None)


def test_absolute_and_upward_paths(folder):
    root = folder(LISTED)
    (root / "lists").mkdir()
    images = open_csv(listing(root / "lists", f"path\n../b/1.png\n{root}/a/2.png\n"))
    assert [images.read(i).getpixel((0, 0)) for i in (0, 1)] == [(255, 0, 0), (0, 255, 0)]


def test_missing_files(folder):
    text = "path,label\nb/1.png,0\n" + "".join(f"gone/{i}.png,0\n" for i in range(5))
    with pytest.raises(
        ImagesError,
        match=r"column 'path' of CSV file '.*list\.csv' must list files that exist; 5 of 6 do not: 'gone/0\.png', "
        r"'gone/1\.png', 'gone/2\.png' and 2 more\. Paths are relative to '.*photos'; .* pass it as labels=",
    ):
        open_csv(listing(folder(LISTED), text))


def test_repeated_files(folder):
    with pytest.raises(ImagesError, match=r"1 of 1 ids occur more than once: 'b/1\.png'"):
        open_csv(listing(folder(LISTED), "path,label\nb/1.png,0\nb/1.png,1\n"))


def test_empty_labels(folder):
    with pytest.raises(
        ImagesError, match=r"column 'label' of '.*' must not be empty; 1 of 2 are, the first at position 1\."
    ):
        open_csv(listing(folder(LISTED), "path,label\nb/1.png,0\na/2.png,\n"))


def test_one_reading_gives_the_image_and_the_hash_that_the_digest_is_made_of(folder, monkeypatch):
    images = open_folder(folder(FILES))
    expected = images.contents(range(3))
    reads = []
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *flags: reads.append(Path(path).name) or opened(path, *flags))
    result = [images.read_hashed(index) for index in range(3)]
    assert [content for _, content in result] == expected
    assert reads == ["a.png", "b.png", "c.png"]
    assert result[0][0].getpixel((0, 0)) == (255, 0, 0)
    assert isinstance(result[2][0], BrokenImageError)
    (images.root / "a.png").unlink()
    gone, content = images.read_hashed(0)
    assert isinstance(gone, BrokenImageError)
    assert [content] == images.contents([0]) != expected[:1]


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "b/c.PnG", "x.tiff", "x.y.webp", "x.jp2", "x.avif", "x.pgm"])
def test_images(name: str):
    assert is_image(name)


@pytest.mark.parametrize("name", ["a.txt", "jpg", "a.jpg.part", "labels.csv", "a"])
def test_other_files(name: str):
    assert not is_image(name)


def test_hidden():
    assert [is_hidden(part) for part in (".git", "._a.jpg", "__MACOSX", "a.b", "_x")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("ids", "labels", "classes"),
    [
        (["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"], [0, 1, 1], ("cat", "dog")),
        (["dog/2.jpg", "cat/deep/down/1.jpg"], [1, 0], ("cat", "dog")),
        (["top/cat/1.jpg", "top/dog/1.jpg"], [0, 1], ("cat", "dog")),
        (["top/next/b/1.jpg", "top/next/a/1.jpg"], [1, 0], ("a", "b")),
        (["cat/1.jpg", "cats/1.jpg"], [0, 1], ("cat", "cats")),
        (["1.jpg", "2.jpg"], None, None),
        (["photos/1.jpg", "photos/2.jpg"], None, None),
        (["1.jpg", "dog/2.jpg"], None, None),
        (["top/1.jpg", "top/dog/2.jpg"], None, None),
        (["cat/1.jpg"], None, None),
    ],
)
def test_class_folders(ids, labels, classes):
    result, names = class_folders(ids, "folder")
    assert (None if result is None else result.tolist()) == labels
    assert names == classes


def test_splits_are_not_classes():
    with pytest.raises(
        ImagesError,
        match=r"folder 'd' must hold class folders or images; it holds the splits 'test', 'train'\. Open one",
    ):
        class_folders(["train/cat/1.jpg", "test/cat/2.jpg"], "folder 'd'")


def test_errors_of_a_place_without_images():
    with pytest.raises(ImagesError, match=r"; got hidden files only\. Check the path"):
        only_images([".a.png"], "folder 'x'")
    with pytest.raises(ImagesError, match=r"folder 'x' must hold images \(.*\); it is empty\. Check the path"):
        only_images([], "folder 'x'")
    with pytest.raises(
        ImagesError, match=r"got 4 other files, with endings '\.csv', '\.txt', 'without an ending'\. Check the path"
    ):
        only_images(["a.txt", "b.TXT", "c.csv", "README"], "folder 'x'")
