"""How far a loop of active learning has come: one JSON file, replaced in one step after every round.

It names the loop that it belongs to: strategy and settings, pool, start, count. A loop that differs is refused by its
part. Before the first round only the images to begin with are settled, which people may be labelling: a loop that has
these in the same pool goes on, whatever else differs. Rounds draw from (seed, round) alone, so that a loop that was
killed goes on with the picks it would have made.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dubito.apps._csv import write_csv
from dubito.apps.acquire._given import UnlabelledError
from dubito.apps.acquire.result import COLUMNS, Picks, Round
from dubito.cache.shard import write_file
from dubito.errors import ArtefactError
from dubito.types import Json

FILE = "acquisition.json"
PICKS = "picks.csv"
_PARTS = {
    "strategy": "the strategy",
    "settings": "its settings",
    "score": "the score",
    "pool": "the pool",
    "count": "the number of picks a round",
    "start": "the labelled rows at the beginning",
    "trainer": "the trainer",
    "test": "the test images",
}
_PLURAL = ("settings", "start", "test")
_SETTLED = ("pool", "start")
"""What a loop without rounds is known by."""


def write_start(folder: Path, identity: Json, ids: Sequence[str]) -> None:
    """A loop that has not trained yet: the images to begin with, chosen in no round and by no uncertainty."""
    write_csv(folder / PICKS, [COLUMNS, *((name, "", "", rank) for rank, name in enumerate(ids, 1))])
    write_rounds(folder, identity, [])


@contextmanager
def telling_where(folder: Path | None) -> Iterator[None]:
    """Let an error about images without labels say in which file they stand."""
    try:
        yield
    except UnlabelledError as error:
        if folder is None:
            raise
        raise UnlabelledError(f"{error} They are in {folder / PICKS}.") from error


def write_rounds(folder: Path, identity: Json, rounds: list[Round]) -> None:
    """Replace the folder's state."""
    told = [
        {"labelled": one.labelled, "accuracy": one.accuracy, "picks": one.picks and one.picks.to_json()}
        for one in rounds
    ]
    write_file(folder / FILE, json.dumps({"identity": identity, "rounds": told}, indent=1).encode())


def read_rounds(folder: Path, identity: Json) -> list[Round]:
    """The rounds that are done; ArtefactError if they are another loop's or cannot be read."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        was, rounds = found["identity"], [_round(one) for one in found["rounds"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({error}). Delete it to begin anew.") from error
    now = json.loads(json.dumps(identity))
    compared = _PARTS if rounds else _SETTLED
    differing = [part for part in compared if was.get(part) != now.get(part)]
    if differing:
        verb = "differ" if len(differing) > 1 or differing[0] in _PLURAL else "differs"
        raise ArtefactError(
            f"'{folder}' holds another loop: {', '.join(_PARTS[part] for part in differing)} {verb}. Use another "
            f"folder, or delete this one."
        )
    return rounds


def _round(one: Json) -> Round:
    told = one["picks"]
    if told is None:
        return Round(int(one["labelled"]), one["accuracy"], None)
    u = None if told["u"] is None else np.array(told["u"], dtype=np.float64)
    rows = np.array(told["rows"], dtype=np.int64)
    picks = Picks(rows, list(map(str, told["ids"])), u, int(told["round"]), str(told["strategy"]))
    return Round(int(one["labelled"]), one["accuracy"], picks)
