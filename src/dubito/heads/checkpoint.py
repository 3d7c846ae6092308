"""A head on disk, in the layout of the Hugging Face hub. Nothing is pickled, and nothing but these files is opened.

model.safetensors    the weights, float16 or float32
config.json          what they are: see HeadConfig; and the hash of model.safetensors, so that the two belong together
README.md            the model card
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.card import make_card
from dubito.heads.config import HeadConfig
from dubito.heads.module import HeadModule
from dubito.storage import write_file
from dubito.types import Json

__all__ = ["HeadConfig", "PretrainedHead", "make_card", "read_config", "read_head", "write_head"]

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_DIGEST = "weights_file"


@final
class PretrainedHead(NamedTuple):
    """A head with everything that is known about it.

    Attributes:
        module: The network, float32.
        config: Its shape, its backbone, its training.
        card: The text of README.md; empty for one made from the config.
    """

    module: HeadModule
    config: HeadConfig
    card: str = ""


def write_head(folder: str | Path, head: PretrainedHead) -> Path:
    """Write a head into a folder; each file is replaced in one step, the config last."""
    folder = Path(folder)
    data = save(_tensors(head))
    described = head.config.to_json() | {_DIGEST: _digest(data)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS, data)
        write_file(folder / CARD, (head.card or make_card(head.config)).encode())
        write_file(folder / CONFIG, (json.dumps(described, sort_keys=True, indent=1) + "\n").encode())
    except OSError as error:
        raise ArtefactError(f"'{folder}' cannot be written ({error.strerror}). Give another place.") from error
    return folder


def read_head(folder: str | Path) -> PretrainedHead:
    """Read back what write_head wrote; every file is checked before it is used."""
    folder = Path(folder)
    described, config = _read_config(folder)
    data = _read(folder, WEIGHTS)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise ArtefactError(
            f"head in '{folder}': {WEIGHTS} is not a whole safetensors file ({error}); nothing in it was executed. "
            f"Copy it again, or save the head again with save_pretrained."
        ) from error
    _check(tensors, config, folder)
    if _digest(data) != described.get(_DIGEST):
        raise ArtefactError(
            f"head in '{folder}': {WEIGHTS} is not the file that {CONFIG} was written with; it was damaged or replaced."
            f" Copy the whole folder again."
        )
    module = HeadModule(config.features, width=config.width, depth=config.depth)
    module.load_state_dict({key: value.float() for key, value in tensors.items()})
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else make_card(config)
    return PretrainedHead(module.eval(), config, text)


def read_config(folder: str | Path) -> HeadConfig:
    """What a head is, without reading its weights."""
    return _read_config(Path(folder))[1]


def _read_config(folder: Path) -> tuple[Json, HeadConfig]:
    text = _read(folder, CONFIG)
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(
            f"head in '{folder}': {CONFIG} is not JSON ({error}). Copy it again, or save the head again."
        ) from error
    known = {key: value for key, value in found.items() if key != _DIGEST} if isinstance(found, dict) else found
    config = HeadConfig.from_json(known, f"'{folder / CONFIG}'")
    return found, config


def _read(folder: Path, name: str) -> bytes:
    if not (folder / name).is_file():
        why = f"{name} is not there" if folder.is_dir() else "there is no such folder"
        raise ArtefactError(f"no head in '{folder}': {why}. Give a folder that save_pretrained wrote.")
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ArtefactError(f"head in '{folder}': {name} cannot be read ({error.strerror}). Copy it again.") from error


def _tensors(head: PretrainedHead) -> dict[str, Tensor]:
    """The weights as they go to disk: of the config's shape and type, and finite there."""
    config, module = head.config, head.module
    if (config.features, config.width, config.depth) != (module.features, module.width, module.depth):
        raise ArtefactError(
            f"head: the config says {config.features} features, width {config.width}, depth {config.depth}; the module "
            f"has {module.features}, {module.width}, {module.depth}. Make the config from the module."
        )
    dtype = getattr(torch, config.dtype)
    tensors = {key: value.detach().cpu().to(dtype).contiguous() for key, value in module.state_dict().items()}
    for key, value in tensors.items():
        if not value.isfinite().all():
            raise ValueRangeError(
                f"head: {key} has values that are NaN, infinite or too large for {config.dtype}. "
                f"Train it again" + (", or keep it in float32." if config.dtype == "float16" else ".")
            )
    return tensors


def _check(tensors: dict[str, Tensor], config: HeadConfig, folder: Path) -> None:
    """Refuse tensors that are not just the head that the config tells of, before any memory is taken for it."""
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    if len(shapes) != 2 * (config.depth + 1) or shapes != _shapes(config):
        told = ", ".join(f"{key} {shape}" for key, shape in list(shapes.items())[:6]) or "nothing"
        raise ArtefactError(
            f"head in '{folder}': {CONFIG} tells of {config.features} features, width {config.width}, depth "
            f"{config.depth}, and {WEIGHTS} does not hold that: {told}. Copy both files from the same head."
        )
    for key, value in tensors.items():
        if value.dtype != getattr(torch, config.dtype) or not value.isfinite().all():
            raise ArtefactError(
                f"head in '{folder}': {key} must be finite numbers of type {config.dtype}; {value.dtype}"
                f"{'' if value.isfinite().all() else ' with NaN or infinity'} came. Copy it again, or train it again."
            )


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Of the layers of HeadModule: linear ones at even places, activations between."""
    sizes = [config.features, *[config.width] * config.depth, 1]
    pairs = enumerate(zip(sizes[1:], sizes, strict=False))
    return {
        f"layers.{2 * place}.{part}": shape
        for place, (after, before) in pairs
        for part, shape in (("weight", (after, before)), ("bias", (after,)))
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
