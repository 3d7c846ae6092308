"""Members hidden in one model: sub-models that each solve the task, with masks as different as possible.

Implicit ensemble extraction of Kirsch (2024, section 4.1 and A.4): masks on rows and columns of linear layers are
learned by cross-entropy on training images, and kept diverse by the mutual information between mask and member. The
model's weights never change. Settings that the paper leaves open are in `MaskRecipe`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from dubito.cache.runner import kept_memory
from dubito.ensembles.implicit import ImplicitEnsemble, classifier_of, plain_module
from dubito.ensembles.layers import Masked, Watch, chosen_layers, linear_layers, spans_of
from dubito.ensembles.masks import LayerMasks, by_layer, of_member
from dubito.ensembles.training import (
    MaskRecipe,
    check_labels,
    random_masks,
    rows_per_member,
    shuffled,
    trained_masks,
)
from dubito.errors import ModelError, TableError
from dubito.models.wrap import KeptBuffers, WrappedClassifier, frozen
from dubito.table import to_tensor
from dubito.types import Classifier, finite

_CLOSE, _CLOSE_HALF = 1e-3, 5e-2
"""Relative tolerance of two ways to compute the same logits, in full and in half precision."""


def extract_members(
    model: nn.Module | Classifier,
    x: Shaped[Tensor, "n ..."],
    y: Int[Tensor, "k"] | Sequence[int],
    *,
    members: int = 10,
    layers: Sequence[str] | None = None,
    recipe: MaskRecipe | None = None,
    seed: int = 0,
    progress: bool = True,
) -> ImplicitEnsemble:
    """Find members in a model, which stays as it is. Under torch.autocast, products are in its precision.

    Args:
        model: A module that returns logits, or a Classifier.
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
    recipe, model = recipe or MaskRecipe(), classifier_of(model)
    module, y = plain_module(model), to_tensor(y, "extract_members: y")
    if len(x) != len(y):
        raise TableError(f"extract_members: x has {len(x)} rows, y has {len(y)}. Give one class per image.")
    each = rows_per_member(len(x), members, recipe)
    buffers = KeptBuffers(module)
    try:
        with frozen(module), kept_memory():
            with _full_precision(model):
                watch, classes = _watched(model, module, x)
                chosen = chosen_layers(module, layers, watch.called, model.name)
                check_labels(y, classes, by="extract_members")
                spans = spans_of(chosen, classes)
                run = partial(_run, model, module, chosen)
                _check_apart(run, random_masks(spans, model.device), x, model)
            order = shuffled(len(x), members * each, recipe.steps, seed)
            batches = ((_on(model, x[rows]), y[rows].to(model.device).long()) for rows in order)
            with torch.enable_grad():
                q = trained_masks(
                    run, batches, spans, members=members, recipe=recipe, seed=seed, progress=progress
                ).cpu()
            links = {name: link for name, link in watch.links.items() if name in chosen and link.to in chosen}
            with _full_precision(model):
                return _with_safe_links(ImplicitEnsemble(model, by_layer(q, spans), links), run, x)
    finally:
        buffers.restore()


def _watched(model: WrappedClassifier, module: nn.Module, x: Tensor) -> tuple[Watch, int]:
    """The calls of one pass, and the number of classes."""
    pair = _on(model, x[:2])
    expected = model.logits(model.features(pair))
    watch = Watch(linear_layers(module))
    with watch:
        out = module(pair)
    logits = finite(_logits(out, model), f"extract_members: logits of {model.name} for the first inputs")
    if not _same(logits, expected):
        raise ModelError(
            f"{model.name} must return logits; its output is not that of its last layer. Masks are learned by "
            f"cross-entropy: wrap a module without the softmax at its end."
        )
    return watch, logits.shape[1]


def _run(
    model: WrappedClassifier,
    module: nn.Module,
    layers: dict[str, nn.Linear],
    masks: dict[str, LayerMasks],
    x: Tensor,
) -> Float[Tensor, "n c"]:
    """The module with masks on its layers."""
    with Masked(layers, masks):
        out = module(x)
    return _logits(out, model)


def _check_apart(run: partial[Tensor], masks: dict[str, LayerMasks], x: Tensor, model: WrappedClassifier) -> None:
    """Raise ModelError unless two members in one batch return what each returns alone: then their rows do not mix."""
    pair = _on(model, x[:2])
    both = run(masks, torch.cat([pair, pair]))
    alone = [run(of_member(masks, member), pair) for member in range(2)]
    if not _same(both, torch.cat(alone)):
        raise ModelError(
            f"{model.name} mixes the images of a batch before one of its masked layers, so members cannot share a "
            f"batch. Name layers that keep images along the first axis: layers=[...]."
        )


def _with_safe_links(ensemble: ImplicitEnsemble, run: partial[Tensor], x: Tensor) -> ImplicitEnsemble:
    """Without links if they change the first member's logits: a module may use a layer in ways that no hook sees."""
    pair = _on(ensemble.model, x[:2])
    expected = run(of_member(ensemble.masks, 0), pair)
    try:
        same = _same(_logits(ensemble[0](pair), ensemble.model), expected)
    except Exception:  # whatever a module raises when a layer is narrower than it expects
        same = False
    return ensemble if same else ImplicitEnsemble(ensemble.model, ensemble.masks, {})


def _full_precision(model: WrappedClassifier) -> torch.autocast:
    """No autocast, for comparisons that rounding must not decide."""
    return torch.autocast(model.device.type, enabled=False)


def _same(a: Tensor, b: Tensor) -> bool:
    close = _CLOSE if b.dtype in (torch.float32, torch.float64) else _CLOSE_HALF
    size = float(b.float().abs().max().clamp_min(1e-6))
    return a.shape == b.shape and float((a.float() - b.float()).abs().max()) <= close * size


def _on(model: WrappedClassifier, x: Tensor) -> Tensor:
    """The inputs on the model's device, in its precision."""
    like = next((p for p in model.module.parameters() if p.is_floating_point()), torch.empty(0))
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)


def _logits(out: object, model: WrappedClassifier) -> Float[Tensor, "n c"]:
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(f"{model.name} must return one tensor of logits; got {type(out).__name__}.")
    return logits
