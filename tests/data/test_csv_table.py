import os
from pathlib import Path

import pytest

from dubito.data.csv_table import read_csv
from dubito.errors import ImagesError


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
        ImagesError, match=rf"must begin with a header; got '{first.split(',', maxsplit=1)[0]}', which looks like data"
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
    with pytest.raises(ImagesError, match=r"must be readable text in UTF-8; reading it gave: .*\. Save it as UTF-8"):
        read_csv(write(tmp_path, b"path,label\n1.jpg,caf\xe9\n"))
