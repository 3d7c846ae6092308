"""How far a literal filter has come: the most confident inputs of each class so far, counted and kept in a file."""

import json
import math
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dubito.cache.manifest import told_part
from dubito.errors import ArtefactError
from dubito.models.fingerprint import tensors_digest
from dubito.storage import write_file
from dubito.types import Json

BINS = 100
"""Of max p, from 0 to 1."""
_PARTS = {"weights": "the model", "shape": "the shape", "top": "top", "batch": "the batch", "seed": "the seed"}


def log_odds(logits: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "n"], Int64[Tensor, "n"]]:
    """The log-odds of the predicted class, and the class; the first of equal logits is predicted.

    >>> odds, label = log_odds(torch.tensor([[0.0, 60.0], [50.0, 0.0]]))  # max p is 1.0 for both in float32
    >>> odds.tolist(), label.tolist()
    ([60.0, 50.0], [1, 0])
    """
    highest, label = logits.max(1)
    others = logits.scatter(1, label[:, None], -math.inf)
    return highest - others.logsumexp(1), label


@final
class State:
    """Everything that a run carries along."""

    def __init__(self) -> None:
        self.done = 0
        self.histogram = torch.zeros(0, BINS, dtype=torch.int64)
        self.log_odds = torch.zeros(0, 0)
        self.draw = torch.zeros(0, 0, dtype=torch.int64)

    def add(self, logits: Float[Tensor, "n c"], top: int) -> None:
        """The next inputs."""
        classes = logits.shape[1]
        if not len(self.histogram):
            self.histogram = torch.zeros(classes, BINS, dtype=torch.int64)
            self.log_odds = torch.full((classes, top), -math.inf)
            self.draw = torch.full((classes, top), -1, dtype=torch.int64)
        odds, label = log_odds(logits)
        place = (odds.sigmoid() * BINS).long().clamp(max=BINS - 1)
        self.histogram += torch.bincount(label * BINS + place, minlength=classes * BINS).view(classes, BINS)
        rising = (odds > self.log_odds[label, -1]).nonzero()[:, 0]
        for y in sorted(set(label[rising].tolist())):
            rows = rising[label[rising] == y]
            merged = torch.cat([self.log_odds[y], odds[rows]])
            numbers = torch.cat([self.draw[y], self.done + rows])
            best = merged.argsort(descending=True, stable=True)[:top]  # stable: earlier draws stand first
            self.log_odds[y], self.draw[y] = merged[best], numbers[best]
        self.done += len(logits)

    def tensors(self) -> dict[str, Tensor]:
        """All of it but `done`."""
        return {"histogram": self.histogram, "log_odds": self.log_odds, "draw": self.draw}


def write_state(path: Path, identity: Json, state: State) -> None:
    """Replace the checkpoint in one step."""
    tensors = state.tensors()
    notes = {"identity": identity, "done": state.done, "digest": tensors_digest(tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save(tensors, {"notes": json.dumps(notes, sort_keys=True)}))


def read_state(path: Path, identity: Json, draws: int) -> State:
    """The state in a checkpoint, or a new one; ArtefactError if it is another run's or cannot be read."""
    state = State()
    if not path.exists():
        return state
    try:
        with safe_open(path, framework="pt") as file:
            notes: Any = json.loads(file.metadata()["notes"])
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
        if notes["digest"] != tensors_digest(tensors):
            raise ValueError("its numbers are not those that were written")
        was, state.done = notes["identity"], int(notes["done"])
        state.histogram, state.log_odds, state.draw = (tensors[key] for key in ("histogram", "log_odds", "draw"))
    except (AttributeError, OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({error}). Delete it to filter from the beginning.") from error
    differing = [
        f"{told} ({told_part(was.get(part), None)} there, {told_part(identity[part], None)} here)"
        for part, told in _PARTS.items()
        if was.get(part) != identity[part]
    ]
    if state.done > draws:
        differing.append(f"the draws ({state.done} there, {draws} here)")
    if differing:
        raise ArtefactError(
            f"'{path}' holds another filter run: {'; '.join(differing)}. Name another file, or delete this one."
        )
    return state
