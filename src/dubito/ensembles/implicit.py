"""Members hidden in one model: sub-models that each solve the task, with masks as different as possible.

Implicit ensemble extraction of Kirsch (2024, section 4.1 and A.4): masks on rows and columns of linear layers are
learned by cross-entropy on training images, and kept diverse by the mutual information between mask and member. The
model's weights never change. Members are stored as masks; each becomes an ordinary module on access. Settings that the
paper leaves open are in `MaskRecipe`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from dubito.cache.runner import kept_memory
from dubito.ensembles.layers import (
    Link,
    LinkRecorder,
    Masked,
    SubLinear,
    chosen_layers,
    linear_layers,
    spans_of,
    sub_model,
)
from dubito.ensembles.masks import LayerMasks, MaskRecipe, by_layer, mask_diversity, of_member, rows_each, trained_masks
from dubito.errors import ModelError, TableError
from dubito.heads.stream import generator
from dubito.models.frozen import frozen
from dubito.models.load import as_classifier
from dubito.models.outputs import output_of
from dubito.models.weights import module_digests
from dubito.models.wrap import WrappedClassifier, eager, sample_of, wrap
from dubito.storage import read_tensors, reading, to_path, write_tensors, writing
from dubito.table import to_tensor
from dubito.types import Classifier, Json, finite
from dubito.validate import check_classes, check_seed

_CLOSE, _CLOSE_HALF = 1e-3, 5e-2
"""Relative tolerance of two ways to compute the same logits, in full and in half precision."""
_Run = Callable[[Mapping[str, LayerMasks], Tensor], Tensor]
"""The model with masks on its layers."""


def extract_members(
    model: nn.Module | Classifier | str,
    x: Shaped[Tensor, "n ..."],
    y: Int[Tensor, "k"] | Sequence[int],
    *,
    members: int = 10,
    layers: Sequence[str] | None = None,
    recipe: MaskRecipe | None = None,
    seed: int = 0,
    progress: bool = True,
) -> "ImplicitEnsemble":
    """Find members in a model, which stays as it is. Under torch.autocast, products are in its precision.

    Args:
        model: A module that returns logits, a Classifier, or a name, which is loaded.
        x: Inputs of the module, from images like those it was trained on.
        y: Their classes.
        members: Number of members.
        layers: Names of linear layers, or patterns such as "blocks.*.mlp.fc?"; None takes all that the model calls. In
            a layer with one output per class only columns are masked.
        recipe: Settings that the paper leaves open.
        seed: Seed of the initial masks and the order of images: the same seed gives the same members.
        progress: Whether to show a progress bar on a terminal.

    >>> _ = torch.manual_seed(0)
    >>> module = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
    >>> ensemble = extract_members(module, x, y, members=2, recipe=MaskRecipe(steps=5))
    >>> len(ensemble), tuple(ensemble[0](torch.randn(7, 4)).shape), ensemble[0][2].in_features < 32
    (2, (7, 3), True)
    """
    check_seed(seed, by="extract_members")
    recipe, model = recipe or MaskRecipe(), classifier_of(model, by="extract_members")
    module, y = eager(model.module), to_tensor(y, "extract_members: y")
    if len(x) != len(y):
        raise TableError(f"extract_members: x has {len(x)} rows, y has {len(y)}. Pass one class per image.")
    each = rows_each(len(x), members, recipe)
    with frozen(module), kept_memory():
        # Rounding must not decide comparisons: no autocast there.
        with torch.autocast(model.device.type, enabled=False):
            pair = _on(model, x[:2])
            watch, classes = _watched(model, module, pair)
            chosen = chosen_layers(module, layers, watch.called, model.name)
            check_classes(y, classes, by="extract_members")
            spans = spans_of(chosen, classes)

            def run(masks: Mapping[str, LayerMasks], inputs: Tensor) -> Tensor:
                with Masked(chosen, masks):
                    return output_of(module(inputs), len(inputs), model.name, model.output_key)

            drawn = torch.rand(2, sum(spans.values()), generator=generator("check"))
            _check_apart(run, by_layer(drawn.to(model.device), spans), pair, model.name)
        order = _shuffled(len(x), members * each, recipe.steps, seed)
        batches = ((_on(model, x[rows]), y[rows].to(model.device).long()) for rows in order)
        options: Any = {"members": members, "recipe": recipe, "seed": seed, "progress": progress}
        with torch.enable_grad():
            q = trained_masks(run, batches, spans, device=model.device, **options).cpu()
        with torch.autocast(model.device.type, enabled=False):
            return _with_safe_links(ImplicitEnsemble(model, by_layer(q, spans), watch.links), run, pair)


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
        module = eager(self.model.module)
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
        same: Any = {"transform": self.model.transform, "classes": self.model.classes, "output": head["output"]}
        models = []
        for number, module in enumerate(self):
            layer = head["layer"]
            if layer is not None and isinstance(module.get_submodule(layer), SubLinear):
                layer = f"{layer}.linear"
            models.append(wrap(module, head=layer, name=f"{self.model.name}, member {number}", **same))
        return models

    def save(self, path: str | Path) -> Path:
        """Write the masks to one safetensors file, with a hash of the model's weights instead of the weights."""
        tensors = {}
        for name, mask in self.masks.items():
            for side, part in zip(LayerMasks._fields, mask, strict=True):
                if part is not None:  # one byte per unit where masks are 0 and 1
                    binary = bool(((part == 0) | (part == 1)).all())
                    tensors[f"{side}.{name}"] = part.to(torch.uint8) if binary else part
        note = {
            "weights": module_digests(eager(self.model.module))["tensors"],
            "layers": list(self.masks),
            "links": self._links,
        }
        return write_masks(to_path(path, "masks"), tensors, note)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | Classifier | str) -> "ImplicitEnsemble":
        """Read masks for the model that they were learned on; nothing is unpickled.

        Args:
            path: A file that `save` wrote.
            model: The model, or its name, with the same weights as then.
        """
        with read_masks(path) as (tensors, note):
            names = note["layers"]
            masks = {name: LayerMasks(tensors.get(f"rows.{name}"), tensors[f"columns.{name}"]) for name in names}
            links = {name: Link(to, float(zero)) for name, (to, zero) in note["links"].items()}
            weights = note["weights"]
        wrapped = classifier_of(model, by="ImplicitEnsemble.load")
        if module_digests(eager(wrapped.module))["tensors"] != weights:
            raise ModelError(
                f"masks in '{path}' were learned on other weights than those of {wrapped.name}. Load the right "
                f"model, or extract members again."
            )
        return cls(wrapped, masks, links)


