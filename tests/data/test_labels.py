import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dubito.data.arrays import ArrayImages
from dubito.data.labels import Votes, find_rows, read_csv, read_label_sets, read_votes, to_labels, with_labels
from dubito.errors import ImagesError


def images(*ids: str, **options) -> ArrayImages:
    return ArrayImages(images=np.zeros((len(ids), 2, 2), np.uint8), ids=ids, name="photos", **options)


def csv(folder: Path, text: str) -> Path:
    path = folder / "labels.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "values",
    [[2, 0], np.array([2, 0], np.uint8), torch.tensor([2, 0], dtype=torch.int32), ["2", "0"], (2, 0)],
)
def test_integers_of_every_kind(values):
    labels, classes = to_labels(values, "labels")
    assert (labels.tolist(), labels.dtype, classes) == ([2, 0], torch.int64, None)


def test_names_are_sorted():
    labels, classes = to_labels(["dog", "cat", "dog"], "labels")
    assert (labels.tolist(), classes) == ([1, 0, 1], ("cat", "dog"))


def test_names_are_looked_up_in_known_classes():
    labels, classes = to_labels(["dog", "cat"], "labels", ["dog", "fox", "cat"])
    assert (labels.tolist(), classes) == ([0, 2], ("dog", "fox", "cat"))
    with pytest.raises(
        ImagesError, match=r"labels must be among the 2 class names, 'dog', 'fox'; got 'cat'\. Correct them, or name"
    ):
        to_labels(["dog", "cat"], "labels", ["dog", "fox"])


@pytest.mark.parametrize("bad", [["cat", None, "dog", float("nan")], [0, None, 1, np.nan]])
def test_labels_that_are_missing_are_no_class(bad):
    with pytest.raises(ImagesError, match=r"must not be missing; 2 of 4 are, the first at position 1\. Fill them in"):
        to_labels(bad, "labels")


@pytest.mark.parametrize("bad", [[0.5, 1.0], np.zeros((2, 1), int), torch.zeros(2, 10), [True, False], torch.ones(2)])
def test_values_that_are_no_labels(bad):
    with pytest.raises(
        ImagesError, match=r"labels must be one integer or class name per image; got .*\. Pass class indices"
    ):
        to_labels(bad, "labels")


def test_ragged_values():
    with pytest.raises(ImagesError, match=r"labels must be one integer or class name per image; .*inhomogeneous"):
        to_labels([[1], [1, 2]], "labels")


def test_decimal_texts_are_not_taken_for_names():
    with pytest.raises(
        ImagesError, match=r"labels must be integers or class names; got '1\.0'\. Write the labels as int"
    ):
        to_labels(["0", "1.0", "10.0"], "labels")
    with pytest.raises(ImagesError, match=r"labels must be integers or class names; got ' nan'"):
        to_labels([" nan", "1e3 "], "labels")


def test_empty_texts():
    with pytest.raises(
        ImagesError, match=r"labels must not be empty; 1 of 2 are, the first at position 1\. Fill them in"
    ):
        to_labels(["cat", ""], "labels")


# The layouts of label files that come with ImageNet, DTD and Tiny-ImageNet.
@pytest.mark.parametrize(
    ("text", "ids", "expected"),
    [
        (
            "val_id,label,wnid,name\n1,65,n01,sea_snake\n2,970,n09,alp\n",
            ("00000001.jpg", "00000002.jpg"),
            [65, 970],
        ),
        ("file,texture,label\nb_2.jpg,banded,0\nb_1.jpg,b,3\n", ("b_1.jpg", "b_2.jpg"), [3, 0]),
        ("file,wnid,label\nval_6.JPEG,n014,4\nval_3.JPEG,n01,0\n", ("val_3.JPEG", "val_6.JPEG"), [0, 4]),
        ("val_id,label\nILSVRC2012_val_00000293,5\n", ("val/n01/ILSVRC2012_val_00000293.JPEG",), [5]),
        ("id,label\na/1.jpg,5\nb/1.jpg,6\n", ("b/1.jpg", "a/1.jpg"), [6, 5]),
        ("id,label\nold/place/1.jpg,5\n", ("new/1.jpg",), [5]),
        ("id,label\nv1.5,5\n", ("v1.5.jpg",), [5]),
        ("id,truth\n1.jpg,5\n", ("1.jpg",), [5]),
        ("label,name\n5,1.jpg\n", ("1.jpg",), [5]),
        # An index column, as pandas writes it, must not pass for numbers of images.
        (",file,label\n0,1.jpg,5\n1,0.jpg,6\n", ("0.jpg", "1.jpg"), [6, 5]),
    ],
)
def test_csv_names_images_by_id_file_name_stem_or_number(tmp_path: Path, text, ids, expected):
    labelled = with_labels(images(*ids), csv(tmp_path, text))
    assert labelled.labels is not None
    assert labelled.labels.tolist() == expected
    assert labelled.ids == ids


