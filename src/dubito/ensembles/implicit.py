"""The members of one model, stored as masks; each becomes an ordinary module on access.

Each masked layer of a member is a smaller dense one:

    W' = r W c over the rows and columns that are kept,   b' = r b

Between two layers that follow each other (`Link`), units = rows of the first AND columns of the second, so both shrink
and nothing lies between them; where the first drops a unit that the second keeps, b' of the second takes its constant
f(0). Elsewhere the layer picks its columns from a full vector and puts its rows into one that is zero otherwise, which
is what masks do.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dubito.ensembles.layers import Link, linear_layers
from dubito.ensembles.masks import LayerMasks, mask_diversity, of_member
from dubito.errors import ArtefactError, ModelError
from dubito.models.weights import module_digests
from dubito.models.wrap import WrappedClassifier, wrap
from dubito.storage import write_file, writing
from dubito.types import Classifier

FORMAT = 1


@final
class ImplicitEnsemble:
    """Members of one model. `ensemble[3]` is an ordinary module, `list(ensemble)` are all of them.

    A member is built on every access. Its masked layers are smaller and its own; everything else is shared with the
    model: copy.deepcopy a member before you train it further.

    Attributes:
        model: The model that the members are part of.
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
        layers = linear_layers(module)
        masks = of_member(self.masks, member % len(self))
        return sub_model(module, {name: layers[name] for name in self.masks}, masks, self._links)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[member] for member in range(len(self)))

    @property
    def diversity(self) -> float:
        """I[mask; M] per unit, relative to its maximum log 2: 0 if all members are the same, at most about 1.

        With few members it stays below 1 even for random halves, because their means are rarely exactly one half.
        """
        units = [mask_diversity(part) for mask in self.masks.values() for part in mask if part is not None]
        total = sum(float(unit.double().sum()) for unit in units)
        return total / (sum(unit.numel() for unit in units) * math.log(2))

    def kept(self) -> dict[str, float]:
        """By layer, the average share of weights that a member keeps: share of rows times share of columns."""
        shares = {}
        for name, mask in self.masks.items():
            rows = 1.0 if mask.rows is None else (mask.rows > 0).double().mean(1)
            shares[name] = float((rows * (mask.columns > 0).double().mean(1)).mean())
        return shares

    def classifiers(self) -> list[WrappedClassifier]:
        """The members as classifiers, with the transform and the classes of the model, for `dubito.probes.Members`."""
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
        """Write the masks to one safetensors file, with a hash of the model's weights instead of the weights."""
        tensors = {f"{side}.{name}": part for name, mask in self.masks.items() for side, part in _sides(mask)}
        note = {
            "tensors": module_digests(plain_module(self.model))["tensors"],
            "layers": list(self.masks),
            "links": {name: [link.to, link.at_zero] for name, link in self._links.items()},
        }
        return write_masks(Path(path), tensors, note)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | Classifier) -> "ImplicitEnsemble":
        """Read masks for the model that they were learned on; nothing is unpickled.

        Args:
            path: A file that `save` wrote.
            model: The model, with the same weights as then.
        """
        tensors, note = read_masks(Path(path), needs=("tensors", "links"))
        wrapped = classifier_of(model)
        if module_digests(plain_module(wrapped))["tensors"] != note["tensors"]:
            raise ModelError(
                f"masks in '{path}' were learned on other weights than those of {wrapped.name}. Load the right "
                f"model, or extract members again."
            )
        masks = {name: LayerMasks(tensors.get(f"rows.{name}"), tensors[f"columns.{name}"]) for name in note["layers"]}
        return cls(wrapped, masks, {name: Link(to, float(zero)) for name, (to, zero) in note["links"].items()})


