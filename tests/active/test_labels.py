"""Labels from CSVs: names, numbers, corrections, and what cannot be one."""

import pytest
import torch

from dubito import Table
from dubito.active import add_labels
from dubito.errors import ArtefactError, DubitoWarning, TableError


def test_corrected_suspects_become_labels(tmp_path):
    table = Table(feature=torch.eye(3), id=list("abc"), label=[0, 1, 1], loss=[0.1, 0.2, 0.3], classes=["x", "y"])
    (tmp_path / "s.csv").write_text("id,label,suggested,sure,u,row\nb,x,x,1.0,0.1,1\nc,-1,x,0.5,0.1,2\n")
    found = add_labels(table, tmp_path / "s.csv")
    assert found.label.tolist() == [0, 0, 1]
    assert "loss" not in found
    assert table.label.tolist() == [0, 1, 1]
    assert "loss" in add_labels(table)


def test_class_names_that_are_numbers_or_shared(tmp_path):
    table = Table(feature=torch.eye(3), id=list("abc"), label_names=["7", "crane", "crane, bird"])
    path = tmp_path / "labels.csv"
    path.write_text("id;label\na;7\nb;2\n")
    assert add_labels(table, path).label.tolist() == [0, 2, -1]
    path.write_text("id;label\na;crane\n")
    assert add_labels(table, path).label.tolist() == [1, -1, -1]
    table.label_names = ["crane, machine", "crane, bird"]
    with pytest.raises(TableError, match=r"got 'crane', which stands for 2 of them, 0, 1\. Correct it"):
        add_labels(table, path)


def test_what_cannot_be_a_label_is_told(tmp_path):
    table, path = Table(feature=torch.eye(3), id=["a", "b", "b"]), tmp_path / "l.csv"

    def told(text: str, **options):
        path.write_text(text)
        return add_labels(table, path, **options)

    with pytest.raises(
        TableError, match=r"the label of 'a' must be a number from 0 on, .*got 'cat'\. Give their names"
    ):
        told("id,label\na,cat\n")
    with pytest.raises(TableError, match=r"must be one of the 1 classes, 'dog', or a number below 1; got '1'\."):
        told("id,label\na,1\n", classes=["dog"])
    with pytest.raises(TableError, match=r"got '1\.5'"):
        told("id,label\na,1.5\n")
    with pytest.raises(TableError, match=r"must have a column label; it has id\. Add one"):
        told("id\na\n")
    with pytest.raises(ArtefactError, match=r"must have a column id; it has name, label\."):
        told("name,label\na,1\n")
    with pytest.raises(ArtefactError, match=r"must have a column id; it has none\."):
        told("")
    with pytest.raises(ArtefactError, match=r"must have 2 cells a line, as its header has; line 2 has 3\. Quote"):
        told("id,label\na,b,1\n")
    with pytest.raises(ArtefactError, match=r"one label; 'a' has '1' and, in line 4, '2'\. Leave one line"):
        told("id,label\na,1\n\na,2\n")
    with pytest.raises(TableError, match=r"'b' stands for 2 rows of table in memory\. Give them ids of their own"):
        told("id,label\nb,1\n")
    with pytest.warns(DubitoWarning, match=r"1 of 2 labelled ids are not in table in memory: '1'\. Spreadsheets may"):
        assert told("id,label\n1,0\na,2\n\n").label.tolist() == [2, -1, -1]
    with pytest.raises(TableError, match="names that differ, at least one; got 'a', 'A'"):
        told("id,label\na,1\n", classes=["a", "A"])
    (tmp_path / "m.csv").write_text("id,label\na,3\n")
    with pytest.raises(TableError, match=r"'a' has 2 in an earlier file and 3 in '.*m\.csv'\. Correct one"):
        add_labels(table, path, tmp_path / "m.csv") if told("id,label\na,2\n") else None
    labelled = table.extended(label=[0, 1, 2])
    with pytest.raises(TableError, match=r"has already, the classes of the model; got 'cat'\. Leave out classes, or"):
        add_labels(labelled, classes=["cat"])
    with pytest.raises(ArtefactError, match=r"cannot be read \(No such file or directory\)"):
        add_labels(table, tmp_path / "nowhere.csv")


def test_a_table_without_ids_goes_by_rows(tmp_path):
    table = Table(feature=torch.eye(3))
    (tmp_path / "l.csv").write_text("ID,Label\n2,5\n")
    assert add_labels(table, tmp_path / "l.csv").label.tolist() == [-1, -1, 5]