def test_rows_without_an_image_are_allowed(tmp_path: Path):
    labelled = with_labels(images("b.jpg"), str(csv(tmp_path, "id,label\na.jpg,cat\nb.jpg,dog\n")))
    assert labelled.labels is not None
    # Class names count over the whole file, so that subsets with one file of labels agree.
    assert (labelled.labels.tolist(), labelled.classes) == ([1], ("cat", "dog"))


def test_mapping():
    labelled = with_labels(images("a/1.jpg", "a/2.jpg"), {"2": "cat", "1": "dog"})
    assert labelled.labels is not None
    assert (labelled.labels.tolist(), labelled.classes) == ([1, 0], ("cat", "dog"))
    by_number = with_labels(images("a/1.jpg", "a/2.jpg"), {2: 7, 1: 8})
    assert by_number.labels is not None
    assert by_number.labels.tolist() == [8, 7]


def test_sequence():
    labelled = with_labels(images("a.jpg", "b.jpg"), [4, 2])
    assert labelled.labels is not None
    assert labelled.labels.tolist() == [4, 2]


def test_class_names_of_the_set_stay_only_where_it_had_no_labels():
    assert with_labels(images("a", "b", classes=["x", "y"]), [0, 1]).classes == ["x", "y"]
    assert with_labels(images("a", "b", classes=["x", "y"], labels=[0, 1]), [1, 0]).classes is None


def test_wrong_length():
    with pytest.raises(
        ImagesError,
        match=r"labels must be one per image; got 3 labels for the 2 images of 'photos'\. Pass them in the order",
    ):
        with_labels(images("a", "b"), [0, 1, 2])


def test_images_without_a_label(tmp_path: Path):
    path = csv(tmp_path, "file,label\nx1.jpg,0\nx2.jpg,0\ny.jpg,1\n")
    with pytest.raises(
        ImagesError,
        match=r"labels\.csv' must have a label for each of the 6 images of 'photos'; 4 have none of their own under "
        r"their id, file name, stem or number: 'x3\.jpg', 'x4\.jpg', 'x5\.jpg' and 1 more \(it names 'x1\.jpg', "
        r"'x2\.jpg' and 1 more\)\. Add",
    ):
        with_labels(images(*(f"x{i}.jpg" for i in range(1, 7))), path)


def test_file_names_that_come_twice():
    with pytest.raises(
        ImagesError,
        match=r"labels must distinguish the images of 'photos'; 1 names stand for several images or labels: "
        r"'1\.jpg'\. Use full ids such as 'a/1\.jpg'",
    ):
        with_labels(images("a/1.jpg", "b/1.jpg"), {"1.jpg": 0})


def test_keys_that_collide_once_shortened():
    with pytest.raises(
        ImagesError,
        match=r"labels must distinguish the images of 'photos'; 1 names .*: '1\.jpg'\. Use full ids such as 'a/1",
    ):
        with_labels(images("a/1.jpg"), {"x/1.jpg": 0, "y/1.jpg": 1})


def test_keys_that_collide_without_an_image_do_not_matter():
    labelled = with_labels(images("a/2.jpg"), {"x/1.jpg": 0, "y/1.jpg": 1, "z/2.jpg": 2})
    assert labelled.labels is not None
    assert labelled.labels.tolist() == [2]


def test_csv_with_repeated_names(tmp_path: Path):
    path = csv(tmp_path, "val_id,label\n1,52\n1,53\n2,3\n")
    with pytest.raises(
        ImagesError,
        match=r"must name each image once; in column 'val_id' 1 of 2 names occur more than once: '1'\. Leave one",
    ):
        with_labels(images("1.jpg", "2.jpg"), path)


@pytest.mark.parametrize("header", ["file", "label", "x,file,y", "file,width,height"])
def test_csv_without_labels(tmp_path: Path, header: str):
    columns = ", ".join(f"'{name}'" for name in header.split(","))
    with pytest.raises(
        ImagesError,
        match=rf"must have a column of image names and a column 'label'; its columns are {columns}\. Name the column",
    ):
        with_labels(images("1.jpg"), csv(tmp_path, f"{header}\n{header}\n"))


def test_missing_csv(tmp_path: Path):
    with pytest.raises(ImagesError, match=r"CSV file '.*no\.csv' must be a file; there is none\. Check the path"):
        with_labels(images("1.jpg"), tmp_path / "no.csv")


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "a.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_cells(tmp_path: Path):
    table = read_csv(write(tmp_path, 'Path, Label\r\na.jpg,"cat, big"\r\n\r\nb.jpg, dog \r\n'))
    assert table.header == ("path", "label")
    assert (table.column(0), table.column(1)) == (["a.jpg", "b.jpg"], ["cat, big", "dog"])


@pytest.mark.parametrize(
    ("header", "paths", "label"),
    [
        ("path,label", 0, 1),
        ("label,x", 1, 0),
        ("x,y", 0, 1),
        ("x,id", 1, 0),
        ("x,y,z", 0, None),
        ("x,image,y,label", 1, 3),
        ("x", 0, None),
        ("label", 0, 0),
    ],
)
def test_where_paths_and_labels_stand(tmp_path: Path, header: str, paths: int, label: int | None):
    table = read_csv(write(tmp_path, f"{header}\n{','.join('abcd'[: header.count(',') + 1])}\n"))
    assert (table.paths, table.label) == (paths, label)


