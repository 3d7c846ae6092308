"""A guard as one ONNX file: backbone, last layer, score and threshold, for any ONNX runtime.

    input  (n, ...)  finished inputs, as `model.transform` makes them; n is free
    output logits (n, c), uncertainty (n) float64, accept (n) bool

Written by torch's exporter, which needs the packages onnx and onnxscript.

Scores of logits and features can be written, with all that they have learned: a guard by neighbours carries its bank.
Those of members, and of gradients of more than the last layer, cannot, and are named. Ranks, reasons and prediction
sets stay in Python.

How inputs are made (size, mean, standard deviation ...), classes, promise, threshold and the model's fingerprint are in
the file's metadata, under `dubito.transform` and so on, as JSON.

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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from PIL import Image
from torch import Tensor, nn

from dubito.errors import ArtefactError, GuardError, MissingPackageError, ModelError
from dubito.guard.onnx_scores import as_graph
from dubito.models.wrap import WrappedClassifier, sample_of
from dubito.probes import base_probe
from dubito.storage import write_file

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

OUTPUTS = ("logits", "uncertainty", "accept")
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
    _check_packages()
    path = Path(to)
    if path.is_dir():
        raise ArtefactError(f"'{path}' cannot be written (it is a folder). Give a file, such as guard.onnx.")
    proto = _exported(GuardModule(guard, example)).model_proto
    try:
        _tell(proto, guard)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, proto.SerializeToString())
    except OSError as error:
        raise ArtefactError(f"'{path}' cannot be written ({error.strerror}). Give another place.") from error
    except ValueError as error:  # of protobuf, above 2 GB
        raise ArtefactError(f"'{path}' cannot be written as one file ({error}). Guard a smaller model.") from error
    return path


def _tell(proto: Any, guard: "Guard") -> None:
    """What a runtime cannot see in the graph, as metadata: how inputs are made, what is promised, whose it is."""
    from onnx.helper import set_model_props  # noqa: PLC0415 (optional)

    told = {
        "promise": str(guard.promise),
        "threshold": guard.threshold.value,
        "gate": guard.gate,
        "scores": guard.combination.weights,
        "transform": guard.model.transform.describe() if guard.model else None,
        "classes": None if guard.classes is None else list(guard.classes),
        "model": guard.provenance.to_json() if guard.provenance else {},
    }
    props = {f"dubito.{key}": value if isinstance(value, str) else json.dumps(value) for key, value in told.items()}
    set_model_props(proto, props)


def _exported(module: "GuardModule") -> Any:
    """The graph by torch's exporter, which tells its steps on both outputs, and warns of what it does by itself."""
    quiet = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
            _without_logs("torch"),
        ):
            warnings.simplefilter("ignore")
            # Traced here, because torch.onnx would go on with a graph of fixed batches where one of any size fails.
            sizes = ({0: torch.export.Dim("n")},)
            graph = torch.export.export(module, (module.example,), dynamic_shapes=sizes, strict=False)
            return torch.onnx.export(
                graph, input_names=["input"], output_names=list(OUTPUTS), dynamic_shapes=sizes, verbose=False
            )
    except Exception as error:  # of torch's exporters, or of the module's own code
        cause = error.__cause__ or error
        raise GuardError(
            f"guard.export_onnx: {module.of} cannot be written as an ONNX graph for batches of any size "
            f"({type(cause).__name__}: {_first_line(cause)}). Its code must not choose its way by the values or the "
            f"number of inputs: look for `if`, `.item()`, `len(x)` (in place of x.shape[0]) or a fixed batch in its "
            f"forward."
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


@contextlib.contextmanager
def _without_logs(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
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
        self.of, self.example = model.name, _example(model) if example is None else example
        _check_example(model, self.example)  # which also tells where the last layer is
        names = [*guard.combination.weights, *([guard.roles.density] if guard.gate is not None else [])]
        scores = {name: guard.scores[name] for name in dict.fromkeys(filter(None, names))}
        self._written = {name: as_graph(name, score, self) for name, score in scores.items()}
        self._combination, self._grids = guard.combination, guard.grids
        self._threshold, self._density, self._gate = guard.threshold.value, guard.roles.density, guard.gate
        self._base = base_probe(guard.provenance)
        self._features = any("feature" in score.needs for score in scores.values())
        self.backbone = copy.deepcopy(model.module).eval().requires_grad_(False)
        self._layer = None if model.layer is None else _same_place(model.module, self.backbone, model.layer)
        if self._layer is None and (self._features or model.output != "logits"):
            raise GuardError(
                f"guard.export_onnx: the last layer of {model.name} is not one plain nn.Linear, so that its features "
                f"cannot be read inside a graph. Fit the guard with scores=['max_probability'] or another of logits, "
                f"and novel=0."
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
            out = self.backbone(x)  # of a known kind, as the example has gone through it
            return None, out if isinstance(out, Tensor) else out.logits
        seen: list[Tensor] = []
        hook = self._layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.backbone(x)
        finally:
            hook.remove()
        z = seen[0].flatten(1)
        return self._base.as_stored(z), F.linear(z, self._layer.weight, self._layer.bias)


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


def _check_example(model: WrappedClassifier, example: object) -> None:
    if not isinstance(example, Tensor) or example.ndim < 2 or not len(example):
        came = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise GuardError(
            f"guard.export_onnx: example must be a tensor with a batch of finished inputs, such as (2, 3, h, w); "
            f"{came} came. Give model.transform's inputs, stacked."
        )
    try:
        model.features(example[:1])
    except ModelError as error:
        raise GuardError(f"guard.export_onnx: example: {error}") from error


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
