"""The parts of `Acquire.run`: what a trainer returns, and the state of a loop, which people's labels and kills survive.

acquisition.json is replaced in one step after every round. It names the loop that it belongs to: strategy and settings,
pool, start, count; another loop is refused, and the error says what differs. Before the first round only the images to
begin with are fixed, which people may be labelling: a loop that has these in the same pool continues, whatever else
differs. Every round draws from (seed, round) alone, so a loop that was killed continues with the picks it would have
made. picks.csv follows from the state: it is written after it, and again when a loop continues, in case the loop was
killed in between. People fill it in; what they wrote stays.
"""

import hashlib
import json
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

from dubito.active.labels import UnlabelledError, add_labels, read_labels, without_label, write_picks
from dubito.active.picks import COLUMNS, Round, pick_lines
from dubito.errors import ArtefactError, TableError
from dubito.metrics import Array
from dubito.result import plain
from dubito.storage import encode, write_json, writing
from dubito.table import Table, to_tensor
from dubito.types import Json, Score

STATE = "acquisition.json"
PICKS = "picks.csv"
_PARTS = {
    "strategy": "the strategy",
    "settings": "its settings",
    "score": "the score",
    "pool": "the pool",
    "count": "the number of picks per round",
    "start": "the labelled rows at the beginning",
    "trainer": "the trainer",
    "test": "the test images",
}
_PLURAL = ("settings", "start", "test")
_FIXED = ("pool", "start")
"""The parts that identify a loop without rounds."""


@runtime_checkable
class Extends(Protocol):
    """What a trainer may return: something that adds columns to any table, as `LinearHeads` and `HeadMasks` do."""

    def extend(self, table: Table) -> Table:
        """The table with the predictions of what was learned."""
        ...


def read_trained(trained: Any, pool: Table) -> tuple[Table, Score | None, Array | None]:
    """The output of a trainer as the table to choose from, and the score or the uncertainties to choose by, if any."""
    if isinstance(trained, Score):
        return pool, trained, None
    if _extends(trained):
        trained = _extended(trained, pool)
    if isinstance(trained, Table):
        return _of_pool(trained, pool), None, None
    try:
        u = to_tensor(trained, "uncertainties")
    except TableError:
        u = torch.empty(0, 0)
    if u.shape != (len(pool),):
        kind = "None" if trained is None else type(trained).__name__
        shape = f" of shape {tuple(u.shape)}" if u.numel() else ""
        raise TableError(
            f"acquire: the trainer must return a Score, uncertainties ({len(pool)},), a table or something with "
            f"extend(table); got {kind}{shape}. End it with return, such as: return pool.extended(logit=...)."
        )
    return pool, None, u


def _extends(trained: Any) -> TypeGuard[Extends]:
    """Whether it adds columns to tables; a list of numbers has an extend of its own."""
    return isinstance(trained, Extends) and not isinstance(trained, MutableSequence)


def _extended(trained: Extends, table: Table) -> Table:
    extended: Any = trained.extend(table)
    if not isinstance(extended, Table):
        raise TableError(
            f"acquire: extend(table) of {type(trained).__name__}, which the trainer returned, must return a table; "
            f"got {type(extended).__name__}. End it with: return table.extended(logit=...)."
        )
    return extended


def _of_pool(table: Table, pool: Table) -> Table:
    """The table of a trainer, if it has the images of the pool."""
    if len(table) != len(pool):
        differing = str(len(table))
    elif "id" in table and "id" in pool and not np.array_equal(table.id, pool.id):
        differing = "as many with other ids, or in another order"
    else:
        return table
    raise TableError(
        f"acquire: the trainer must return a table of the pool's {len(pool)} rows; got {differing}. "
        f"Add columns to the pool: pool.extended(logit=...)."
    )


def accuracy_of(trained: Any, test: Table | None) -> float | None:
    """The accuracy on a test table, if there is one and what was trained extends tables."""
    if test is None or not _extends(trained):
        return None
    table = _extended(trained, test)
    table.require("logit", "label", by="acquire: the accuracy on test images")
    right = sum(int((batch.logit.argmax(1) == batch.label).sum()) for batch in table.batches("logit", "label"))
    return right / len(test) if len(test) else None


