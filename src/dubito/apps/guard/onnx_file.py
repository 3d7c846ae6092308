"""A guard as one ONNX file: backbone, last layer, score and threshold, for any ONNX runtime.

    input  (n, ...)  finished inputs, as `model.transform` makes them; n is free
    output logits (n, c), uncertainty (n) float64, accept (n) bool

Written by torch's exporter, which needs the packages onnx and onnxscript.

Scores of logits, of the uncertainty head, and densities can be written; those of members, gradients and neighbours
cannot, and are named. Ranks, reasons and prediction sets stay in Python.
"""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from PIL import Image
from torch import Tensor, nn

from dubito.apps.guard.asking import as_kept
from dubito.errors import ArtefactError, GuardError, MissingPackageError
from dubito.models.wrap import WrappedClassifier, answer_of
from dubito.scores import Cool, Density, Energy, Entropy, Margin, MaxLogit, MaxProbability, Temperature, UncertaintyHead
from dubito.scores._gaussians import Mixture
from dubito.scores.softmax import energy, entropy, margin, max_logit, max_probability
from dubito.types import Score

if TYPE_CHECKING:
    from dubito.apps.guard.guard import Guard

OUTPUTS = ("logits", "uncertainty", "accept")
_SIDE = 256

Written = Callable[[Tensor | None, Tensor], Tensor]
"""A score as operations on features (n, d), where there are any, and logits (n, c)."""


def export_onnx(guard: "Guard", to: str | Path, example: Tensor | None = None) -> Path:
    """Write a guard with its model as one file.

    Args:
        guard: With its model.
        to: The file.
        example: A batch of finished inputs, for their shape; by default what the model's transform makes of a picture.

    Raises:
        GuardError: A score has no such form; the message names it.
    """
    _check_packages()
    module = GuardModule(guard, example)
    path = Path(to)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The exporter tells its steps on standard output, and warns of what it does by itself.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (module.example,),
                path,
                dynamo=True,
                input_names=["input"],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: torch.export.Dim("n")},),
                external_data=False,
                verbose=False,
            )
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be written ({error.strerror}). Give another place.") from error
    return path


