"""A guard as one ONNX file: backbone, last layer, score and threshold, for any ONNX runtime.

    input  (n, ...)  finished inputs, as `model.transform` makes them; n is free
    output logits (n, c), uncertainty (n) float64, accept (n) bool; where the last layer is one nn.Linear also
           feature (n, d), head_weight (c, d), head_bias (c): what `dubito.load("onnx:FILE")` reads

Written by torch's exporter, which needs the packages onnx and onnxscript. Scores of logits and features can be written,
with all that they have learned: a guard by neighbours carries its bank. Those of members, and of gradients of more than
the last layer, cannot, and are named. Ranks, reasons and prediction sets stay in Python. How inputs are made (size,
mean, standard deviation ...), classes, guarantee, threshold and the model's fingerprint are in the file's metadata,
under `dubito.transform` and so on, as JSON.

Logits, and uncertainties made of them or of ranks, agree with PyTorch to 1e-4; large ones, such as a density, which is
a sum over all features, to 1e-4 of their value: a runtime rounds the last digit of a feature otherwise, and features
are then rounded as caches keep them. `accept` can differ only where the uncertainty is as close to the threshold.
"""

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from PIL import Image
from torch import Tensor, nn

from dubito import scores
from dubito.errors import ArtefactError, GuardError, MissingPackageError, ModelError, first_words
from dubito.guard.guarantee import CLASS
from dubito.models.from_onnx import BIAS, FEATURE, WEIGHT, fixed_input
from dubito.models.wrap import WrappedClassifier, sample_of
from dubito.probes import base_probe
from dubito.scores.ash import ash
from dubito.scores.fdbd import fdbd
from dubito.scores.gen import gen
from dubito.scores.kl_matching import kl_matching
from dubito.scores.last_layer_gradient import grad_norm, last_layer_gradient
from dubito.scores.mental import mental_log_odds
from dubito.scores.nci import nci
from dubito.scores.prototypes import typical_distance
from dubito.scores.react import react
from dubito.scores.residual import residual_norm
from dubito.scores.scale import scale
from dubito.scores.softmax import energy, entropy, margin, max_logit, max_probability
from dubito.scores.vim import vim
from dubito.storage import export, to_path
from dubito.types import Score

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

OUTPUTS = ("logits", "uncertainty", "accept", FEATURE, WEIGHT, BIAS)
_SIDE = 256


def export_onnx(guard: "Guard", to: str | Path, example: Tensor | None = None) -> Path:
    """Write a guard with its model as one file.

    Args:
        guard: With its model.
        to: The file.
        example: A batch of finished inputs, for their shape; by default what the model's transform makes of a picture.

    Raises:
        GuardError: A score has no such form, or the model cannot be traced; the message names it.
        ArtefactError: The file cannot be written, for instance because it would be larger than 2 GB.
    """
    try:
        import onnxscript  # noqa: F401, PLC0415 (optional)
        from onnx.helper import set_model_props  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            f"guard.export_onnx needs the packages onnx and onnxscript, of which {error.name} is not installed. "
            f"Install them: pip install 'dubito[onnx]'."
        ) from error
    path = to_path(to, "export_onnx: to")
    if path.is_dir():
        raise ArtefactError(f"'{path}' cannot be written (it is a folder). Pass a file, such as guard.onnx.")
    module = GuardModule(guard, example)
    proto = _exported(module).model_proto
    # What a runtime cannot see in the graph: how inputs are made, what is guaranteed, whose it is.
    metadata = {
        "guarantee": str(guard.guarantee),
        "threshold": guard.threshold.value,
        "groups": [one.to_json() for one in guard.groups],
        "missed": [one.to_json() for one in guard.missed],
        "gate": guard.selection.gate,
        "scores": guard.selection.combination.weights,
        "transform": guard.model.transform.describe() if guard.model else None,
        "classes": None if guard.classes is None else list(guard.classes),
        "model": {} if guard.provenance is None else guard.provenance.to_json(),
    }
    outputs = module(fixed_input(module.example.shape[1:]))
    if len(outputs) == len(OUTPUTS):
        metadata["sample"] = outputs[OUTPUTS.index(FEATURE)][0].tolist()
    texts = {f"dubito.{key}": one if isinstance(one, str) else json.dumps(one) for key, one in metadata.items()}
    try:
        set_model_props(proto, texts)
        return export(path, proto.SerializeToString())
    except ValueError as error:  # of protobuf, above 2 GB
        raise ArtefactError(f"'{path}' cannot be written as one file ({error}). Guard a smaller model.") from error