def identity_of(table: Table) -> Json:
    """Which images a table has, independent of its place on the disk."""
    state = hashlib.blake2b(digest_size=16)
    if "id" in table:
        state.update(encode("\n".join(map(str, table.id))))
    if "feature" in table and len(table):
        state.update(table.select("feature").rows(slice(0, 8)).feature.numpy().tobytes())
    return {"rows": len(table), "model_id": table.model_id, "digest": state.hexdigest()}


def trainer_name(trainer: Any) -> str:
    """The name of a trainer, which is all that identifies it."""
    return str(getattr(trainer, "__qualname__", type(trainer).__qualname__))


def write_loop(folder: Path, identity: Json, begin: Sequence[str], rounds: list[Round]) -> None:
    """Replace the state of a folder and its picks.csv.

    Args:
        folder: The folder of the loop.
        identity: What identifies the loop.
        begin: Images to begin with that have no label: the first lines, without round and uncertainty.
        rounds: The finished rounds.
    """
    with writing(STATE, folder):
        write_json(folder / STATE, {"identity": identity, "rounds": plain(rounds)})
    first = [[name, "", "", rank] for rank, name in enumerate(begin, 1)]
    write_picks(folder / PICKS, [COLUMNS, *first, *pick_lines(rounds)])


@contextmanager
def naming_file(folder: Path | None) -> Iterator[None]:
    """Add to an error about images without labels the file that lists them."""
    try:
        yield
    except UnlabelledError as error:
        if folder is None:
            raise
        raise UnlabelledError(f"{error} They are in {folder / PICKS}: fill in its column label.") from error


def read_rounds(folder: Path, identity: Json) -> list[Round]:
    """The finished rounds; ArtefactError if they are another loop's or cannot be read."""
    path = folder / STATE
    if not path.exists():
        return []
    try:
        state = json.loads(path.read_text())
        saved, rounds = dict(state["identity"]), [Round.from_json(one) for one in state["rounds"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({error}). Delete it to start over.") from error
    now = json.loads(json.dumps(identity))
    compared = _PARTS if rounds else _FIXED
    differing = [part for part in compared if saved.get(part) != now.get(part)]
    if differing:
        verb = "differ" if len(differing) > 1 or differing[0] in _PLURAL else "differs"
        raise ArtefactError(
            f"'{folder}' holds another loop: {', '.join(_PARTS[part] for part in differing)} {verb}. Use another "
            f"folder, or delete this one."
        )
    return rounds


def _labels(folder: Path | None) -> dict[str, str]:
    """The labels that people wrote into picks.csv."""
    return {} if folder is None or not (folder / PICKS).exists() else read_labels(folder / PICKS).labels


def first_images(pool: Table, begin: Int64[np.ndarray, "s"], folder: Path | None) -> list[str]:
    """The images at the beginning that people must label, or have labelled in picks.csv."""
    unlabelled, labels = set(pool.row_ids(without_label(pool, begin))), _labels(folder)
    return [name for name in pool.row_ids(begin) if name in unlabelled or name in labels]


def with_labels(pool: Table, folder: Path | None, classes: Sequence[str] | None) -> Table:
    """The pool with the labels that people wrote into picks.csv, if any."""
    files = [folder / PICKS] if folder is not None and _labels(folder) else []
    return add_labels(pool, *files, classes=classes) if files or classes is not None else pool


def reusable(done: list[Round], rounds: int, images: int) -> list[Round]:
    """The rounds that stay; the training at the end of a shorter loop is repeated if this one is longer."""
    kept = [one for one in done if one.picks is not None][:rounds]
    at_end = done[len(kept) :][:1]
    if len(kept) == rounds or (at_end and at_end[0].labelled == images):
        kept += [replace(one, picks=None) for one in at_end]
    return kept
