"""Notes survive, belong to names, and hold nothing but marks, labels and texts."""

import json

import pytest

from dubito.errors import ArtefactError, ValueRangeError
from dubito.explore.notes import Notes


def test_notes_are_on_the_disk_after_every_change(tmp_path):
    notes = Notes(tmp_path)
    notes.change(["a.jpg", "b.jpg"], {"marked": True})
    notes.change(["a.jpg"], {"note": "blurred <b>", "label": "eel"})
    again = Notes(tmp_path)
    assert again.of("a.jpg") == {"marked": True, "label": "eel", "note": "blurred <b>"}
    assert again.of("b.jpg") == {"marked": True, "label": "", "note": ""}
    assert again.of("c.jpg") is None


def test_what_is_empty_again_is_gone(tmp_path):
    notes = Notes(tmp_path)
    notes.change(["a.jpg"], {"marked": True})
    notes.change(["a.jpg"], {"marked": False})
    assert len(notes) == 0
    assert json.loads((tmp_path / "notes.json").read_text()) == {}


@pytest.mark.parametrize(
    "change", [{"marked": 1}, {"note": None}, {"label": ["x"]}, {"other": ""}, {"note": "x" * 10_001}]
)
def test_other_values_are_refused_and_nothing_changes(tmp_path, change):
    notes = Notes(tmp_path)
    with pytest.raises(ValueRangeError):
        notes.change(["a.jpg"], change)
    assert notes.of("a.jpg") is None


def test_a_damaged_file_is_never_overwritten(tmp_path):
    (tmp_path / "notes.json").write_text("{")
    with pytest.raises(ArtefactError, match="Repair the file, or move it away"):
        Notes(tmp_path)
    assert (tmp_path / "notes.json").read_text() == "{"


def test_notes_in_memory(tmp_path):
    notes = Notes(None)
    notes.change(["a.jpg"], {"marked": True})
    assert dict(notes.items()) == {"a.jpg": {"marked": True, "label": "", "note": ""}}
