"""What a notebook shows: tables, verdicts with their pictures, maps and progress bars; and every object in one line."""

import sys
from types import ModuleType

import numpy as np
import pytest
import rich.console
import torch
from PIL import Image
from torch import nn

import dubito

EVIL = '<img src=x onerror="alert(1)">.png'


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4), nn.ReLU(), nn.Linear(4, 3))
    return dubito.wrap(net, transform=dubito.Preprocess((8, 8)), classes=["ant", "bee", EVIL], name="tiny")


@pytest.fixture(scope="module")
def table(model):
    generator = torch.Generator().manual_seed(0)
    feature = torch.randn(200, 4, generator=generator)
    model.features(torch.zeros(1, 3, 8, 8))
    logit = 9 * model.logits(feature).detach()
    names = [f"{EVIL}{number}" for number in range(200)]
    return dubito.Table(feature=feature, logit=logit, label=logit.argmax(1), id=names, classes=model.classes)


@pytest.fixture(scope="module")
def guard(model, table):
    return dubito.Guard.fit(model, table, risk=0.1)


def test_names_of_files_and_classes_stay_text(table, guard):
    shown = [table, guard, guard(table), guard(table)[0], dubito.report.least_trusted(table)]
    shown += [dubito.draw_map(table.rows(range(12)), dubito.Entropy())]
    for one in shown:
        html = one._repr_html_()
        assert len(html) > 100
        assert "<img src=x" not in html


def test_a_verdict_has_its_picture(guard, tmp_path):
    Image.fromarray(np.full((9, 9, 3), 90, np.uint8)).save(tmp_path / "a.png")
    assert guard(tmp_path / "a.png")._repr_html_().count('<img src="data:image/jpeg') == 1
    assert guard(tmp_path)._repr_html_().count('<img src="data:image/jpeg') == 1


def test_a_map_is_a_frame_of_its_own(table):
    html = dubito.draw_map(table.rows(range(12)), dubito.Entropy())._repr_html_()
    assert html.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;')


def test_everything_is_shown_in_one_short_line(model, table, guard):
    shown = [model, table, guard, guard(table), guard(table)[0], dubito.open_images(np.zeros((2, 8, 8, 3), np.uint8))]
    shown += [dubito.evaluate({"entropy": dubito.Entropy()}, table, resamples=2), dubito.report.least_trusted(table)]
    for one in shown:
        assert "\n" not in repr(one)
        assert len(repr(one)) < 250


def test_progress_bars_are_shown_without_ipywidgets(model, monkeypatch, recwarn, tmp_path):
    bars = []

    class Handle:
        def update(self, bar):
            bars.append(bar._repr_mimebundle_([], [])["text/html"])

    fake = ModuleType("IPython.display")
    fake.display = lambda bar, display_id: Handle()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    dubito.extract(model, np.zeros((3, 8, 8, 3), np.uint8), to=tmp_path, workers=0)
    assert "3/3" in bars[-1]
    assert not [one for one in recwarn if "ipywidgets" in str(one.message)]
