"""The state of a training on disk: one safetensors file that records which training it belongs to."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dubito.cache.manifest import differing_parts
from dubito.errors import ArtefactError
from dubito.models.weights import tensors_digest
from dubito.storage import write_file
from dubito.types import Json

FILE = "state.safetensors"
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
    """Everything that a training needs to continue as if it had not been interrupted.

    Attributes:
        step: Number of updates so far.
        since: Number of updates since the last measurement.
        losses: Sum of the training losses of these updates.
        history: One entry per measurement.
        module: The head's weights by name.
        optimizer: The optimiser's tensors by name.
    """

    step: int = 0
    since: int = 0
    losses: Float[Tensor, ""] = field(default_factory=lambda: torch.zeros(()))
    history: list[Json] = field(default_factory=list)
    module: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)


def write_state(folder: Path, identity: Json, state: TrainingState) -> None:
    """Replace the state in a folder."""
    tensors = {f"module.{key}": value for key, value in state.module.items()}
    tensors |= {f"optimizer.{key}": value for key, value in state.optimizer.items()}
    tensors["losses"] = state.losses
    notes = {"identity": identity, "step": state.step, "since": state.since, "history": state.history}
    write_tensors(folder / FILE, tensors, notes)


def read_state(folder: Path, identity: Json) -> TrainingState | None:
    """The state in a folder, None without one.

    Raises:
        ArtefactError: The file cannot be read, or belongs to a training with another identity.
    """
    if not (folder / FILE).exists():
        return None
    with reading(folder / FILE, "train"):
        tensors, notes = read_tensors(folder / FILE)
        step, since, history = int(notes["step"]), int(notes["since"]), list(notes["history"])
        losses = tensors["losses"]
        differing = differing_parts(_PARTS, notes["identity"], json.loads(json.dumps(identity)))
    if differing:
        raise ArtefactError(
            f"'{folder}' holds another training: {'; '.join(differing)}. Train into another folder, or delete this one."
        )
    return TrainingState(step, since, losses, history, _part(tensors, "module."), _part(tensors, "optimizer."))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Json) -> None:
    """Replace a safetensors file in one step: tensors, notes, and a hash of the tensors."""
    whole = {key: value.contiguous() for key, value in tensors.items()}
    write_file(path, save(whole, {"notes": json.dumps({**notes, "digest": tensors_digest(whole)}, sort_keys=True)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Json]:
    """What `write_tensors` wrote; ValueError where the tensors are others."""
    with safe_open(path, framework="pt") as file:
        notes: Json = json.loads(file.metadata()["notes"])
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
    if notes["digest"] != tensors_digest(tensors):
        raise ValueError("its checksum does not match")
    return tensors, notes


@contextmanager
def reading(path: Path, verb: str) -> Iterator[None]:
    """Turn whatever a damaged state raises into an ArtefactError."""
    try:
        yield
    except (AttributeError, OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({error}). Delete it to {verb} from the beginning.") from error


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
