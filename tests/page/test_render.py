"""Pages are single files: styles and script inside, texts escaped, nothing loaded, and written in one step."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from dubito.errors import ArtefactError
from dubito.page.render import TEMPLATES, minus, render, script_data

VOID = {"meta", "img", "input", "br", "link"}


class Reader(HTMLParser):
    """Every tag with its attributes; every opened tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


RESULTS = {"header": [], "rows": [], "sections": []}


def written(path: Path, template: str = "rejection.html.j2", **values) -> str:
    return render(template, path, **{"title": "a < b", "lead": "", **RESULTS, **values}).read_text(encoding="utf-8")


def test_styles_are_in_the_head_and_the_folder_is_made(tmp_path):
    text = written(tmp_path / "new" / "a.html", findings=["one & two"], facts=["n = 3"])
    head, body = text.split("</head>")
    assert "<title>a &lt; b</title>" in head
    for name in ("page.css", "figures.css"):
        assert (TEMPLATES / name).read_text(encoding="utf-8").strip() in head
    assert "<li>one &amp; two</li>" in body
    assert "<li>n = 3</li>" in body
    assert Reader(text).open == []


def test_a_page_without_a_script_allows_none(tmp_path):
    text = written(tmp_path / "a.html")
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in text
    assert "<script>" not in text


def test_a_script_is_at_the_end_and_may_run(tmp_path):
    values = {"scores": [], "orders": [], "groups": [], "cards": [], "summary": None, "about": {}}
    text = written(tmp_path / "a.html", "cards.html.j2", **values)
    assert "img-src data:; script-src 'unsafe-inline'\"" in text
    script = (TEMPLATES / "cards.js").read_text(encoding="utf-8")
    assert text.rstrip().endswith(f"<script>\n{script}</script>\n</body>\n</html>")


def test_a_missing_value_is_an_error_and_nothing_is_written(tmp_path):
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("rejection.html.j2", tmp_path / "a.html", **RESULTS)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"'a.html' cannot be saved in '.*file' \(.*\). Choose another place"):
        written(tmp_path / "file" / "a.html")


def test_data_cannot_leave_its_script():
    data = script_data({"id": "</script><b>"})
    assert "<" not in data
    assert json.loads(data) == {"id": "</script><b>"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-0.5 [-1, .2]", "\N{MINUS SIGN}0.5 [\N{MINUS SIGN}1, .2]"),
        ("s^-1.25", "s^\N{MINUS SIGN}1.25"),
        ("-cov bucket", "\N{MINUS SIGN}cov bucket"),
        ("AUROC - entropy's", "AUROC \N{MINUS SIGN} entropy's"),
        ("log-sum-exp, 2020-01-31, val-2, -", "log-sum-exp, 2020-01-31, val-2, -"),
    ],
)
def test_numbers_have_real_minus_signs(text, expected):
    assert minus(text) == expected


def test_templates_are_in_the_wheel(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel")
    root = Path(__file__).parents[2]
    builder = hatchling.WheelBuilder(str(root))
    shipped = {file.distribution_path for file in builder.recurse_included_files()}
    names = {path.name for path in TEMPLATES.iterdir()}
    assert {f"dubito/report/templates/{name}" for name in names} <= shipped
    assert len(names) >= 10
