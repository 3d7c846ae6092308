"""CSV files, replaced in one step."""

import csv
from pathlib import Path

import pytest

from dubito.errors import ArtefactError
from dubito.storage import write_csv


def test_what_was_written_is_read_back_and_the_folder_is_made(tmp_path: Path) -> None:
    lines = [["id", "u"], ['a "quoted", name', "0.5"], ["two\nlines", "1"]]
    path = write_csv(tmp_path / "deep" / "picks.csv", lines)
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == lines


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "one.csv", [["a"], ["1"], ["2"]])
    write_csv(path, [["b"]])
    assert path.read_text() == "b\n"
    assert [one.name for one in tmp_path.iterdir()] == ["one.csv"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArtefactError, match=r"'picks\.csv' cannot be saved in '.*file' \(.*\)\. Choose another place\."
    ):
        write_csv(tmp_path / "file" / "picks.csv", [])