@final
class SubLinear(nn.Module):
    """A small dense layer that reads some columns of its input and fills some rows of its output.

    Args:
        linear: The dense layer.
        columns: The columns of its input that it reads; None reads all.
        rows: The positions of its outputs; None puts them one after the other.
        width: Width of the output, with zeros in all other positions.
    """

    def __init__(
        self, linear: nn.Linear, columns: Int[Tensor, "i"] | None, rows: Int[Tensor, "o"] | None, width: int
    ) -> None:
        super().__init__()
        self.linear, self.width = linear, width
        self.register_buffer("columns", columns)
        self.register_buffer("rows", rows)

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """The dense layer's weight: some modules look at the type of a layer's weight."""
        return self.linear.weight

    @property
    def bias(self) -> Float[Tensor, "o"] | None:
        """The dense layer's bias."""
        return self.linear.bias

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Select columns, multiply, place rows."""
        columns, rows = self._buffers["columns"], self._buffers["rows"]
        y: Tensor = self.linear(x if columns is None else x.index_select(-1, columns))
        return y if rows is None else y.new_zeros(*y.shape[:-1], self.width).index_copy(-1, rows, y)


def sub_model(
    module: nn.Module,
    layers: Mapping[str, nn.Linear],
    masks: Mapping[str, LayerMasks],
    links: Mapping[str, Link],
) -> nn.Module:
    """A copy of the module with smaller layers; whatever is not masked is shared with the module, not copied.

    Args:
        module: The whole model, which is left as it is.
        layers: Its masked layers by name.
        masks: Their masks for one member: (1, out) and (1, in).
        links: Links between them, from `Watch`; the result is the same without them, only larger.
    """
    after = {name: link for name, link in links.items() if name in layers and link.to in layers}
    before = {link.to: (name, link.at_zero) for name, link in after.items()}
    memo: dict[int, object] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    with torch.no_grad():
        for name, layer in layers.items():
            memo[id(layer)] = _smaller(name, layer, masks, after, before)
    return copy.deepcopy(module, memo)


def _smaller(
    name: str,
    layer: nn.Linear,
    masks: Mapping[str, LayerMasks],
    after: Mapping[str, Link],
    before: Mapping[str, tuple[str, float]],
) -> nn.Module:
    rows, columns = _row_mask(masks[name], layer), masks[name].columns[0].to(layer.weight)
    out, into = rows > 0, columns > 0
    bias = None if layer.bias is None else layer.bias.detach()
    if name in before:
        first, at_zero = before[name]
        first_rows = masks[first].rows
        lives = into if first_rows is None else into & (first_rows[0] > 0).to(into.device)
        if at_zero and bool((into & ~lives).any()):
            constant = layer.weight.detach()[:, into & ~lives] @ (columns[into & ~lives] * at_zero)
            bias = constant if bias is None else bias + constant
        into = lives
    if name in after:
        out = out & (masks[after[name].to].columns[0] > 0).to(out.device)
    weight = rows[out, None] * layer.weight.detach()[out][:, into] * columns[into]
    dense = _dense(weight, None if bias is None else (rows * bias)[out], like=layer)
    picked = None if name in before else _places(into)
    put = None if name in after else _places(out)
    if picked is None and put is None:
        return dense
    return SubLinear(dense, picked, put, layer.out_features).train(layer.training)


def _row_mask(masks: LayerMasks, layer: nn.Linear) -> Float[Tensor, "out"]:
    return layer.weight.new_ones(layer.out_features) if masks.rows is None else masks.rows[0].to(layer.weight)


def _places(kept: Bool[Tensor, "w"]) -> Int[Tensor, "k"] | None:
    return None if bool(kept.all()) else kept.nonzero()[:, 0]


def _dense(weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None, *, like: nn.Linear) -> nn.Linear:
    """Built with one unit and then filled: initialising an empty layer, where nothing is kept, would warn."""
    dense = nn.Linear(1, 1, bias=bias is not None)
    dense.out_features, dense.in_features = weight.shape
    dense.weight = nn.Parameter(weight.contiguous(), requires_grad=like.weight.requires_grad)
    if bias is not None:
        dense.bias = nn.Parameter(bias.contiguous(), requires_grad=like.weight.requires_grad)
    return dense.train(like.training)


def classifier_of(model: nn.Module | Classifier) -> WrappedClassifier:
    """The model as a classifier; one from `dubito.wrap` stays as it is."""
    if isinstance(model, WrappedClassifier):
        return model
    if isinstance(model, nn.Module):
        return wrap(model)
    return wrap(model.module, transform=model.transform, classes=model.classes, name=model.name)


def plain_module(model: WrappedClassifier) -> nn.Module:
    """The module inside torch.compile, whose calls are visible and whose layers have their plain names."""
    inner = getattr(model.module, "_orig_mod", model.module)
    return inner if isinstance(inner, nn.Module) else model.module


def _head_name(module: nn.Module, name: str | None) -> str | None:
    """The name of the classifying layer in a member, if the user has named it."""
    masked = name is not None and isinstance(module.get_submodule(name), SubLinear)
    return f"{name}.linear" if masked else name


def _sides(mask: LayerMasks) -> list[tuple[str, Tensor]]:
    """The masks by side; one byte per unit where they are 0 and 1."""
    parts = [(side, part) for side, part in zip(LayerMasks._fields, mask, strict=True) if part is not None]
    return [(side, part.to(torch.uint8) if bool(((part == 0) | (part == 1)).all()) else part) for side, part in parts]


def write_masks(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> Path:
    """Write one safetensors file for `read_masks`, making its folder."""
    contiguous = {key: value.cpu().contiguous() for key, value in tensors.items()}
    data = save(contiguous, metadata={"masks": json.dumps({"format": FORMAT, **note})})
    with writing("the masks", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    return path


def read_masks(path: Path, *, needs: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the note of a file of masks; the note must have the entries that `needs` names."""
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
