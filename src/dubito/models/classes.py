"""Class names, from wherever they are: a list, a mapping, a text file, JSON, or only how many there are."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dubito.errors import ModelError

_EXPECTED = "one name per output: a list, {index: name}, a file with one name per line or JSON, or 'ant,bee,cat'"
ClassNames = Sequence[str] | Mapping[Any, Any] | str | Path | int
"""What `read_classes` takes."""


def read_classes(classes: ClassNames) -> list[str] | int:
    """The names in the order of the outputs, or their number.

    Args:
        classes: A sequence; a mapping from index to name, or from name to index; the path of a text file with one name
            per line or of JSON; names separated by commas; or how many there are.

    >>> read_classes("ant, bee"), read_classes({"1": "bee", "0": "ant"}), read_classes({"ant": 0, "bee": 1})
    (['ant', 'bee'], ['ant', 'bee'], ['ant', 'bee'])
    """
    if isinstance(classes, (str, Path)):
        return _from_text(str(classes))
    if isinstance(classes, bool) or (isinstance(classes, int) and classes < 0):
        raise ModelError(f"classes must be {_EXPECTED}; got {classes!r}.")
    if isinstance(classes, int):
        return classes
    if isinstance(classes, Mapping):
        return _in_order(classes)
    names: Any = classes
    if not isinstance(names, Sequence) and not hasattr(names, "tolist"):
        raise ModelError(f"classes must be {_EXPECTED}; got {type(classes).__name__}.")
    return [str(name) for name in names]


def _from_text(text: str) -> list[str] | int:
    path = Path(text).expanduser()
    if path.is_file():
        return _from_file(path)
    if text.strip().isdecimal():
        return int(text)
    if "," in text and not path.suffix:
        return [name.strip() for name in text.split(",")]
    raise ModelError(f"classes: no file '{text}'. Pass {_EXPECTED}.")


def _from_file(path: Path) -> list[str] | int:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(f"classes: '{path}' cannot be read as text ({error}). Save it as UTF-8.") from error
    if path.suffix.lower() != ".json" and not content.lstrip().startswith(("{", "[")):
        names = [line.strip() for line in content.strip().splitlines()]
        if "" in names:
            raise ModelError(f"classes: line {names.index('') + 1} of '{path}' is empty. Write one name per line.")
        return names
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"classes: '{path}' is no JSON ({error}). Write a list, or one name per line.") from error
    if not isinstance(values, (list, dict)):
        raise ModelError(f"classes: '{path}' must hold a list or an object; got {type(values).__name__}.")
    return read_classes(values)


def _in_order(classes: Mapping[Any, Any]) -> list[str]:
    """The names of a mapping by index; every index from 0 on must be there once."""
    by_index = {str(key): str(name) for key, name in classes.items()}
    if not all(key.isdecimal() for key in by_index):  # class_to_idx of torchvision: the other way round
        by_index = {str(index): str(name) for name, index in classes.items()}
    missing = [index for index in range(len(classes)) if str(index) not in by_index]
    if missing:
        raise ModelError(
            f"classes must name every index from 0 to {len(classes) - 1} once; {missing[0]} is missing. "
            f"Pass one name per output."
        )
    return [by_index[str(index)] for index in range(len(classes))]