class GuardModule(nn.Module):
    """From finished inputs to logits, uncertainty and acceptance: what is exported, and runs in PyTorch too."""

    def __init__(self, guard: "Guard", example: Tensor | None = None) -> None:
        super().__init__()
        model = guard.model
        if not isinstance(model, WrappedClassifier):
            raise GuardError(
                "guard.export_onnx needs the model. Load it with the guard: Guard.load(path, model), model from "
                "dubito.load or dubito.wrap."
            )
        self.example = _example(model) if example is None else example
        model.features(self.example[:1])  # so that the last layer is known
        names = [*guard.combination.weights, *([guard.roles.density] if guard.gate is not None else [])]
        scores = {name: guard.scores[name] for name in dict.fromkeys(filter(None, names))}
        self._written = {name: _written(name, score, self) for name, score in scores.items()}
        self._combination, self._grids = guard.combination, guard.grids
        self._threshold, self._density, self._gate = guard.threshold.value, guard.roles.density, guard.gate
        self._name, self._features = model.name, any("feature" in score.needs for score in scores.values())
        self.backbone = copy.deepcopy(model.module).eval().requires_grad_(False)
        self._layer = None if model.layer is None else _same_place(model.module, self.backbone, model.layer)
        if self._layer is None and (self._features or model.output != "logits"):
            raise GuardError(
                f"guard.export_onnx: the last layer of {model.name} is not one plain nn.Linear, so that its features "
                f"cannot be read inside a graph. Fit the guard with scores=['max_probability'] or another of logits."
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, uncertainty, accept."""
        z, logits = self._said(x)
        scored = {name: score(z, logits) for name, score in self._written.items()}
        u = self._combination.of(scored, self._grids)
        accept = u <= self._threshold
        if self._gate is not None and self._density is not None:
            accept = accept & (scored[self._density] <= self._gate)
        return logits, u, accept

    def _said(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        if self._layer is None:
            return None, answer_of(self.backbone(x), len(x), self._name)
        seen: list[Tensor] = []
        hook = self._layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.backbone(x)
        finally:
            hook.remove()
        z = seen[0].flatten(1)
        return as_kept(z), F.linear(z, self._layer.weight, self._layer.bias)


def _written(name: str, score: Score, owner: nn.Module) -> Written:
    """A score as tensor operations; its own networks become parts of the module that is exported."""
    if isinstance(score, Temperature) and isinstance(score.score_of, tuple(_OF_LOGITS)):
        inner, scale = _written(name, score.score_of, owner), score.temperature_
        return lambda z, logits: inner(z, logits.double() / scale)
    if isinstance(score, UncertaintyHead):
        head = copy.deepcopy(score.module)
        owner.add_module("head", head)
        return lambda z, _: head(_there(z).float()).double()
    if isinstance(score, Density) and score.nonlinearity == "after":
        mixture, neurons = score.mixture, score.neurons_
        return lambda z, _: -_log_density(mixture, _prepared(_there(z), score)[:, neurons])
    for kind, make in _OF_LOGITS.items():
        if isinstance(score, kind):
            return make(score)
    raise GuardError(
        f"guard.export_onnx: score '{name}' ({score.name}) cannot be written as an ONNX graph. Fit the guard with "
        f"others, such as scores=['max_probability', 'head'], and novel=0 to leave the density out."
    )


_OF_LOGITS: dict[type[Score], Callable[[Any], Written]] = {
    MaxProbability: lambda _: lambda _z, logits: max_probability(logits),
    Entropy: lambda _: lambda _z, logits: entropy(logits),
    Margin: lambda _: lambda _z, logits: margin(logits),
    MaxLogit: lambda _: lambda _z, logits: max_logit(logits),
    Energy: lambda score: lambda _z, logits: energy(logits, score.temperature),
    Cool: lambda score: lambda _z, logits: entropy(score.scale * logits.double()),
}


def _log_density(mixture: Mixture, z: Tensor) -> Tensor:
    """As `Mixture.log_density`, whose short cuts for full covariances depend on the rows, which a graph cannot."""
    if mixture.covariance != "full":
        return mixture.log_density(z)
    parts = torch.einsum("nd,kde->nke", z, mixture.factors) - torch.einsum("kd,kde->ke", mixture.means, mixture.factors)
    constants = mixture._constants()
    return (constants - 0.5 * parts.square().sum(-1)).logsumexp(1)


def _prepared(z: Tensor, score: Density) -> Tensor:
    """As the density sees features, without the checks that a graph cannot make."""
    return z.double() if score.space == "z" else (z.double() + score.offset).log()


def _there(z: Tensor | None) -> Tensor:
    assert z is not None, "scores of features are refused where there are none"  # noqa: S101 (our own invariant)
    return z


def _example(model: WrappedClassifier) -> Tensor:
    try:
        prepared = model.transform.prepare(Image.new("RGB", (_SIDE, _SIDE), (128, 128, 128)))
        one = model.transform.finish(prepared[None].to(model.device))
    except Exception as error:  # a user's transform may raise anything
        raise GuardError(
            f"guard.export_onnx: the transform of {model.name} makes no input of a picture ({error}). "
            f"Give example=..., a batch of finished inputs."
        ) from error
    return torch.cat([one, one])


def _same_place(module: nn.Module, other: nn.Module, layer: nn.Module) -> nn.Linear | None:
    """The layer of a copy that stands where another one stands in the original."""
    name = next((name for name, one in module.named_modules() if one is layer), None)
    found = None if name is None else other.get_submodule(name)
    return found if isinstance(found, nn.Linear) else None


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401, PLC0415 (optional)
        import onnxscript  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingPackageError(
            f"guard.export_onnx needs the packages onnx and onnxscript, of which {error.name} is not installed. "
            f"Install them: pip install 'dubito[onnx]'."
        ) from error