def test_byte_order_mark(tmp_path: Path):
    assert read_csv(write(tmp_path, b"\xef\xbb\xbfpath\na.jpg\n")).header == ("path",)


def test_no_rows(tmp_path: Path):
    with pytest.raises(
        ImagesError, match=r"must have a header and at least one row; got 1 lines\. The first line names"
    ):
        read_csv(write(tmp_path, "path,label\n"))


@pytest.mark.parametrize("first", ["cat/1.jpg,cat", "00000293,65"])
def test_no_header(tmp_path: Path, first: str):
    with pytest.raises(
        ImagesError, match=rf"must begin with a header; got '{first.split(',', maxsplit=1)[0]}', which looks"
    ):
        read_csv(write(tmp_path, f"{first}\nx.jpg,dog\n"))


def test_ragged_rows(tmp_path: Path):
    with pytest.raises(
        ImagesError, match=r"must have 2 cells in every row, as its header has; line 4 has 3\. Quote cells"
    ):
        read_csv(write(tmp_path, "path,label\na.jpg,cat\n\nb.jpg,cat,big\n"))


def test_file_names_may_be_any_bytes(tmp_path: Path):
    table = read_csv(write(tmp_path, b"path,label\ncaf\xe9.jpg,1\n"))
    assert os.fsencode(table.column(table.paths)[0]) == b"caf\xe9.jpg"


def test_other_encodings(tmp_path: Path):
    with pytest.raises(ImagesError, match=r"CSV file .* cannot be read \(.*\)\. Save it as text in UTF-8"):
        read_csv(write(tmp_path, b"path,label\n1.jpg,caf\xe9\n"))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_label_sets(tmp_path):
    csv = written(
        tmp_path / "labels.csv", "val_id,label,wnid,name,real_labels\n1,65,n1,sea_snake,\n2,970,n2,alp,970 795\n"
    )
    assert read_label_sets(csv) == {"1": (), "2": (970, 795)}
    assert read_label_sets(str(csv)) == read_label_sets(csv)


def test_votes(tmp_path):
    csv = written(
        tmp_path / "votes.csv",
        "val_id,label,votes_no,votes_maybe,votes_yes,ds_score\n1,52,5,0,0,0.0006\n1,54,4,1,0,0.0041\n7,3,0,1,4,0.9\n",
    )
    assert read_votes(csv) == {"1": {52: Votes(5, 0, 0), 54: Votes(4, 1, 0)}, "7": {3: Votes(0, 1, 4)}}
    assert read_votes(csv)["7"][3].yes == 4


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (read_label_sets, "id,label\n1,2\n", "must have a column 'real_labels'; its columns are 'id', 'label'"),
        (
            read_label_sets,
            "id,real_labels\n1,2\n1,3\n",
            "must name each image once; in column 'id' 1 of 1 names occur more than once: '1'",
        ),
        (read_label_sets, "id,real_labels\n1,2;3\n", "column 'real_labels' .* whole numbers from 0; got '2;3'"),
        (read_votes, "id,label,votes_no,votes_yes\n1,2,0,5\n", "must have a column 'votes_maybe'"),
        (read_votes, "id,label,votes_no,votes_maybe,votes_yes\n1,2,0,-1,5\n", "'votes_maybe' .*; got '-1'"),
        (
            read_votes,
            "id,label,votes_no,votes_maybe,votes_yes\n1,2,0,0,5\n1,2,0,0,5\n",
            "label 2 of image '1' comes twice",
        ),
    ],
)
def test_files_that_are_wrong(tmp_path, reader, text, message):
    with pytest.raises(ImagesError, match=message):
        reader(written(tmp_path / "x.csv", text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ImagesError, match=r"no\.csv' must be a file; there is none\. Check the path"):
        read_votes(tmp_path / "no.csv")
    with pytest.raises(ImagesError, match=r"must be a file; it is a folder\. Check the path"):
        read_votes(tmp_path)


@pytest.mark.parametrize(
    "ids",
    [
        ["1", "2", "30"],
        ["a/1.jpg", "a/2.jpg", "b/30.jpg"],
        ["a/ILSVRC/00000001.JPEG", "00000002.png", "00000030.png"],
    ],
)
def test_rows_by_id_file_stem_or_number(ids):
    # 30 has a row and no key, 5 a key and no row
    assert find_rows(["2", "1", "5"], ids, "votes") == {"1": 0, "2": 1}


def test_file_names_with_endings():
    assert find_rows(["cat.jpg"], ["x/dog.jpg", "y/cat.jpg"], "votes") == {"cat.jpg": 1}


def test_names_that_two_images_share_are_no_match():
    assert find_rows(["cat.jpg", "dog.jpg"], ["x/cat.jpg", "y/cat.jpg", "y/dog.jpg"], "votes") == {"dog.jpg": 2}


def test_no_match_at_all():
    with pytest.raises(
        ImagesError, match=r"votes must name images of the table .* none of the 1 keys \('x'\) is one of"
    ):
        find_rows(["x"], ["a.jpg"], "votes")
