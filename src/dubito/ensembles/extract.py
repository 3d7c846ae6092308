"""Members hidden in one model: sub-models that each solve the task, with masks as different as possible.

Implicit ensemble extraction of Kirsch (2024, section 4.1 and A.4): masks on rows and columns of linear layers are
learned by cross-entropy on training images, and kept apart by the mutual information between mask and member. The
model's weights never change. What the paper leaves open is in `MaskRecipe`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from dubito.cache.runner import kept_memory
from dubito.ensembles._layers import chosen_layers, linear_layers, spans_of
from dubito.ensembles._masked import Masked
from dubito.ensembles._training import checked_labels, random_masks, rows_each, shuffled, trained_masks
from dubito.ensembles._watch import Link, Watch
from dubito.ensembles.implicit import ImplicitEnsemble, classifier_of, plain_module
from dubito.ensembles.masks import LayerMasks, by_layer, of_member
from dubito.ensembles.recipe import MaskRecipe
from dubito.errors import ModelError, TableError
from dubito.models.frozen import KeptBuffers, frozen
from dubito.models.wrap import WrappedClassifier
from dubito.table import to_tensor
from dubito.types import Classifier, finite

_CLOSE, _CLOSE_HALF = 1e-3, 5e-2
"""How far two ways to compute the same logits may differ, relative to their size; and in half precision."""


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
    """Find members in a model, which is left as it is. Under torch.autocast, products are in its precision.

    Args:
        model: A module that gives logits, or a Classifier.
        x: Inputs as the module takes them, of images like those it was trained on.
        y: Their classes.
        members: How many.
        layers: Names of linear layers, or patterns such as "blocks.*.mlp.fc?"; None: all that the model calls. Rows of
            a layer with as many outputs as there are classes are never masked, its columns are.
        recipe: What the paper leaves open.
        seed: Of the first masks and the order of images: the same seed gives the same members.
        progress: Show a bar where somebody watches.

    >>> _ = torch.manual_seed(0)
    >>> module = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> found = extract_members(module, torch.randn(60, 4), torch.arange(60) % 3, members=2, recipe=MaskRecipe(steps=5))
    >>> len(found), tuple(found[0](torch.randn(7, 4)).shape), found[0][2].in_features < 32
    (2, (7, 3), True)
    """
    recipe, model = recipe or MaskRecipe(), classifier_of(model)
    module, y = plain_module(model), to_tensor(y, "extract_members: y")
    if len(x) != len(y):
        raise TableError(f"extract_members: x has {len(x)} rows, y has {len(y)}. Give one class an image.")
    each = rows_each(len(x), members, recipe)
    buffers = KeptBuffers(module)
    try:
        with frozen(module), kept_memory():
            with _full_precision(model):
                watch, classes = _watched(model, module, x)
                chosen = chosen_layers(module, layers, watch.called, model.name)
                checked_labels(y, classes, "extract_members")
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
                return _checked(ImplicitEnsemble(model, by_layer(q, spans), links), run, x)
    finally:
        buffers.restore()


def _watched(model: WrappedClassifier, module: nn.Module, x: Tensor) -> tuple[Watch, int]:
    """What one pass calls, and how many classes there are."""
    pair = _on(model, x[:2])
    said = model.logits(model.features(pair))
    watch = Watch(linear_layers(module))
    with watch:
        answer = module(pair)
    logits = finite(_logits(answer, model), f"extract_members: logits of {model.name} for the first inputs")
    if not _same(logits, said):
        raise ModelError(
            f"{model.name} must return logits; what it returns is not what its last layer gives. Masks are learned by "
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
    """Two members in one batch must say what each says alone: otherwise rows are not where they are taken for."""
    pair = _on(model, x[:2])
    both = run(masks, torch.cat([pair, pair]))
    alone = [run(of_member(masks, member), pair) for member in range(2)]
    if not _same(both, torch.cat(alone)):
        raise ModelError(
            f"{model.name} mixes the images of a batch before one of its masked layers, so members cannot share a "
            f"batch. Name layers that keep images along the first axis: layers=[...]."
        )


def _checked(found: ImplicitEnsemble, run: partial[Tensor], x: Tensor) -> ImplicitEnsemble:
    """With links only if the first member still says the same: a module may use a layer in ways that nobody sees."""
    pair = _on(found.model, x[:2])
    said = run(of_member(found.masks, 0), pair)
    try:
        same = _same(_logits(found[0](pair), found.model), said)
    except Exception:  # whatever a module raises when a layer is narrower than it thinks
        same = False
    return found if same else ImplicitEnsemble(found.model, found.masks, dict[str, Link]())


def _full_precision(model: WrappedClassifier) -> torch.autocast:
    """For comparisons, which rounding must not decide."""
    return torch.autocast(model.device.type, enabled=False)


def _same(a: Tensor, b: Tensor) -> bool:
    close = _CLOSE if b.dtype in (torch.float32, torch.float64) else _CLOSE_HALF
    size = float(b.float().abs().max().clamp_min(1e-6))
    return a.shape == b.shape and float((a.float() - b.float()).abs().max()) <= close * size


def _on(model: WrappedClassifier, x: Tensor) -> Tensor:
    """Where the model is, in its precision."""
    like = next((p for p in model.module.parameters() if p.is_floating_point()), torch.empty(0))
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)


def _logits(out: object, model: WrappedClassifier) -> Float[Tensor, "n c"]:
    answer = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(answer, Tensor):
        raise ModelError(f"{model.name} must return one tensor of logits; got {type(out).__name__}.")
    return answer
