"""`dubito acquire` and `dubito label-issues`: picks and label issues as text, JSON and CSV."""

import csv
from pathlib import Path

import dubito
from dubito.active import LinearTrainer, add_labels

from .conftest import Run


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_picks_are_those_of_the_library_and_are_not_chosen_again(run: Run, cache: Path, tmp_path: Path) -> None:
    first = run("acquire", cache, "--count", 4, "--to", tmp_path / "a.csv", "--json").json
    table = dubito.open(cache)
    assert first["rows"] == dubito.Acquire().pick(table, 4).rows.tolist()
    assert [row["id"] for row in read(tmp_path / "a.csv")] == first["ids"]
    options = ("--labelled", tmp_path / "a.csv", "--round", 1, "--strategy", "core_set", "--json")
    second = run("acquire", cache, "--count", 4, *options).json
    assert not set(second["rows"]) & set(first["rows"])
    assert second["round"] == 1


def test_a_score_and_a_strategy_are_shown(run: Run, cache: Path) -> None:
    answer = run("acquire", cache, "-n", 3, "-s", "energy", "--strategy", "softrank")
    assert answer.code == 0, answer.err
    assert "3 images to label, by softrank" in answer.out
    assert "rank" in answer.out


def test_errors(run: Run, cache: Path, tmp_path: Path) -> None:
    answer = run("acquire", cache, "--strategy", "bald")
    assert answer.code == 1
    assert "needs column 'members'" in answer.err
    (tmp_path / "x.csv").write_text("name\n1\n")
    answer = run("acquire", cache, "--labelled", tmp_path / "x.csv")
    assert "must have a column id; it has name." in answer.err
    (tmp_path / "x.csv").write_bytes(b"id\n\xff\n")
    assert "must be a CSV in UTF-8" in run("acquire", cache, "--labelled", tmp_path / "x.csv").err
    answer = run("acquire", cache, "--labelled", tmp_path / "nope.csv")
    assert f"'{tmp_path / 'nope.csv'}' cannot be read ([Errno 2] No such file or directory" in answer.err
    assert "requires uncertainties that are not negative" in run("acquire", cache, "-s", "energy").err
    assert (
        "--set and --learn-from belong to a score, and none is named"
        in run("acquire", cache, "--set", "scaled_entropy.scale=2").err
    )
    assert "takes no score; got energy" in run("acquire", cache, "-s", "energy", "--strategy", "bald").err
    assert run("acquire", cache, "--strategy", "best").code == 2


def test_labelled_images_may_come_from_a_spreadsheet(run: Run, cache: Path, tmp_path: Path) -> None:
    first = run("acquire", cache, "--count", 2, "--json").json
    (tmp_path / "done.csv").write_text("id,who\n" + "".join(f'"{name}",me\n' for name in first["ids"]), "utf-8-sig")
    second = run("acquire", cache, "--count", 2, "--labelled", tmp_path / "done.csv", "--json").json
    assert not set(first["ids"]) & set(second["ids"])


def fill(path: Path, labels: list[str]) -> None:
    """As a spreadsheet saves it where the comma is the decimal point."""
    rows = read(path)
    for row, label in zip(rows, labels, strict=True):
        row["label"] = label
    text = "".join(";".join(cells) + "\r\n" for cells in [rows[0].keys(), *(row.values() for row in rows)])
    path.write_text(text, encoding="utf-8-sig", newline="")


def test_labels_that_people_wrote_are_learned_from(run: Run, cache: Path, tmp_path: Path) -> None:
    picks = tmp_path / "picks.csv"
    first = run("acquire", cache, "--count", 4, "--to", picks, "--json").json
    train = ("acquire", cache, "--count", 2, "--labelled", picks, "--linear")
    assert "--linear needs --labelled FILE with labels in its column label; there are none." in run(*train).err
    fill(picks, ["cat", "dog", "", "cat"])
    for strategy in ("top", "batch_bald"):
        second = run(*train, "--classes", "dog, cat", "--strategy", strategy, "--json").json
        assert not set(second["ids"]) & set(first["ids"])
    table = dubito.open(cache)
    pool = add_labels(table.select("id", "feature"), picks, classes=["dog", "cat"])
    rows = (pool.label >= 0).nonzero()[:, 0]
    assert pool.label[rows].tolist().count(1) == 2
    expected = dubito.Acquire("top").pick(LinearTrainer()(pool, rows).extend(pool), 2, labelled=first["rows"])
    assert run(*train, "--classes", "dog,cat", "--strategy", "top", "--json").json["rows"] == expected.rows.tolist()
    assert "must be one of the 2 classes, 'cow', 'dog', or a number" in run(*train, "--classes", "cow,dog").err


def test_picks_with_labels_are_not_overwritten(run: Run, cache: Path, tmp_path: Path) -> None:
    picks = tmp_path / "picks.csv"
    run("acquire", cache, "--count", 2, "--to", picks)
    fill(picks, ["1", "2"])
    before = picks.read_bytes()
    answer = run("acquire", cache, "--count", 2, "--labelled", picks, "--to", picks)
    assert answer.code == 1
    assert "has labels of 2 images that are not among these picks" in answer.err
    assert picks.read_bytes() == before
    assert "--classes belongs to --linear" in run("acquire", cache, "--classes", "a,b").err


def test_ids_of_other_images_are_noted(run: Run, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id\nnobody.jpg\n")
    answer = run("acquire", cache, "--count", 2, "--labelled", tmp_path / "x.csv", "--json")
    assert answer.json["notes"] == [f"--labelled: 1 of 1 ids are not in {cache}."]


def test_label_issues(run: Run, labelled: Path, tmp_path: Path) -> None:
    options = ("--least", 0.01, "--cross-validate")
    result = run("label-issues", labelled, *options, "--to", tmp_path / "s.csv", "--json").json
    expected = dubito.find_label_issues(dubito.open(labelled), least=0.01, cross_validate=True)
    assert [row["id"] for row in result["issues"]] == expected.ids
    assert [row["id"] for row in read(tmp_path / "s.csv")] == expected.ids
    split = run("label-issues", labelled, *options, "--folds", 3, "--seed", 2, "--json").json
    other = dubito.find_label_issues(dubito.open(labelled), least=0.01, cross_validate=True, folds=3, seed=2)
    assert [row["probability"] for row in split["issues"]] == other.probability.tolist()
    assert other.probability.tolist() != expected.probability.tolist()
    assert "--folds must be" in run("label-issues", labelled, *options, "--folds", 13).err
    shown = run("label-issues", labelled, "--no-cross-validate").out
    assert "no label is shown to be wrong, of 12 images; most suspicious: 1" in shown
    assert "The model's predictions agree with " in shown
