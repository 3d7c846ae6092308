"""The members that were found in a model, kept as masks; each becomes an ordinary module when asked for."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dubito.ensembles._layers import linear_layers
from dubito.ensembles._watch import Link
from dubito.ensembles.masks import LayerMasks, mask_diversity, of_member
from dubito.ensembles.submodel import SubLinear, sub_model
from dubito.errors import ArtefactError, ModelError
from dubito.models.fingerprint import module_digests
from dubito.models.wrap import WrappedClassifier, wrap
from dubito.storage import write_file
from dubito.types import Classifier

FORMAT = 1


@final
class ImplicitEnsemble:
    """Members of one model. `ensemble[3]` is an ordinary module, `list(ensemble)` are all of them.

    A member is made anew each time it is asked for. Its masked layers are smaller and its own; everything else is
    shared with the model: copy.deepcopy a member before you train it on.

    Attributes:
        model: Whose members they are.
        masks: By layer, rows (m, out) and columns (m, in).
    """

    def __init__(self, model: WrappedClassifier, masks: Mapping[str, LayerMasks], links: Mapping[str, Link]) -> None:
        self.model, self.masks = model, dict(masks)
        self._links = dict(links)

    def __len__(self) -> int:
        return len(next(iter(self.masks.values())).columns)

    def __repr__(self) -> str:
        return f"ImplicitEnsemble({len(self)} members of {self.model.name!r}; layers {', '.join(self.masks)})"

    def __getitem__(self, member: int) -> nn.Module:
        """A member as a module."""
        if not -len(self) <= member < len(self):
            raise IndexError(f"members are 0 to {len(self) - 1}; got {member}.")
        module = plain_module(self.model)
        there = linear_layers(module)
        masks = of_member(self.masks, member % len(self))
        return sub_model(module, {name: there[name] for name in self.masks}, masks, self._links)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[member] for member in range(len(self)))

    @property
    def diversity(self) -> float:
        """I[mask; M] a unit, relative to its highest value log 2: 0 where all members are one, near 1 at most.

        With few members it stays below 1 even for random halves, as their means are rarely just one half.
        """
        units = [mask_diversity(part) for mask in self.masks.values() for part in mask if part is not None]
        total = sum(float(unit.double().sum()) for unit in units)
        return total / (sum(unit.numel() for unit in units) * math.log(2))

    def kept(self) -> dict[str, float]:
        """By layer, the share of weights that a member keeps on average: share of rows times share of columns."""
        shares = {}
        for name, mask in self.masks.items():
            rows = 1.0 if mask.rows is None else (mask.rows > 0).double().mean(1)
            shares[name] = float((rows * (mask.columns > 0).double().mean(1)).mean())
        return shares

    def classifiers(self) -> list[WrappedClassifier]:
        """The members as classifiers, with the transform and the classes of the model: for `dubito.Members`."""
        head = self.model.fingerprint()["head"]
        return [
            wrap(
                module,
                transform=self.model.transform,
                classes=self.model.classes,
                head=_head_name(module, head["layer"]),
                output=head["output"],
                name=f"{self.model.name}, member {number}",
            )
            for number, module in enumerate(self)
        ]

    def save(self, path: str | Path) -> Path:
        """Masks into one safetensors file; the model's weights are not in it, only what they hash to."""
        tensors = {f"{side}.{name}": part for name, mask in self.masks.items() for side, part in _sides(mask)}
        note = {
            "tensors": module_digests(plain_module(self.model))["tensors"],
            "layers": list(self.masks),
            "links": {name: [link.to, link.at_zero] for name, link in self._links.items()},
        }
        return write_masks(Path(path), tensors, note)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | Classifier) -> "ImplicitEnsemble":
        """Read masks back for the model that they were learned on; nothing is unpickled.

        Args:
            path: A file that `save` wrote.
            model: With the very weights it had then.
        """
        tensors, note = read_masks(Path(path), needs=("tensors", "links"))
        wrapped = classifier_of(model)
        if module_digests(plain_module(wrapped))["tensors"] != note["tensors"]:
            raise ModelError(
                f"masks in '{path}' were learned on other weights than those of {wrapped.name}. Load that model, or "
                f"extract its members again."
            )
        masks = {name: LayerMasks(tensors.get(f"rows.{name}"), tensors[f"columns.{name}"]) for name in note["layers"]}
        return cls(wrapped, masks, {name: Link(to, float(zero)) for name, (to, zero) in note["links"].items()})


def classifier_of(model: nn.Module | Classifier) -> WrappedClassifier:
    """A classifier around a module, or the one that was given."""
    if isinstance(model, WrappedClassifier):
        return model
    if isinstance(model, nn.Module):
        return wrap(model)
    return wrap(model.module, transform=model.transform, classes=model.classes, name=model.name)


def plain_module(model: WrappedClassifier) -> nn.Module:
    """The module inside torch.compile, whose calls can be seen and whose layers have their plain names."""
    inner = getattr(model.module, "_orig_mod", model.module)
    return inner if isinstance(inner, nn.Module) else model.module


def _head_name(module: nn.Module, name: str | None) -> str | None:
    """Where the classifying layer is in a member, if the user has named it."""
    masked = name is not None and isinstance(module.get_submodule(name), SubLinear)
    return f"{name}.linear" if masked else name


def _sides(mask: LayerMasks) -> list[tuple[str, Tensor]]:
    """One byte a unit where masks are 0 and 1."""
    there = [(side, part) for side, part in zip(LayerMasks._fields, mask, strict=True) if part is not None]
    return [(side, part.to(torch.uint8) if bool(((part == 0) | (part == 1)).all()) else part) for side, part in there]


def write_masks(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> Path:
    """One safetensors file, which `read_masks` reads back; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtefactError(f"'{path.parent}' cannot be made ({error.strerror}). Give another place.") from error
    kept = {key: value.cpu().contiguous() for key, value in tensors.items()}
    write_file(path, save(kept, metadata={"masks": json.dumps({"format": FORMAT, **note})}))
    return path


def read_masks(path: Path, *, needs: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the note of a file of masks, which must say these things."""
    try:
        with safe_open(path, framework="pt") as file:
            note: Any = json.loads((file.metadata() or {}).get("masks", "null"))
            tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 (no dictionary)
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtefactError(f"masks in '{path}' cannot be read ({error}). Give a file that save() wrote.") from error
    if not isinstance(note, dict) or note.get("format") != FORMAT:
        raise ArtefactError(f"'{path}' does not hold masks of this version. Give a file that save() wrote.")
    missing = [name for name in note.get("layers", [None]) if f"columns.{name}" not in tensors]
    if missing or not set(needs) <= note.keys():
        raise ArtefactError(f"masks in '{path}' are not complete, or of another kind. Save them again.")
    return tensors, note
