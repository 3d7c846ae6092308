import pytest

from dubito.data.tree import class_folders, is_hidden, is_image, no_images
from dubito.errors import ImagesError


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
    found, names = class_folders(ids, "folder")
    assert (None if found is None else found.tolist()) == labels
    assert names == classes


def test_splits_are_not_classes():
    with pytest.raises(
        ImagesError,
        match=r"folder 'd' must hold class folders or images; it holds the splits 'test', 'train'\. Open one",
    ):
        class_folders(["train/cat/1.jpg", "test/cat/2.jpg"], "folder 'd'")


def test_errors_of_a_place_without_images():
    assert str(no_images("folder 'x'", [])) == (
        "folder 'x' must hold images; it is empty. Check the path, or put images there."
    )
    error = str(no_images("folder 'x'", ["a.txt", "b.TXT", "c.csv", "README"]))
    assert "got 4 other files, with endings '.csv', '.txt', 'none'. Check the path" in error
