"""A state of a watch with a hash that agrees, but with numbers that no watch writes."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from dubito.errors import ArtefactError
from dubito.guard import Guard
from dubito.guard.watch import Watch

from .world import blobs, named


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard.fit(None, blobs(400), risk=0.2, scores=["entropy"], sets=False)


@pytest.fixture
def state(guard: Guard, tmp_path: Path) -> Path:
    watch = guard.watch(tmp_path / "watch")
    watch.update(guard.decide(named(blobs(30, seed=1).select("feature", "logit"), "new-")))
    watch.request_labels(4)
    return tmp_path / "watch" / "watch.json"


def forge(path: Path, edit) -> None:
    """With a hash that agrees; `write_sealed` itself would refuse NaN."""
    saved = json.loads(path.read_text())
    del saved["digest"]
    edit(saved)
    digest = hashlib.blake2b(json.dumps(saved, sort_keys=True).encode(), digest_size=16).hexdigest()
    path.write_text(json.dumps({**saved, "digest": digest}))


def test_a_state_that_was_written_by_a_watch(guard, state):
    before = Watch.open(guard, state.parent).report().to_dict()
    forge(state, lambda saved: None)
    assert Watch.open(guard, state.parent).report().to_dict() == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda saved: saved.update(images=-1), "images is -1"),
        (lambda saved: saved.update(every=0), "every is 0"),
        (lambda saved: saved.pop("alarms"), "has no 'alarms'"),
        (lambda saved: saved["tests"].pop("classes"), "tests has no 'classes'"),
        (lambda saved: saved["rate"]["capital"]["log_r"].pop(), r"rate\.capital\.log_r is"),
        (lambda saved: saved["tests"]["uncertainty"]["learned"][0].__setitem__(0, 0.0), "has learned is out of range"),
        (lambda saved: saved["tests"]["uncertainty"]["capital"].update(log_total=1e308), "have seen is out of range"),
        (lambda saved: saved["rate"]["capital"].update(log_total=math.nan), r"log_total is nan"),
        (lambda saved: saved["rate"].update(known=1, images=0), "are not those of this guarantee"),
        (lambda saved: saved["rate"].update(bound=0.9), "are not those of this guarantee"),
        (lambda saved: saved["strata"][0].__setitem__(0, 0.0), "strata must have labels"),
        (lambda saved: saved["requests"][0]["names"].__setitem__(0, "another"), "a draw of images to label is not one"),
        (lambda saved: saved["requests"][0].update(largest=0.5), "a draw of images to label is not one"),
        (lambda saved: saved["recent"][0].__setitem__(2, 1 << 40), r"recent\[0\]\[2\] is 1099511627776"),
        (lambda saved: saved["pending"][0][1].update(stratum=99), r"pending\[0\]\[1\]\.stratum is 99"),
    ],
)
def test_a_state_that_no_watch_writes(guard, state, edit, message):
    forge(state, edit)
    with pytest.raises(ArtefactError, match=rf"the watch in '.*watch' cannot be read \(.*{message}.*Delete it"):
        Watch.open(guard, state.parent)
