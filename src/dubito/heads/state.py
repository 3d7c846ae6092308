"""The state of a training on disk: one safetensors file that records which training it belongs to."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dubito.cache.manifest import describe_part
from dubito.errors import ArtefactError
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
    """The state in a folder, None without one.

    Raises:
        ArtefactError: The file cannot be read, or belongs to a training with another identity.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            notes: Any = json.loads(file.metadata()["notes"])
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dict)
        saved, step, since, history = notes["identity"], int(notes["step"]), int(notes["since"]), list(notes["history"])
        if notes["digest"] != _digest(tensors):
            raise ValueError("its checksum does not match")
        losses = tensors.pop("losses")
    except (AttributeError, OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"'{path}' cannot be read ({error}). Delete it to train from the beginning.") from error
    _check_identity(folder, saved, identity)
    return TrainingState(step, since, losses, history, _part(tensors, "module."), _part(tensors, "optimizer."))


def _digest(tensors: dict[str, Tensor]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        state.update(key.encode() + tensors[key].numpy().tobytes())
    return state.hexdigest()


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _check_identity(folder: Path, saved: Json, identity: Json) -> None:
    current = json.loads(json.dumps(identity))
    differing = [
        f"{name} ({describe_part(saved.get(part), current.get(part))} there, "
        f"{describe_part(current.get(part), saved.get(part))} here)"
        for part, name in _PARTS.items()
        if saved.get(part) != current.get(part)
    ]
    if differing:
        raise ArtefactError(
            f"'{folder}' holds another training: {'; '.join(differing)}. Train into another folder, or delete this one."
        )
