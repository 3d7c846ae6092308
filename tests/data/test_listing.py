from pathlib import Path

import pytest

from dubito.data.listing import open_listing
from dubito.errors import ImagesError

FILES = {"b/1.png": "red", "a/2.png": "lime", "a/3.png": "blue"}


def listing(root: Path, text: str) -> Path:
    path = root / "list.csv"
    path.write_text(text)
    return path


def test_paths_and_class_names_in_the_order_of_the_file(folder):
    path = listing(folder(FILES), "path,label\nb/1.png,dog\na/2.png,cat\n./a/3.png,dog\n")
    images = open_listing(path)
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
    images = open_listing(listing(folder(FILES), text))
    assert images.ids == ["b/1.png", "a/2.png"]
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == ([7, 5], None)


@pytest.mark.parametrize("text", ["path\nb/1.png\n", "path,width,height\nb/1.png,1,2\n"])
def test_without_labels(folder, text: str):
    images = open_listing(listing(folder(FILES), text))
    assert (images.ids, images.labels) == (["b/1.png"], None)


def test_absolute_and_upward_paths(folder):
    root = folder(FILES)
    (root / "lists").mkdir()
    images = open_listing(listing(root / "lists", f"path\n../b/1.png\n{root}/a/2.png\n"))
    assert [images.read(i).getpixel((0, 0)) for i in (0, 1)] == [(255, 0, 0), (0, 255, 0)]


def test_missing_files(folder):
    text = "path,label\nb/1.png,0\n" + "".join(f"gone/{i}.png,0\n" for i in range(5))
    with pytest.raises(
        ImagesError,
        match=r"list\.csv' must list files that are there; 5 of 6 in column 'path' are not: 'gone/0\.png', "
        r"'gone/1\.png', 'gone/2\.png' and 2 more\. Paths are relative to '.*photos'; .* give it as labels=",
    ):
        open_listing(listing(folder(FILES), text))


def test_repeated_files(folder):
    with pytest.raises(ImagesError, match=r"1 of 1 ids come more than once: 'b/1\.png'"):
        open_listing(listing(folder(FILES), "path,label\nb/1.png,0\nb/1.png,1\n"))


def test_empty_labels(folder):
    with pytest.raises(
        ImagesError, match=r"column 'label' of '.*' must not be empty; 1 of 2 are, the first at position 1\."
    ):
        open_listing(listing(folder(FILES), "path,label\nb/1.png,0\na/2.png,\n"))
