"""Labels from CSVs that people fill in: as spreadsheets save them, names, numbers and corrections, and never lost."""

import csv
import os
from pathlib import Path

import pytest
import torch

from dubito import Acquire, Table
from dubito.active import add_labels
from dubito.active.labels import read_labels, write_picks
from dubito.errors import ArtefactError, DubitoWarning, TableError

pytestmark = pytest.mark.usefixtures("one_thread")


def pool(n: int = 60, **more) -> Table:
    draw = torch.Generator().manual_seed(0)
    label = torch.arange(n) % 3
    feature = 2 * torch.eye(3, 6)[label] + torch.randn(n, 6, generator=draw)
    return Table(feature=feature, logit=feature[:, :3], id=[f"bär, {i}.jpg" for i in range(n)], **more)


def fill(path: Path, answer, *, delimiter: str = ",", newline: str = "\n", encoding: str = "utf-8") -> None:
    """As a person does in a spreadsheet, with a column of notes."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file, delimiter=next(one for one in ",;\t" if f"id{one}" in path.read_text())))
    for line in lines:
        line["label"], line["Note"] = line["label"] or answer(line["id"]), line.get("note") or "seen"
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(
            file,
            [key for key in lines[0] if key != "note"],
            delimiter=delimiter,
            lineterminator=newline,
            extrasaction="ignore",
        )
        writer.writeheader()
        writer.writerows(lines)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"newline": "\r\n", "encoding": "utf-8-sig"},
        {"delimiter": ";", "newline": "\r\n", "encoding": "utf-8-sig"},
        {"delimiter": "\t", "newline": "\r"},
    ],
    ids=["plain", "excel", "semicolons", "tabs"],
)
@pytest.mark.parametrize("answers", [["0", "1", "2"], ["0.0", "1.0", "2.0"], ["Cat", "dog ", "Horse_fly"]])
def test_a_loop_goes_on_with_what_people_wrote_into_its_picks(tmp_path, saved, answers):
    table = pool(classes=["cat, tom", "dog", "horse fly"])
    options = {"rounds": 2, "count": 4, "start": 9, "to": tmp_path}
    for waiting in ("9 of 9", "4 of 13", "4 of 17"):
        with pytest.raises(TableError, match=f"{waiting} rows of table in memory have no label yet"):
            Acquire("power").run(table, **options)
        fill(tmp_path / "picks.csv", lambda name: answers[int(name[5:-4]) % 3], **saved)
    result = Acquire("power").run(table, **options)
    whole = Acquire("power").run(table.extended(label=torch.arange(60) % 3), **options | {"to": None})
    assert result.to_dict() == whole.to_dict()
    # Nothing of what people wrote is gone, of the first images neither.
    lines = read_labels(tmp_path / "picks.csv").lines
    assert len(lines) == 17
    assert {cells["note"] for cells in lines.values()} == {"seen"}


def test_classes_of_ones_own_are_named(tmp_path):
    """A pool of an ImageNet model, whose people tell cats from dogs."""
    table = pool(classes=[f"class {i}" for i in range(3)])
    options = {"rounds": 1, "count": 4, "start": 9, "to": tmp_path, "classes": ["dog", "cat"]}
    with pytest.raises(TableError, match="9 of 9"):
        Acquire("power").run(table, **options)
    fill(tmp_path / "picks.csv", lambda name: "cat" if int(name[5:-4]) % 3 else "dog")
    with pytest.raises(
        TableError, match=r"must be one of the 3 classes, 'class 0', .*got '(cat|dog)'\. Correct it, or"
    ):
        Acquire("power").run(table, **{**options, "classes": None})
    seen = []

    def trainer(pool, rows):
        seen.append((pool.label[rows].tolist(), pool.label_space, pool.label_names))
        return pool

    with pytest.raises(TableError, match="4 of 13"):
        Acquire("power").run(table, **options, trainer=trainer)
    labels, space, names = seen[0]
    assert set(labels) == {0, 1}
    assert (space, names) == ("own", ["dog", "cat"])


def test_labels_may_move_from_the_picks_to_the_pool(tmp_path):
    options = {"rounds": 1, "count": 4, "start": 9, "to": tmp_path}
    with pytest.raises(TableError, match="9 of 9"):
        Acquire().run(pool(), **options)
    fill(tmp_path / "picks.csv", lambda name: str(int(name[5:-4]) % 3))
    whole = pool(label=torch.arange(60) % 3)
    assert len(Acquire().run(whole, **options).labelled) == 13
    assert len(read_labels(tmp_path / "picks.csv").lines) == 13


def test_picks_that_a_kill_kept_from_the_disk_are_written_when_the_loop_goes_on(tmp_path):
    table = pool(label=torch.where(torch.arange(60) < 9, torch.arange(60) % 3, -1))
    options = {"rounds": 1, "count": 4, "start": range(9), "to": tmp_path}
    for _ in range(2):
        with pytest.raises(TableError, match="4 of 13"):
            Acquire().run(table, **options)
        assert len(read_labels(tmp_path / "picks.csv").lines) == 4
        (tmp_path / "picks.csv").unlink()


def test_picks_with_labels_are_not_replaced_by_others(tmp_path):
    path = Acquire("top").pick(pool(), 3).to_csv(tmp_path / "picks.csv")
    fill(path, lambda name: "1")
    before = path.read_bytes()
    with pytest.raises(
        ArtefactError, match=r"has labels of 3 images that are not among these picks: 'bär, .*or move it"
    ):
        Acquire("random").pick(pool(), 3).to_csv(path)
    assert path.read_bytes() == before
    Acquire("top").pick(pool(), 4).to_csv(path)
    assert [cells["label"] for cells in read_labels(path).lines.values()] == ["1", "1", "1", ""]
    path.write_bytes("id,label\nbär,1\n".encode("latin-1"))
    with pytest.raises(ArtefactError, match="Save it as 'CSV UTF-8'"):
        Acquire("top").pick(pool(), 4).to_csv(path)
    path.write_text("another,file\n1,2\n")
    assert (
        write_picks(path, [{"id": "a", "round": 0, "u": None, "rank": 1}]).read_text()
        == "id,round,u,rank,label\na,0,,1,\n"
    )


def test_names_that_are_not_utf_8_come_back_from_picks(tmp_path):
    names = [os.fsdecode(b"b\xe4r %d.jpg" % row) for row in range(20)]
    table, options = pool(20).extended(id=names), {"rounds": 1, "count": 4, "start": 6, "to": tmp_path}
    for waiting in ("6 of 6", "4 of 10"):
        with pytest.raises(TableError, match=f"{waiting} rows of table in memory have no label yet"):
            Acquire("top").run(table, **options)
        lines = (tmp_path / "picks.csv").read_bytes().splitlines()
        assert all(line.startswith(b"b\xe4r ") for line in lines[1:])
        filled = [line if not line.endswith(b",") else line + b"1" for line in lines[1:]]
        (tmp_path / "picks.csv").write_bytes(b"\n".join([lines[0], *filled]))
    done = Acquire("top").run(table, **options)
    assert [names[row] for row in done.labelled] == list(read_labels(tmp_path / "picks.csv").labels)
    (tmp_path / "other.csv").write_bytes("id,label\nbär 1.jpg,Bär\n".encode("latin-1"))
    with pytest.raises(ArtefactError, match=r"cannot be read .* must be a CSV in UTF-8 .*: save it as 'CSV UTF-8'"):
        add_labels(table, tmp_path / "other.csv")


def test_a_folder_is_left_alone_when_its_picks_cannot_be_read(tmp_path):
    table, options = pool(), {"rounds": 1, "count": 4, "start": 9, "to": tmp_path}
    with pytest.raises(TableError, match="9 of 9"):
        Acquire().run(table, **options)
    (tmp_path / "picks.csv").write_bytes("id,label\nbär,1\n".encode("latin-1"))
    with pytest.raises(
        ArtefactError, match=r"must be a CSV in UTF-8, but for the names of images; .* Save it as 'CSV UTF-8'"
    ):
        Acquire().run(table, **options)
    assert (tmp_path / "picks.csv").read_bytes() == "id,label\nbär,1\n".encode("latin-1")


def test_corrected_issues_become_labels(tmp_path):
    table = Table(feature=torch.eye(3), id=list("abc"), label=[0, 1, 1], loss=[0.1, 0.2, 0.3], classes=["x", "y"])
    (tmp_path / "s.csv").write_text("id,label,suggested,margin,u,row\nb,x,x,1.0,0.1,1\nc,-1,x,0.5,0.1,2\n")
    result = add_labels(table, tmp_path / "s.csv")
    assert result.label.tolist() == [0, 0, 1]
    assert "loss" not in result
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
    with pytest.raises(TableError, match=r"got 'crane', which names 2 of them, 0, 1\. Correct it"):
        add_labels(table, path)


def test_what_cannot_be_a_label_is_reported(tmp_path):
    table, path = Table(feature=torch.eye(3), id=["a", "b", "b"]), tmp_path / "l.csv"

    def message(text: str, **options):
        path.write_text(text)
        return add_labels(table, path, **options)

    with pytest.raises(
        TableError, match=r"the label of 'a' must be a number from 0 on, .*got 'cat'\. Correct it, or name"
    ):
        message("id,label\na,cat\n")
    with pytest.raises(TableError, match=r"must be one of the 1 classes, 'dog', or a number below 1; got '1'\."):
        message("id,label\na,1\n", classes=["dog"])
    with pytest.raises(TableError, match=r"got '1\.5'"):
        message("id,label\na,1.5\n")
    with pytest.raises(TableError, match=r"must have a column label; it has id\. Add one"):
        message("id\na\n")
    with pytest.raises(ArtefactError, match=r"must have a column id; it has name, label\."):
        message("name,label\na,1\n")
    with pytest.raises(ArtefactError, match=r"must have a column id; it has none\."):
        message("")
    with pytest.raises(
        ArtefactError, match=r"must have 2 cells per line, as its header has; line 2, of 'a', has 3\. Quote"
    ):
        message("id,label\na,b,1\n")
    with pytest.raises(ArtefactError, match=r"one label per image; 'a' has '1' and, in line 4, '2'\. Keep one"):
        message("id,label\na,1\n\na,2\n")
    with pytest.raises(TableError, match=r"'b' names 2 of table in memory\. Make ids unique"):
        message("id,label\nb,1\n")
    with pytest.warns(DubitoWarning, match=r"1 of 2 labelled ids are not in table in memory: '1'\. Spreadsheets may"):
        assert message("id,label\n1,0\na,2\n\n").label.tolist() == [2, -1, -1]
    with pytest.raises(TableError, match="at least one name, all different; got 'a', 'A'"):
        message("id,label\na,1\n", classes=["a", "A"])
    (tmp_path / "m.csv").write_text("id,label\na,3\n")
    with pytest.raises(TableError, match=r"'a' has 2 in an earlier file and 3 in '.*m\.csv'\. Correct one"):
        add_labels(table, path, tmp_path / "m.csv") if message("id,label\na,2\n") else None
    labelled = table.extended(label=[0, 1, 2])
    with pytest.raises(TableError, match=r"has already, the classes of the model; got 'cat'\. Leave out classes, or"):
        add_labels(labelled, classes=["cat"])
    with pytest.raises(ArtefactError, match=r"cannot be read \(.*No such file or directory.*\)"):
        add_labels(table, tmp_path / "nowhere.csv")


def test_a_table_without_ids_goes_by_rows(tmp_path):
    table = Table(feature=torch.eye(3))
    (tmp_path / "l.csv").write_text("ID,Label\n2,5\n")
    assert add_labels(table, tmp_path / "l.csv").label.tolist() == [-1, -1, 5]


@pytest.mark.parametrize("columns", ["id,label", "path,label", "file_name,class", "target,image"])
def test_columns_have_the_names_of_all_files_of_labels(tmp_path, columns):
    cells = "a.jpg,1" if columns != "target,image" else "1,a.jpg"
    (tmp_path / "labels.csv").write_text(f"{columns}\n{cells}\n")
    assert read_labels(tmp_path / "labels.csv").labels == {"a.jpg": "1"}
