"""An HTML file that needs nothing else: its folder, its styles, its script, and what a browser may do with it."""

from pathlib import Path

from dubito.report._document import write_document

CSS, JS = (
    (Path(__file__).parents[2] / "src/dubito/report" / name).read_text(encoding="utf-8")
    for name in ("page.css", "page.js")
)


def test_styles_stand_in_the_head_and_parts_in_the_body(tmp_path):
    path = write_document(tmp_path / "new" / "a.html", "a < b", ["<p>one</p>", "", "<p>two</p>"], styles=("page.css",))
    assert path == tmp_path / "new" / "a.html"
    head, body = path.read_text(encoding="utf-8").split("</head>")
    assert "<title>a &lt; b</title>" in head
    assert f"<style>\n{CSS}</style>" in head
    assert body == "\n<body>\n<p>one</p>\n<p>two</p>\n</body>\n</html>\n"


def test_without_a_script_none_may_run(tmp_path):
    text = write_document(tmp_path / "a.html", "a", [], styles=("page.css",)).read_text(encoding="utf-8")
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in text
    assert "<script>" not in text


def test_a_script_comes_last_and_may_run(tmp_path):
    path = write_document(
        tmp_path / "a.html", "a", ["<p>one</p>"], styles=("page.css", "diagnosis.css"), script="page.js"
    )
    text = path.read_text(encoding="utf-8")
    assert "img-src data:; script-src 'unsafe-inline'" in text
    assert text.endswith(f"<p>one</p>\n<script>\n{JS}</script>\n</body>\n</html>\n")
