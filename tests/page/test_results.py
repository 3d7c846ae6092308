"""Every result is a page: its title, facts, table and sentences, its plot if it has one, and every text escaped."""

import builtins
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import dubito
from dubito.page.render import TEMPLATES
from dubito.result import Result, axes

from .test_render import Reader

EVIL = """<script>alert("x")</script>&'"""


@dataclass
class Numbers(Result):
    rows: int = 2
    titles: ClassVar = {"u": "uncertainty"}

    def title(self) -> str:
        return EVIL

    def facts(self) -> dict[str, str]:
        return {"made by": EVIL}

    def records(self) -> list[dict[str, Any]]:
        return [{"id": EVIL, "u": -0.5}] * self.rows

    def findings(self) -> list[str]:
        return [f"It is {EVIL}."]


@dataclass
class Drawn(Numbers):
    def plot(self, ax: Any = None) -> Any:
        picture = axes(ax)
        picture.plot([0, 1], [0, 1])
        return picture


def test_the_page_has_all_that_the_text_has_and_nothing_runs():
    text = Numbers().to_html()
    read = Reader(text)
    assert read.open == []
    assert not read.all("script")
    assert not read.all("img")
    words = "".join(read.text)
    assert words.count(EVIL) == 6  # twice as a title, a fact, two rows and a finding
    assert "uncertainty" in words
    assert (TEMPLATES / "page.css").read_text(encoding="utf-8").strip() in text


def test_a_path_is_written_and_returned(tmp_path):
    path = Numbers().to_html(tmp_path / "new" / "page.html")
    assert path == tmp_path / "new" / "page.html"
    assert path.read_text(encoding="utf-8") == Numbers().to_html()


def test_long_tables_end_with_what_is_left_out():
    read = Reader(Numbers(rows=1003).to_html())
    assert len(read.all("tr")) == 1 + 1000
    assert "and 3 more" in "".join(read.text)


def test_a_plot_is_a_picture_and_equal_results_give_equal_pages():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = pyplot.get_fignums()
    page = Drawn().to_html()
    (picture,) = Reader(page).all("img")
    assert picture["src"].startswith("data:image/svg+xml;base64,")
    assert picture["alt"] == EVIL
    assert "img-src data:" in page
    assert page == Drawn().to_html()
    assert pyplot.get_fignums() == before  # or a notebook would show the figure, too


def test_without_matplotlib_there_is_no_picture(monkeypatch):
    load = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert not Reader(Drawn().to_html()).all("img")


def test_results_of_the_library():
    draw = torch.Generator().manual_seed(0)
    table = dubito.Table(logit=torch.randn(60, 3, generator=draw), label=torch.arange(60) % 3)
    evaluation = dubito.evaluate(["entropy"], table, resamples=20)
    comparison = dubito.compare(table, resamples=20)
    without_plot = dubito.evaluate(["entropy"], table.select("logit"), resamples=20)  # it has nothing to draw
    guard = dubito.Guard.fit(None, table, coverage=0.5)
    for result in (evaluation, comparison, without_plot, guard, guard.decide(table), dubito.find_label_issues(table)):
        read = Reader(result.to_html())
        assert read.open == []
        assert result.title() in "".join(read.text)
