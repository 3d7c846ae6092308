"""Classifiers of your own: an nn.Module, or a function that makes one, in a Python file or an installed module.

    python:my_models.py:make         a file, and a name in it
    python:my_package.models:make    a module as `import` knows it, and a name in it

This is code, and it is executed: never give a file that you do not trust. A file of weights is never executed, here as
elsewhere. A Python file runs anew at every load, under a module name that nothing else imports; its folder (for a
module, the one that you are in) can be imported from while the model is made, and not afterwards.
"""

import copy
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dubito.errors import ModelError
from dubito.models._running import executed, failed, importable, imported
from dubito.models.checkpoint import put_weights, read_weights
from dubito.models.load import Weights, first_line
from dubito.models.wrap import WrappedClassifier, eager, wrap

_MODELS = (nn.Module, WrappedClassifier)


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """The module that stands under a name of your code, or what the function there returns, wrapped.

    Args:
        name: `FILE.py:NAME` or `PACKAGE.MODULE:NAME`. The code is executed: it must be your own, or trusted.
        weights: "pretrained" or None: those that the module has. A path: the tensors of that file instead.
        device: "cpu", "cuda", "mps"; by default where the module is.
        options: Arguments of the function, which is called without any otherwise.
    """
    place, entry = _split(name)
    file = _file(place)
    with importable(Path.cwd() if file is None else file.parent):
        found = _named(imported(place) if file is None else executed(file, place), entry, place)
        made = _made(found, options, entry, place)
    model = made if isinstance(made, WrappedClassifier) else wrap(made)
    # What stands in an imported module belongs to everybody who imports it.
    module = copy.deepcopy(model.module) if made is found and file is None else model.module
    if weights not in ("pretrained", None):
        put_weights(eager(module), read_weights(weights), str(weights))
    return wrap(
        module.eval(),
        transform=model.transform,
        classes=model._count if model.classes is None else model.classes,
        head=model._head,
        output=model.output,
        device=device,
        name=f"python:{name}",
    )


def _split(name: str) -> tuple[str, str]:
    """Where, and what there. A path may hold colons, a name may not."""
    place, _, entry = name.rpartition(":")
    dotted = all(part.isidentifier() for part in place.split("."))
    if entry.isidentifier() and (place.endswith(".py") or dotted):
        return place, entry
    bare = name.removesuffix("()")
    inner, _, last = bare.rpartition(":")
    if name.endswith(".py"):
        guess = f" Try 'python:{name}:make', if its function is called make."
    elif bare != name:
        guess = f" Without parentheses: 'python:{bare}'."
    elif inner and Path(f"{inner}.py").is_file():
        guess = f" Did you mean 'python:{inner}.py:{last}'?"
    else:
        guess = ""
    raise ModelError(
        f"load: a model of your own is named 'python:FILE.py:FUNCTION' or 'python:PACKAGE.MODULE:FUNCTION'; "
        f"'python:{name}' came.{guess}"
    )


def _file(place: str) -> Path | None:
    return Path(place).expanduser().resolve() if place.endswith(".py") else None


def _named(home: ModuleType, entry: str, place: str) -> Any:
    """What stands under the name: a model, or a callable that makes one."""
    if not hasattr(home, entry):
        known = [name for name, value in vars(home).items() if inspect.isfunction(value) or isinstance(value, _MODELS)]
        own = [name for name in known if getattr(vars(home)[name], "__module__", None) == home.__name__] or known
        near = get_close_matches(entry, known, n=3, cutoff=0.5)
        hint = (
            f"Nearest: {', '.join(near)}."
            if near
            else f"It has {', '.join(own[:4])}."
            if own
            else "There is no function in it; write one that returns the module."
        )
        raise ModelError(f"load: '{place}' has no '{entry}'. {hint}")
    found = getattr(home, entry)
    if inspect.isclass(found):
        raise ModelError(
            f"load: '{entry}' of '{place}' is a class; an nn.Module or a function that makes one is expected. Write "
            f"`def make(): return {entry}(...)` there, or `model = {entry}(...)`, and give that name."
        )
    if not callable(found) and not isinstance(found, _MODELS):
        raise ModelError(
            f"load: '{entry}' of '{place}' must be an nn.Module or a function that makes one; "
            f"{type(found).__name__} came. Give the name of such a function."
        )
    return found


def _made(found: Any, options: dict[str, Any], entry: str, place: str) -> nn.Module | WrappedClassifier:
    """A model as it is; of a function, what it returns."""
    if isinstance(found, _MODELS):
        if options:
            raise ModelError(
                f"load: '{entry}' of '{place}' is a module that is made already; got {', '.join(options)} as well. "
                f"Leave options out, or give a function that takes them."
            )
        return found
    _check_arguments(found, options, f"{entry}() of '{place}'")
    try:
        made = found(**options)
    except (Exception, SystemExit) as error:
        raise failed(f"{entry}() of '{place}'", error) from error
    if isinstance(made, _MODELS):
        return made
    raise ModelError(
        f"load: {entry}() of '{place}' must return an nn.Module, or what dubito.wrap makes of one; {_told(made)}"
    )


def _check_arguments(function: Callable[..., Any], options: dict[str, Any], what: str) -> None:
    """Before the call, so that no TypeError from inside the function is taken for one of its arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C do not tell
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        one = inspect.Parameter
        wanted = [
            name
            for name, told in signature.parameters.items()
            if told.default is one.empty
            and told.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            and (name not in options or told.kind is one.POSITIONAL_ONLY)
        ]
        if not wanted:
            raise ModelError(
                f"load: {what} cannot be called with {', '.join(options)} ({first_line(error)}). Give options that it "
                f"takes: {', '.join(signature.parameters) or 'none'}."
            ) from error
        raise ModelError(
            f"load: {what} wants {', '.join(wanted)}; it is called with {', '.join(options) or 'no arguments'}. Give "
            f"its arguments defaults, or call it in a function without any: `def make(): return ...`."
        ) from error


def _told(made: object) -> str:
    """What came instead of a module, and what to do."""
    if made is None:
        return "nothing (None) came. End it with `return model`."
    if inspect.isclass(made):
        return f"the class {made.__name__} came. Call it: `return {made.__name__}(...)`."
    if isinstance(made, dict) and made and all(isinstance(value, Tensor) for value in made.values()):
        return (
            f"a state dict of {len(made)} tensors came. Return the module; tensors may come from a file, with "
            f"weights=PATH (--weights PATH)."
        )
    if isinstance(made, tuple | list):
        return (
            f"a {type(made).__name__} came ({', '.join(type(one).__name__ for one in made[:4])}). Return the module "
            f"alone; dubito.wrap(module, transform=..., classes=...) adds what belongs to it."
        )
    return f"{type(made).__name__} came. Return the module itself."
