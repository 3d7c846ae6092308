"""How far a loop of active learning has come: one JSON file, replaced in one step after every round; and picks.csv.

It names the loop that it belongs to: strategy and settings, pool, start, count. A loop that differs is refused by its
part. Before the first round only the images to begin with are settled, which people may be labelling: a loop that has
these in the same pool goes on, whatever else differs. Rounds draw from (seed, round) alone, so that a loop that was
killed goes on with the picks it would have made. picks.csv follows from the state: it is written after it, and anew
when a loop goes on, in case that the loop was killed in between. People fill it in; what they wrote stays.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from dubito.active._given import UnlabelledError, ids_of, without_label
from dubito.active.answers import read_answers, write_picks
from dubito.active.labels import add_labels
from dubito.active.result import COLUMNS, Picks, Round
from dubito.errors import ArtefactError
from dubito.storage import write_file
from dubito.table import Table
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


def write_loop(folder: Path, identity: Json, begin: Sequence[str], rounds: list[Round]) -> None:
    """Replace the folder's state and its picks.csv.

    Args:
        folder: Of the loop.
        identity: What tells it from another.
        begin: Images to begin with that have no label: the first lines, chosen in no round and by no uncertainty.
        rounds: That are done.
    """
    told = [
        {"labelled": one.labelled, "accuracy": one.accuracy, "picks": one.picks and one.picks.to_json()}
        for one in rounds
    ]
    path = folder / FILE
    try:
        write_file(path, json.dumps({"identity": identity, "rounds": told}, indent=1).encode())
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be written ({error.strerror}). Use another folder.") from error
    first = [[name, "", "", str(rank)] for rank, name in enumerate(begin, 1)]
    picked = [line for one in rounds if one.picks is not None for line in one.picks.lines()[1:]]
    write_picks(folder / PICKS, [COLUMNS, *first, *picked])


@contextmanager
def telling_where(folder: Path | None) -> Iterator[None]:
    """Let an error about images without labels say in which file they stand."""
    try:
        yield
    except UnlabelledError as error:
        if folder is None:
            raise
        place = folder / PICKS
        raise UnlabelledError(f"{error} They are in {place}: its column label may be filled in.") from error


def read_rounds(folder: Path, identity: Json) -> list[Round]:
    """The rounds that are done; ArtefactError if they are another loop's or cannot be read."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        was, rounds = dict(found["identity"]), [_round(one) for one in found["rounds"]]
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


def _written(folder: Path | None) -> dict[str, str]:
    """The labels that people wrote into picks.csv."""
    return {} if folder is None or not (folder / PICKS).exists() else read_answers(folder / PICKS).labels


def to_begin(pool: Table, begin: Int64[np.ndarray, "s"], folder: Path | None) -> list[str]:
    """The images at the beginning that people must label, or have labelled in picks.csv."""
    open_, written = set(ids_of(pool, without_label(pool, begin))), _written(folder)
    return [name for name in ids_of(pool, begin) if name in open_ or name in written]


def answered(pool: Table, folder: Path | None, classes: Sequence[str] | None) -> Table:
    """The pool with what people wrote into picks.csv, if they did."""
    files = [folder / PICKS] if folder is not None and _written(folder) else []
    return add_labels(pool, *files, classes=classes) if files or classes is not None else pool


def kept(done: list[Round], rounds: int, images: int) -> list[Round]:
    """What was chosen stays; the training at the end of a shorter loop is done again if this one goes on."""
    found = [one for one in done if one.picks is not None][:rounds]
    at_end = done[len(found) :][:1]
    if len(found) == rounds or (at_end and at_end[0].labelled == images):
        found += [replace(one, picks=None) for one in at_end]
    return found


def _round(one: Json) -> Round:
    told = one["picks"]
    if told is None:
        return Round(int(one["labelled"]), one["accuracy"], None)
    u = None if told["u"] is None else np.array(told["u"], dtype=np.float64)
    rows = np.array(told["rows"], dtype=np.int64)
    picks = Picks(rows, list(map(str, told["ids"])), u, int(told["round"]), str(told["strategy"]))
    return Round(int(one["labelled"]), one["accuracy"], picks)
