"""The demo's page: every picture is a card, and the means stand above."""

from pathlib import Path

from PIL import Image

from dubito.report.demo import write_demo_page
from dubito.report.demo_job import Demo, Group, Picture


def picture(kind: str, severity: int, u: float, kept: bool) -> Picture:
    scores = {"entropy": u, "max_probability": -0.5, "margin": -0.1, "energy": -3.0}
    return Picture(f"cat/{kind}-{severity}.jpg", "cat", kind, severity, "tabby, tabby cat", 0.5, kept, scores)


def test_page(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "cat").mkdir(parents=True)
    pictures = (picture("blur", 4, 3.0, False), picture("blur", 2, 2.0, True), picture("clean", 0, 1.0, True))
    for one in pictures:
        Image.new("RGB", (20, 20)).save(tmp_path / "pictures" / one.id)
    groups = (Group("clean", 0, 1, 1.0, 1), Group("blur", 2, 1, 2.0, 1), Group("blur", 4, 1, 3.0, 0))
    page = write_demo_page(Demo("timm:tiny", tmp_path, pictures, groups), tmp_path / "demo.html")
    text = page.read_text()
    assert text.count("<article") == 3
    assert text.index("cat, blur 4") < text.index("cat, blur 2") < text.index("cat, clean")
    assert "How sure is tiny, picture by picture?" in text
    assert text.count("answer changed") == 1
    assert "<span>tabby</span> <small>50%</small>" in text
    assert '<th scope="row">blur</th>' in text
    assert "<b>3.00</b> <small>0/1 kept</small>" in text
    assert "Mean entropy: 1.00 on the clean photographs, 2.00 at severity 2, 3.00 at severity 4." in text
