"""How far a loop of active learning has come: one JSON file, replaced in one step after every round.

It names the loop that it belongs to: strategy and settings, pool, start, count. A loop that differs is refused by its
part. Rounds draw from (seed, round) alone, so that a loop that was killed goes on with the picks it would have made.
"""

import json
from pathlib import Path

import numpy as np

from dubito.apps.acquire.result import Picks, Round
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
    "count": "picks a round",
    "start": "the labelled rows at the beginning",
    "trainer": "the trainer",
    "test": "the test images",
}


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
    differing = [told for part, told in _PARTS.items() if was.get(part) != now.get(part)]
    if differing:
        raise ArtefactError(
            f"'{folder}' holds another loop: {', '.join(differing)} differ. Use another folder, or delete this one."
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
