"""The pre-activation probe: features before the last non-linearity, not cut off at zero.

    z = p(f(a)),   pre_activation = p(a)      f: the last activation of the module, p: the pool or flatten after it

Pearce et al. (2021), appendix C.5, fit densities to features before and after the non-linearity. The activation is
found by watching one pass of two images, as the last one whose pooled output is the model's own feature; every batch is
checked against that again. A model whose features do not come from an activation, such as a transformer that ends with
a normalisation, has no pre-activation, which is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dubito.choices import Precision
from dubito.errors import ModelError
from dubito.probes.forward import stored
from dubito.types import Classifier, Inputs, Json, Targets
from dubito.validate import check_choice

Pool = Callable[[Tensor], Tensor]
_ACTIVATIONS = frozenset(
    {getattr(F, name) for name in ("relu", "relu_", "relu6", "hardtanh", "leaky_relu", "prelu", "elu", "selu", "celu")}
    | {getattr(F, name) for name in ("gelu", "silu", "mish", "hardswish", "softplus", "softsign", "tanh", "sigmoid")}
    | {getattr(torch, name) for name in ("relu", "relu_", "tanh", "sigmoid", "clamp")}
    | {getattr(Tensor, name) for name in ("relu", "relu_", "tanh", "sigmoid", "clamp", "clamp_")}
)
_POOLS: dict[str, Pool] = {
    "flatten": lambda a: a.flatten(1),
    "mean of the map": lambda a: a.mean((2, 3)),
    "maximum of the map": lambda a: a.amax((2, 3)),
    "mean of the map, channels last": lambda a: a.mean((1, 2)),
    "mean of the tokens": lambda a: a.mean(1),
    "first token": lambda a: a[:, 0],
}
_AXES = {"flatten": (2, 4), "mean of the tokens": (3,), "first token": (3,)}
_PLACES: "WeakKeyDictionary[Any, tuple[int, str]]" = WeakKeyDictionary()
"""By model: the number of the activation, and the pool. Not in the probe, which is pickled for other processes."""


@final
@dataclass(frozen=True)
class PreActivation:
    """Features before the last non-linearity, in the column `pre_activation`.

    Attributes:
        dtype: Precision on disk. float16 keeps three digits and values up to 65,504.
    """

    dtype: Precision = "float16"

    name = "pre_activation"
    price = "1 forward pass"
    uses_labels = False

    def __post_init__(self) -> None:
        check_choice(self.dtype, get_args(Precision), by="pre_activation", what="dtype")

    def run(self, model: Classifier, x: Inputs, label: Targets | None) -> Mapping[str, Tensor]:  # noqa: ARG002
        """The column `pre_activation` (n, d), as wide as the feature."""
        if model not in _PLACES:
            _PLACES[model] = _find(model, x[:2])
        number, pool = _PLACES[model]
        with _Watch(number, _POOLS[pool]) as watch:
            z = model.features(x)
        before, after = watch.pooled.get(number, (None, None))
        if before is None or after is None or not _same(after, z):
            raise ModelError(
                "pre_activation: the model does not call its activations in the same order for every batch, so the one "
                "before its features cannot be followed. Extract without this probe."
            )
        repair = "PreActivation(dtype='float32')"
        return {"pre_activation": stored(before, self.dtype, "pre_activation: values", repair)}

    def settings(self) -> Json:
        """The precision on disk."""
        return {"dtype": self.dtype}


class _Watch(TorchFunctionMode):
    """Pools what one activation, or without a number every one, reads and returns, before anything is overwritten."""

    def __init__(self, number: int | None = None, pool: Pool = Tensor.detach) -> None:
        super().__init__()
        self.pooled: dict[int, tuple[Tensor, Tensor]] = {}
        self._number, self._pool, self._count = number, pool, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        number = self._count
        self._count += func in _ACTIVATIONS
        if func not in _ACTIVATIONS or self._number not in (None, number):
            return func(*args, **(kwargs or {}))
        before = self._pool(args[0] if args else (kwargs or {})["input"]).clone()
        output = func(*args, **(kwargs or {}))
        self.pooled[number] = before, self._pool(output).clone()
        return output


def _find(model: Classifier, x: Inputs) -> tuple[int, str]:
    """The number of the last activation whose pooled output is the feature, and the name of that pool."""
    model.features(x)  # a model that has not seen a batch yet analyses itself first, in more than one pass
    with _Watch() as watch:
        z = model.features(x)
    for number, (_, output) in reversed(watch.pooled.items()):
        for name, pool in _POOLS.items():
            if output.dim() in _AXES.get(name, (4,)) and _same(pool(output), z):
                return number, name
    raise ModelError(
        f"pre_activation: none of the {len(watch.pooled)} activations that the model calls outputs its features, "
        f"pooled or as they are, so there is no last non-linearity. Use the features themselves."
    )


def _same(one: Tensor, z: Tensor) -> bool:
    return one.shape == z.shape and torch.allclose(one.to(z), z, rtol=1e-3, atol=1e-4 * float(z.abs().max()))
