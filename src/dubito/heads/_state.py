"""The state of a training on disk: one file, replaced in one step, that says which training it belongs to.

One training at a time writes into a folder, under a lock as a cache has it.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from filelock import FileLock, Timeout
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dubito.cache.manifest import told_part
from dubito.errors import ArtefactError
from dubito.storage import write_file
from dubito.types import Json

FILE = "state.safetensors"
LOCK = ".lock"
_PARTS = {
    "recipe": "the recipe",
    "seed": "the seed",
    "width": "the head's width",
    "depth": "the head's depth",
    "features": "the width of the features",
    "rows": "the number of rows",
    "model_id": "the model that made the table",
    "losses": "the losses",
    "sample": "the features",
    "held_out": "the held-out images",
}


@final
@dataclass
class TrainingState:
    """How far a training has come.

    Attributes:
        step: Updates done.
        since: Of these, since the last measurement.
        losses: Their sum, which goes on exactly where it stopped.
        history: One entry a measurement.
        module: The head's weights by name.
        optimizer: Its tensors by name.
    """

    step: int = 0
    since: int = 0
    losses: Float[Tensor, ""] = field(default_factory=lambda: torch.zeros(()))
    history: list[Json] = field(default_factory=list)
    module: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while writing into it; the system lets go of it when the process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise ArtefactError(
            f"another process is writing into '{folder}'. Wait until it has ended, or choose another folder."
        ) from error
    except OSError as error:
        raise ArtefactError(
            f"the folder '{folder}' cannot be written ({error.strerror}). Choose another one."
        ) from error
    try:
        yield
    finally:
        lock.release()


def write_state(folder: Path, identity: Json, state: TrainingState) -> None:
    """Replace the folder's state."""
    tensors = {f"module.{key}": value for key, value in state.module.items()}
    tensors |= {f"optimizer.{key}": value for key, value in state.optimizer.items()}
    tensors["losses"] = state.losses
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    notes = {
        "identity": identity,
        "step": state.step,
        "since": state.since,
        "history": state.history,
        "digest": _digest(tensors),
    }
    write_file(folder / FILE, save(tensors, {"notes": json.dumps(notes, sort_keys=True)}))


def read_state(folder: Path, identity: Json) -> TrainingState | None:
    """The folder's state, if there is one; ArtefactError if it is another training's or cannot be read."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            notes: Any = json.loads(file.metadata()["notes"])
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
        was, step, since, history = notes["identity"], int(notes["step"]), int(notes["since"]), list(notes["history"])
        if notes["digest"] != _digest(tensors):
            raise ValueError("its numbers are not those that were written")
        losses = tensors.pop("losses")
    except (AttributeError, OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({error}). Delete it to train from the beginning.") from error
    _check(folder, was, identity)
    return TrainingState(step, since, losses, history, _part(tensors, "module."), _part(tensors, "optimizer."))


def _digest(tensors: dict[str, Tensor]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        state.update(key.encode() + tensors[key].numpy().tobytes())
    return state.hexdigest()


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _check(folder: Path, was: Json, now: Json) -> None:
    plain = json.loads(json.dumps(now))
    differing = [
        f"{told} ({told_part(was.get(part), plain.get(part))} there, {told_part(plain.get(part), was.get(part))} here)"
        for part, told in _PARTS.items()
        if was.get(part) != plain.get(part)
    ]
    if differing:
        raise ArtefactError(
            f"'{folder}' holds another training: {'; '.join(differing)}. Train into another folder, or delete this one."
        )
