"""Classifiers of your own: an nn.Module, or a function that makes one, in a Python file or an installed module.

    python:my_models.py:make         a file, and a name in it
    python:my_package.models:make    a module as `import` knows it, and a name in it

This is code, and it is executed: never name a file that you do not trust. A file of weights is never executed. A Python
file runs anew at every load, under a module name that nothing else imports; its folder (for a module, the one that you
are in) can be imported from while the model is made, and not afterwards.
"""

import copy
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from dubito.choices import nearest
from dubito.errors import ModelError, first_words
from dubito.models.transform import NewTransform, changed_transform
from dubito.models.wrap import WrappedClassifier, wrap

_MODELS = (nn.Module, WrappedClassifier)
_INSTEAD = {
    type(None): "End it with `return model`.",
    type: "Call the class, and return what it makes.",
    dict: "Return the module; weights=PATH loads tensors from a file.",
    tuple: "Return the module alone; dubito.wrap(module, transform=..., classes=...) adds what belongs to it.",
    object: "Return the module itself.",
}
"""What to do, by what a function has returned instead of a model."""
_PRIVATE = "_dubito_file_"
"""How the module names of files begin; what they hold can be found under them, as torch.export needs it."""
_NEIGHBOURS: dict[str, Path] = {}
"""Modules that such code has imported from beside it, by their first name, and from which folder."""


def build(
    name: str,
    options: dict[str, Any],
    *,
    pretrained: bool,  # noqa: ARG001 (as of any source)
    transform: NewTransform | None = None,
) -> dict[str, Any]:
    """The module that stands under a name of your code, or what the function there returns, as arguments of `wrap`.

    Args:
        name: `FILE.py:NAME` or `PACKAGE.MODULE:NAME`. The code is executed: it must be your own, or trusted.
        options: Arguments of the function, which is called without any otherwise.
        pretrained: Plays no part: the module keeps the weights that it has.
        transform: Another one than the module was wrapped with.
    """
    place, _, entry = name.rpartition(":")  # a path may hold colons, a name may not
    dotted = all(part.isidentifier() for part in place.split("."))
    if not entry.isidentifier() or not (place.endswith(".py") or dotted):
        raise ModelError(
            f"load: a model of your own is named 'python:FILE.py:FUNCTION' or 'python:PACKAGE.MODULE:FUNCTION'; "
            f"got 'python:{name}'. Keep the ending .py of a file, and leave out parentheses behind the function."
        )
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    with importable(Path.cwd() if file is None else file.parent):
        entry_point = _named(imported(place) if file is None else executed(file, place), entry, place)
        made = _made(entry_point, options, entry, place)
    model = made if isinstance(made, WrappedClassifier) else wrap(made)
    # What stands in an imported module belongs to everybody who imports it.
    shared = made is entry_point and file is None
    settings = model.settings()
    settings["transform"] = changed_transform(settings["transform"], transform, f"python:{name}")
    return {"module": copy.deepcopy(model.module) if shared else model.module, **settings}


def _named(home: ModuleType, entry: str, place: str) -> Any:
    """What stands under the name: a model, or a callable that makes one."""
    if not hasattr(home, entry):
        fitting = [name for name, one in vars(home).items() if inspect.isfunction(one) or isinstance(one, _MODELS)]
        own = [name for name in fitting if getattr(getattr(home, name), "__module__", None) == home.__name__]
        near = ", ".join(nearest(entry, own or fitting, most=4, cutoff=0.5)) or "none; write a function that returns it"
        raise ModelError(f"load: '{place}' has no '{entry}'. Nearest: {near}.")
    entry_point = getattr(home, entry)
    if inspect.isclass(entry_point) or not (callable(entry_point) or isinstance(entry_point, _MODELS)):
        got = "a class" if inspect.isclass(entry_point) else type(entry_point).__name__
        raise ModelError(
            f"load: '{entry}' of '{place}' must be an nn.Module or a function that makes one; got {got}. "
            f"Write `def make(): return ...` there, and pass that name."
        )
    return entry_point