def _exported(module: "GuardModule") -> Any:
    """The graph by torch's exporter, which reports its steps on both outputs and in logs, and warns about itself."""
    quiet, logger = io.StringIO(), logging.getLogger("torch")
    level = logger.level
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            logger.setLevel(logging.CRITICAL)
            # Traced here, because torch.onnx would go on with a graph of fixed batches where one of any size fails.
            sizes = ({0: torch.export.Dim("n")},)
            graph = torch.export.export(module, (module.example,), dynamic_shapes=sizes, strict=False)
            names = list(OUTPUTS[: len(graph.graph_signature.user_outputs)])
            return torch.onnx.export(
                graph, input_names=["input"], output_names=names, dynamic_shapes=sizes, verbose=False
            )
    except Exception as error:  # of torch's exporters, or of the module's own code
        cause = error.__cause__ or error
        raise GuardError(
            f"guard.export_onnx: {module.of} cannot be written as an ONNX graph for batches of any size "
            f"({type(cause).__name__}: {first_words(cause)}). Its code must not choose its way by the values or the "
            f"number of inputs: look for `if`, `.item()`, `len(x)` (in place of x.shape[0]) or a fixed batch in its "
            f"forward."
        ) from error
    finally:
        logger.setLevel(level)


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
        if (precision := sample_of(model.module).dtype) != torch.float32:
            raise GuardError(
                f"guard.export_onnx: {model.name} computes in {str(precision).removeprefix('torch.')}; only float32 "
                f"agrees with PyTorch on every runtime. Wrap module.float(), and extract and fit with that."
            )
        self.of, self.example = model.name, _example(model, example)  # which also finds the last layer
        if guard.guarantee.per not in (None, CLASS):
            raise GuardError(
                f"guard.export_onnx: this guard has a threshold for every group of '{guard.guarantee.per}', which a "
                f"graph of images does not know. Fit a guard with per='class', or without per."
            )
        self._selection, self._threshold = guard.selection, guard.threshold.value
        of_classes = torch.tensor([one.value for one in guard.groups], dtype=torch.float64)
        self.register_buffer("limits", of_classes if guard.groups else None)
        self._missed = guard.missed
        density = guard.selection.roles.density if guard.selection.gate is not None else None
        names = dict.fromkeys([*guard.selection.combination.weights, *filter(None, [density])])
        chosen = {name: guard.selection.scores[name] for name in names}
        self._written = {name: as_graph(name, score, self) for name, score in chosen.items()}
        self._as_stored = base_probe(guard.provenance).as_stored
        self.backbone = copy.deepcopy(model.module).eval().requires_grad_(False)
        # The layer of the copy that stands where the last layer stands in the original.
        place = next((name for name, one in model.module.named_modules() if one is model.layer), None)
        layer = None if place is None else self.backbone.get_submodule(place)
        self._layer = layer if isinstance(layer, nn.Linear) else None
        features = any("feature" in score.needs for score in chosen.values())
        if self._layer is None and (features or model.output != "logits"):
            raise GuardError(
                f"guard.export_onnx: the last layer of {model.name} is not one plain nn.Linear, so its features "
                f"cannot be read inside a graph. Fit the guard with scores=['max_probability'] or another of logits, "
                f"and novel=0."
            )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits, uncertainty, accept; and feature, weight and bias of the last layer, if it is one."""
        last: tuple[Tensor, ...] = ()
        if self._layer is None:
            out = self.backbone(x)  # of a known kind, as the example has gone through it
            z, logits = x, out if isinstance(out, Tensor) else out.logits  # no score reads features here
        else:
            seen: list[Tensor] = []
            hook = self._layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            try:
                self.backbone(x)
            finally:
                hook.remove()
            z = seen[0].flatten(1)
            weight, bias = self._layer.weight, self._layer.bias
            logits = F.linear(z, weight, bias)
            last = (z, weight.clone(), weight.new_zeros(len(weight)) if bias is None else bias.clone())
            z = self._as_stored(z)
        u, novel = self._selection.uncertainty({name: score(z, logits) for name, score in self._written.items()})
        predicted = logits.argmax(1)
        limit = self.limits[predicted] if isinstance(self.limits, Tensor) else self._threshold
        for one in self._missed:
            novel = novel | ((predicted != one.label) & (logits.double().softmax(-1)[:, one.label] >= one.value))
        return logits, u, (u <= limit) & ~novel, *last


def _example(model: WrappedClassifier, example: object) -> Tensor:
    """A batch of inputs that the model has been tried with; by default what its transform makes of a grey picture."""
    if example is None:
        try:
            prepared = model.transform.prepare(Image.new("RGB", (_SIDE, _SIDE), (128, 128, 128)))
            example = model.transform.finish(prepared[None].to(model.device)).repeat_interleave(2, 0)
        except Exception as error:  # a user's transform may raise anything
            raise GuardError(
                f"guard.export_onnx: the transform of {model.name} makes no input of a picture ({error}). "
                f"Pass example=..., a batch of finished inputs."
            ) from error
    if not isinstance(example, Tensor) or example.ndim < 2 or not len(example):
        shape = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise GuardError(
            f"guard.export_onnx: example must be a tensor with a batch of finished inputs, such as (2, 3, h, w); "
            f"got {shape}. Pass the inputs that model.transform makes, stacked."
        )
    try:
        model.features(example[:1])
    except ModelError as error:
        raise GuardError(f"guard.export_onnx: example: {error}") from error
    return example


Written = Callable[[Tensor, Tensor], Tensor]
"""A score as operations on features (n, d) and logits (n, c)."""


def as_graph(name: str, score: Score, owner: nn.Module) -> Written:
    """A score as tensor operations; its own networks become parts of the module that is exported."""
    if isinstance(score, scores.Temperature) and isinstance(score.inner, tuple(_OF_LOGITS)):
        inner, scale = as_graph(name, score.inner, owner), score.temperature_
        return lambda z, logits: inner(z, logits.double() / scale)
    if isinstance(score, scores.UncertaintyHead):
        head = copy.deepcopy(score.module)
        owner.add_module("head", head)
        return lambda z, _: head(z.float()).double()
    if isinstance(score, scores.DEUP):
        predictor = copy.deepcopy(score.predictor)
        owner.add_module("predictor", predictor)
        return lambda z, logits: score.excess(z, logits, predictor)
    # A gradient of more than the last layer, and features before the non-linearity, are not in the graph.
    of_layers = isinstance(score, scores.GradNorm) and score.of is not None
    before = isinstance(score, scores.Density) and score.nonlinearity != "after"
    full = isinstance(score, scores.Laplace) and score.structure == "full"  # it works on as many rows as fit in memory
    for kind, make in (_OF_LOGITS | _OF_FEATURES).items():
        if isinstance(score, kind) and not (of_layers or before or full):
            return make(score)
    raise GuardError(
        f"guard.export_onnx: score '{name}' ({score.name}) cannot be written as an ONNX graph. Fit the guard with "
        f"those that can, by scores=[...]: {', '.join(WRITABLE)}."
    )


_OF_LOGITS: dict[type[Score], Callable[[Any], Written]] = {
    scores.MaxProbability: lambda _: lambda _z, logits: max_probability(logits),
    scores.Entropy: lambda _: lambda _z, logits: entropy(logits),
    scores.Margin: lambda _: lambda _z, logits: margin(logits),
    scores.MaxLogit: lambda _: lambda _z, logits: max_logit(logits),
    scores.Energy: lambda score: lambda _z, logits: energy(logits, score.temperature),
    scores.ScaledEntropy: lambda score: lambda _z, logits: entropy(score.scale * logits.double()),
    scores.GEN: lambda score: lambda _z, logits: gen(logits, score.gamma, score.top),
    scores.KLMatching: lambda score: lambda _z, logits: kl_matching(logits, score.log_typical_),
}
_OF_FEATURES: dict[type[Score], Callable[[Any], Written]] = {
    scores.GradNorm: lambda score: lambda z, logits: -grad_norm(z, logits, bias=score.bias),
    scores.LastLayerGradient: lambda score: lambda z, y: last_layer_gradient(z, y, score.weighting, bias=score.bias),
    scores.MentalModel: lambda score: lambda z, _: mental_log_odds(z, score.weights_),
    scores.Mahalanobis: lambda score: lambda z, _: score.gaussians.distances(z.double(), relative=score.relative),
    scores.MahalanobisPP: lambda score: lambda z, _: score.distance(z),
    scores.Prototypes: lambda one: lambda z, _: typical_distance(z, one.prototypes_, one.typical_),
    scores.NNGuide: lambda score: lambda z, logits: score.guided(z, logits, _most_similar),
    scores.Laplace: lambda score: score.information,
    scores.VBLL: lambda score: lambda z, _: score.information(z),
    scores.Neighbours: lambda score: lambda z, _: score.distance(z, _most_similar),
    scores.Density: lambda score: lambda z, _: -_log_density(z.double(), score),
    scores.Residual: lambda score: lambda z, _: residual_norm(z, score.origin_, score.residual_),
    scores.ViM: lambda one: lambda z, y: vim(residual_norm(z, one.origin_, one.residual_), y, one.alpha_),
    scores.FDBD: lambda score: lambda z, y: fdbd(z, y, score.mean_, score.share_),
    scores.NCI: lambda score: lambda z, y: nci(z, y, score.mean_, score.mean_logit_, score.alpha_),
    scores.ReAct: lambda score: lambda z, _: react(z, score.weight_, score.bias_, score.threshold_),
    scores.SCALE: lambda score: lambda z, y: scale(z, y, score.bias_, score.percentile),
    scores.ASH: lambda score: lambda z, _: ash(z, score.weight_, score.bias_, score.percentile),
}
_WITH_MODULES = (scores.Temperature.name, scores.DEUP.name, scores.UncertaintyHead.name)
WRITABLE = (*(kind.name for kind in _OF_LOGITS | _OF_FEATURES), *_WITH_MODULES)
"""Names of the scores that a graph can hold: a temperature of one of logits, a density of features as they are read."""


def _most_similar(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `neighbours.most_similar`, by products with the whole bank in place of faiss."""
    products, index = (queries.float() @ bank.T).topk(k, dim=-1)
    return products, index


def _log_density(z: Tensor, score: scores.Density) -> Tensor:
    """As `Density.score_batch`, without checks, and short cuts for full covariances, that depend on the rows."""
    mixture = score.mixture
    z = (z if score.space == "z" else (z + score.offset).log())[:, score.neurons_]
    if mixture.covariance != "full":
        return mixture.log_density(z)
    parts = torch.einsum("nd,kde->nke", z, mixture.factors) - torch.einsum("kd,kde->ke", mixture.means, mixture.factors)
    return (mixture._constants() - 0.5 * parts.square().sum(-1)).logsumexp(1)
