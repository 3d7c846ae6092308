"""Runs the user's own Python: a file under a private module name, or a module as `import` finds it.

A file can import its neighbours while it runs. What it raises comes out as a ModelError that names the line.
"""

import hashlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from dubito.errors import ModelError
from dubito.models.load import first_line

_PRIVATE = "_dubito_file_"
"""How the module names of files begin; what they hold can be found under them, as torch.export needs it."""


_NEIGHBOURS: dict[str, Path] = {}
"""Modules that such code has imported from beside it, by their first name, and from which folder."""


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The folder comes first for imports, as for a script in it; neighbours from other folders are out of sight.

    Otherwise `import layers` in two files of two folders would give both the layers of the first.
    """
    strangers = {top for top, home in _NEIGHBOURS.items() if home != folder}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _top(name) in strangers}
    before, always = set(sys.modules), str(folder) in sys.path
    importlib.invalidate_caches()  # a neighbour may be a moment old
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the code itself may have taken it away
            sys.path.remove(str(folder))
        brought = {_top(name) for name in sys.modules.keys() - before}
        for name in [name for name in sys.modules if _top(name) in strangers]:
            del sys.modules[name]
        sys.modules.update(hidden)
        if not always:
            _NEIGHBOURS.update({top: folder for top in brought - strangers if _home(top) == folder})


def executed(file: Path, place: str) -> ModuleType:
    """The file, run as a module that only its private name reaches."""
    if not file.is_file():
        near = get_close_matches(file.name, [path.name for path in file.parent.glob("*.py")], n=3)
        hint = f"Nearest there: {', '.join(near)}." if near else "A relative path counts from the folder you are in."
        raise ModelError(f"load: no file '{place}' ({file}). {hint}")
    name = f"{_PRIVATE}{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = spec_from_file_location(name, file)
    if spec is None:
        raise AssertionError("a file that ends with .py always has a loader")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        # Not by the loader: what it compiled before counts as new within the same second.
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))  # noqa: S102 (the user's own code, as told)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise failed(f"'{place}'", error) from error
    return module


def imported(place: str) -> ModuleType:
    """The module of a dotted name."""
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        gone = error.name if isinstance(error, ModuleNotFoundError) else None
        if gone is not None and f"{place}.".startswith(f"{gone}."):
            raise ModelError(
                f"load: no module '{gone}' is installed or in '{Path.cwd()}'. Go to the folder that holds it, or give "
                f"a file: 'python:FILE.py:FUNCTION'."
            ) from error
        raise failed(f"'{place}'", error) from error


def failed(what: str, error: BaseException) -> ModelError:
    """The code raised: where, and what."""
    repair = (
        "A relative import needs a package: name the module instead, 'python:PACKAGE.MODULE:FUNCTION'."
        if isinstance(error, ImportError) and "relative import" in str(error)
        else "Mend it there; the whole traceback is this error's cause (--debug shows it)."
    )
    return ModelError(f"load: {what} failed{_where(error)} ({type(error).__name__}: {first_line(error)}). {repair}")


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code, which is none of Python's, of installed packages, or ours."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}, line {error.lineno}" if error.lineno else ""
    folders = [*(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")), Path(__file__).parents[1]]
    foreign = ("<", *(f"{folder}{os.sep}" for folder in folders))
    calls = [(call.filename, call.lineno) for call in traceback.extract_tb(error.__traceback__)]
    own = [call for call in calls if not call[0].startswith(foreign)]
    return " at {}, line {}".format(*(own or calls)[-1]) if calls else ""


def _top(name: str) -> str:
    return name.partition(".")[0]


def _home(top: str) -> Path | None:
    """The folder that a module was imported from; a file under a private name is nobody's neighbour."""
    told = {} if top.startswith(_PRIVATE) else getattr(sys.modules.get(top), "__dict__", {})
    path = next(iter(told.get("__path__") or []), None) or told.get("__file__")
    return Path(path).parent if isinstance(path, str) else None
