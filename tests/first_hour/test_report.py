"""Which photos are the least trustworthy, and why: one command, and one line of Python."""

import csv
import html
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import dubito
from dubito.cli import main

COUNT = 6


def photos(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def test_one_command_writes_a_page_and_a_csv_of_the_folder(tmp_path, capsys):
    place = photos(tmp_path / "photos")
    arguments = ("report", "timm:test_resnet", place, "--weights", "none", "--to", tmp_path / "report.html", "--top", 2)
    assert main([*map(str, arguments), "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "the 2 least trusted of 6 images, by entropy" in out
    assert (tmp_path / "report.html").as_uri() in out
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    page = html.unescape((tmp_path / "report.html").read_text()).replace("\N{NO-BREAK SPACE}", " ")
    assert len(rows) == page.count("<article") == page.count('src="data:image/jpeg') == COUNT
    ranks = [float(row["rank_percent"]) for row in rows]
    assert ranks == sorted(ranks, reverse=True) == [100, 80, 60, 40, 20, 0]
    places = [page.index(f'alt="{row["id"]}"') for row in [*rows[:2:-1], *rows[:3]]]  # the most certain come first
    assert places == sorted(places)
    assert all(row["verdict"] in page and row["reason"] in page for row in rows)


def test_the_csv_has_a_row_for_every_file_also_for_those_that_cannot_be_decoded(tmp_path, capsys):
    place = photos(tmp_path / "photos")
    for number in range(7):
        (place / f"broken{number}.jpg").write_bytes(b"no image")
    arguments = ("report", "timm:test_resnet", place, "--weights", "none", "--to", tmp_path / "report.html", "--top", 2)
    assert main([*map(str, arguments), "--workers", "0"]) == 0
    assert "7 could not be decoded and have no verdict" in capsys.readouterr().out
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["id"] for row in rows} == {path.name for path in place.iterdir()}
    broken = rows[COUNT:]
    assert [row["id"] for row in broken] == [f"broken{number}.jpg" for number in range(7)]
    for row in broken:
        assert row["id"] in row["reason"]
        assert all(value == "" for key, value in row.items() if key not in ("id", "reason"))


def test_one_line_of_python_returns_the_worst_with_reasons():
    logit = torch.tensor([[9.0, 0.0, 0.0], [1.0, 0.9, -9.0], [0.0, 9.0, 0.0], [0.0, 0.0, 0.1]])
    table = dubito.Table(logit=logit, id=["c", "a", "b", "d"], classes=["tench, Tinca tinca", "eel", "cat"])
    report = dubito.report.least_trusted(table, top=3)
    rows = [(one.id, one.verdict, one.reason) for one in report.images]
    assert rows == [
        ("d", "look at it", "ambiguous between cat (36 %) and tench (32 %)"),
        ("a", "look at it", "ambiguous between tench (52 %) and eel (48 %)"),
        # b and c are equally certain: the id decides.
        ("b", "confident", "99.9 % eel; more certain than 100 % of the other images"),
    ]
    assert [round(row["rank_percent"]) for row in report.records()] == [100, 67, 0]


def test_without_class_names_the_table_has_their_numbers():
    report = dubito.report.least_trusted(dubito.Table(logit=[[0.0, 4.0], [1.0, 0.0]], id=["a.jpg", "b.jpg"]))
    header, first, second = report.lines()
    assert header[2] == "predicted"
    assert (first[2], second[2]) == ("0", "1")


def test_images_unlike_those_of_the_guard_are_a_worry_and_its_guarantee_is_stated_once():
    draw = torch.Generator().manual_seed(0)

    def table(shift: float) -> dubito.Table:
        label = torch.arange(300) % 3
        feature = 3 * torch.eye(3, 8)[label] + torch.randn(300, 8, generator=draw) + shift
        return dubito.Table(feature=feature, logit=2 * feature[:, :3], label=label)

    guard = dubito.Guard.fit(None, table(0.0), risk=0.2)
    guarantee = guard.guarantee.sentence(guard.threshold.of)
    alike, unlike = (dubito.report.model_report(table(shift), guard=guard) for shift in (0.0, 4.0))
    assert "Shift: these images are not like those" not in alike.facts()["What should worry you?"]
    assert "Shift: these images are not like those" in unlike.facts()["What should worry you?"]
    for report in (alike, unlike):
        assert str(report).count(guarantee) == 1