def _made(entry_point: Any, options: dict[str, Any], entry: str, place: str) -> nn.Module | WrappedClassifier:
    """A model as it is; of a function, what it returns."""
    if isinstance(entry_point, _MODELS):
        if options:
            raise ModelError(
                f"load: '{entry}' of '{place}' is a module that is made already; got {', '.join(options)} as well. "
                f"Leave options out, or name a function that takes them."
            )
        return entry_point
    what = f"{entry}() of '{place}'"
    with suppress(ValueError):  # some callables written in C have no signature
        signature = inspect.signature(entry_point)
        try:  # before the call, so that no TypeError from inside the function is taken for one of its arguments
            signature.bind(**options)
        except TypeError as error:
            raise ModelError(
                f"load: {what} cannot be called with {', '.join(options) or 'no arguments'} ({first_words(error)}). "
                f"It takes {', '.join(signature.parameters) or 'none'}: pass these as options, or give them defaults."
            ) from error
    with running(what):
        made = entry_point(**options)
    if isinstance(made, _MODELS):
        return made
    got = f"the class {made.__name__}" if inspect.isclass(made) else type(made).__name__
    repair = next(text for kind, text in _INSTEAD.items() if isinstance(made, kind))
    raise ModelError(f"load: {what} must return an nn.Module, or what dubito.wrap makes of one; got {got}. {repair}")


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The folder comes first for imports, as for a script in it; neighbours from other folders are out of sight.

    Otherwise `import layers` in two files of two folders would give both the layers of the first.
    """
    others = {top for top, home in _NEIGHBOURS.items() if home != folder}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in others}
    before, always = set(sys.modules), str(folder) in sys.path
    importlib.invalidate_caches()  # a neighbour may be a moment old
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the code itself may have taken it away
            sys.path.remove(str(folder))
        brought = {name.partition(".")[0] for name in sys.modules.keys() - before}
        for name in [name for name in sys.modules if name.partition(".")[0] in others]:
            del sys.modules[name]
        sys.modules.update(hidden)
        if not always:
            _NEIGHBOURS.update({top: folder for top in brought - others if _home(top) == folder})


def executed(file: Path, place: str) -> ModuleType:
    """The file, run as a module that only its private name reaches."""
    if not file.is_file():
        near = nearest(file.name, [path.name for path in file.parent.glob("*.py")])
        hint = f"Nearest there: {', '.join(near)}." if near else "A relative path counts from the folder you are in."
        raise ModelError(f"load: no file '{place}' ({file}). {hint}")
    name = f"{_PRIVATE}{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = spec_from_file_location(name, file)
    if spec is None:
        raise AssertionError("a file that ends with .py always has a loader")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        with running(f"'{place}'"):  # not by the loader: what it compiled before counts as new within the same second
            exec(compile(file.read_bytes(), str(file), "exec"), vars(module))  # noqa: S102 (the user's own code)
    except ModelError:
        del sys.modules[name]
        raise
    return module


def imported(place: str) -> ModuleType:
    """The module of a dotted name."""
    with running(f"'{place}'"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise
            gone = error.name
    raise ModelError(
        f"load: no module '{gone}' is installed or in '{Path.cwd()}'. Go to the folder that holds it, or name a file: "
        f"'python:FILE.py:FUNCTION'."
    )


@contextmanager
def running(what: str) -> Iterator[None]:
    """Around the user's code: whatever it raises becomes a ModelError that says where, and what."""
    try:
        yield
    except (Exception, SystemExit) as error:
        repair = "Fix it there; the whole traceback is this error's cause."
        if isinstance(error, ImportError) and "relative import" in str(error):
            repair = "A relative import needs a package: name the module instead, 'python:PACKAGE.MODULE:FUNCTION'."
        reason = first_words(f"{type(error).__name__}: {error}".rstrip(": "))
        raise ModelError(f"load: {what} failed{_where(error)} ({reason}). {repair}") from error


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code, which is none of Python's, of installed packages, or ours."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}, line {error.lineno}" if error.lineno else ""
    folders = [*(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")), Path(__file__).parents[1]]
    library = ("<", *(f"{folder}{os.sep}" for folder in folders))
    calls = [(call.filename, call.lineno) for call in traceback.extract_tb(error.__traceback__)]
    own = [call for call in calls if not call[0].startswith(library)]
    return " at {}, line {}".format(*(own or calls)[-1]) if calls else ""


def _home(top: str) -> Path | None:
    """The folder that a module was imported from; a file under a private name is nobody's neighbour."""
    names = {} if top.startswith(_PRIVATE) else getattr(sys.modules.get(top), "__dict__", {})
    path = next(iter(names.get("__path__") or []), None) or names.get("__file__")
    return Path(path).parent if isinstance(path, str) else None
