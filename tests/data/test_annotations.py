"""Label sets and votes from CSV files, and their way to the rows of a table."""

from pathlib import Path

import pytest

from dubito.data.annotations import Votes, find_rows, read_label_sets, read_votes
from dubito.errors import ImagesError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_label_sets(tmp_path):
    csv = write(
        tmp_path / "labels.csv", "val_id,label,wnid,name,real_labels\n1,65,n1,sea_snake,\n2,970,n2,alp,970 795\n"
    )
    assert read_label_sets(csv) == {"1": (), "2": (970, 795)}
    assert read_label_sets(str(csv)) == read_label_sets(csv)


def test_votes(tmp_path):
    csv = write(
        tmp_path / "votes.csv",
        "val_id,label,votes_no,votes_maybe,votes_yes,ds_score\n1,52,5,0,0,0.0006\n1,54,4,1,0,0.0041\n7,3,0,1,4,0.9\n",
    )
    assert read_votes(csv) == {"1": {52: Votes(5, 0, 0), 54: Votes(4, 1, 0)}, "7": {3: Votes(0, 1, 4)}}
    assert read_votes(csv)["7"][3].yes == 4


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (read_label_sets, "id,label\n1,2\n", "must have a column 'real_labels'; its columns are 'id', 'label'"),
        (read_label_sets, "id,real_labels\n1,2\n1,3\n", "must name each image once; '1' comes twice"),
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
        reader(write(tmp_path / "x.csv", text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ImagesError, match="must be readable text"):
        read_votes(tmp_path / "no.csv")


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