def write_masks(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> Path:
    """Write one safetensors file for `read_masks`, making its folder."""
    with writing("the masks", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, note)
    return path


@contextmanager
def read_masks(path: str | Path) -> Iterator[tuple[dict[str, Tensor], Json]]:
    """Tensors and the note of a file of masks; whatever goes wrong while they are used is an ArtefactError."""
    with reading(f"masks in '{path}'", "Pass a file that save() wrote."):
        tensors, note = read_tensors(to_path(path, "masks"))
        yield {key: value.float() for key, value in tensors.items()}, note


def classifier_of(model: nn.Module | Classifier | str, *, by: str) -> WrappedClassifier:
    """The model as a classifier; one from `dubito.wrap` stays as it is."""
    if isinstance(model, nn.Module):
        return wrap(model)
    model = as_classifier(model, by=by)
    if isinstance(model, WrappedClassifier):
        return model
    return wrap(model.module, transform=model.transform, classes=model.classes, name=model.name)


def _watched(model: WrappedClassifier, module: nn.Module, pair: Tensor) -> tuple[LinkRecorder, int]:
    """The calls of one pass, and the number of classes."""
    expected = model.logits(model.features(pair))
    watch = LinkRecorder(linear_layers(module))
    with watch:
        logits = output_of(module(pair), len(pair), model.name, model.output_key)
    finite(logits, f"extract_members: logits of {model.name} for the first inputs")
    if not _same(logits, expected):
        raise ModelError(
            f"{model.name} must return logits; its output is not that of its last layer. Masks are learned by "
            f"cross-entropy: wrap a module without the softmax at its end."
        )
    return watch, logits.shape[1]


def _shuffled(rows: int, size: int, steps: int, seed: int) -> Iterator[Int[Tensor, "r"]]:
    """Indices of `size` rows for each step, from one random order of all rows after the other, leaving out the rest."""
    for step in range(steps):
        turn, place = divmod(step, rows // size)
        if place == 0:
            order = torch.randperm(rows, generator=generator("rows", seed, turn))
        yield order[place * size : (place + 1) * size]


def _check_apart(run: _Run, masks: dict[str, LayerMasks], pair: Tensor, name: str) -> None:
    """Raise ModelError unless two members in one batch return what each returns alone: then their rows do not mix."""
    both = run(masks, torch.cat([pair, pair]))
    alone = [run(of_member(masks, member), pair) for member in range(2)]
    if not _same(both, torch.cat(alone)):
        raise ModelError(
            f"{name} mixes the images of a batch before one of its masked layers, so members cannot share a batch. "
            f"Name layers that keep images along the first axis: layers=[...]."
        )


def _with_safe_links(ensemble: ImplicitEnsemble, run: _Run, pair: Tensor) -> ImplicitEnsemble:
    """Without links if they change the first member's logits: a module may use a layer in ways that no hook sees."""
    expected = run(of_member(ensemble.masks, 0), pair)
    try:
        model = ensemble.model
        same = _same(output_of(ensemble[0](pair), len(pair), model.name, model.output_key), expected)
    except Exception:  # whatever a module raises when a layer is narrower than it expects
        same = False
    return ensemble if same else ImplicitEnsemble(ensemble.model, ensemble.masks, {})


def _same(a: Tensor, b: Tensor) -> bool:
    close = _CLOSE if b.dtype in (torch.float32, torch.float64) else _CLOSE_HALF
    size = float(b.float().abs().max().clamp_min(1e-6))
    return a.shape == b.shape and float((a.float() - b.float()).abs().max()) <= close * size


def _on(model: WrappedClassifier, x: Tensor) -> Tensor:
    """The inputs on the model's device, in its precision."""
    like = sample_of(model.module)
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
