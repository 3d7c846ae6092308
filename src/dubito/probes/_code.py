"""A short hash of what a callable does, as far as it can be seen without calling it.

Seen are its bytecode, constants and the names it uses, nested functions, default arguments, what a closure holds, the
arguments of a partial, and the methods and attributes of an object, tensors by their values. Not seen is what a global
name stands for: a helper function or a constant of the module, another version of a package. Another version of Python
compiles other bytecode, which counts as another function.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Set
from enum import Enum
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_OTHERS = ("abc", "builtins", "torch", "typing")
_Seen = frozenset[int]


def describe_callable(function: Callable[..., Any]) -> str:
    """Its name and the hash.

    >>> describe_callable(lambda logit, target: logit[:, 0]) == describe_callable(lambda logit, target: logit[:, 0])
    True
    >>> describe_callable(lambda logit, target: logit[:, 0]) == describe_callable(lambda logit, target: logit[:, 1])
    False
    """
    whole = hashlib.blake2b(_told(function, frozenset()).encode("utf-8", "backslashreplace"), digest_size=8)
    return f"{_name(function)} {whole.hexdigest()}"


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"partial({_name(function.func)})"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).rpartition("<locals>.")[2]


def _told(value: Any, above: _Seen) -> str:
    """A text that differs where two values differ; something that holds itself is told once."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in above:
        return "itself"
    above |= {id(value)}
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _numbers(value)
    if isinstance(value, (Mapping, Set)):  # their order does not count, and that of a set changes from run to run
        items = value.items() if isinstance(value, Mapping) else value
        return f"{type(value).__name__}{sorted(_told(item, above) for item in items)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[_told(item, above) for item in value]}"
    return _object(value, above)


def _object(value: Any, above: _Seen) -> str:
    parts: tuple[Any, ...]
    if isinstance(value, CodeType):
        parts = (value.co_code, value.co_consts, value.co_names)
    elif isinstance(value, FunctionType):
        parts = (_name(value), value.__code__, value.__defaults__, value.__kwdefaults__, _held(value))
    elif isinstance(value, MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, type):
        parts = (value.__qualname__, [_written(one) for one in value.__mro__])
    else:
        parts = (getattr(value, "__qualname__", None), type(value), getattr(value, "__dict__", None))
    return f"{type(value).__name__}{[_told(part, above) for part in parts]}"


def _written(one: type) -> dict[str, Any]:
    """The methods and plain constants of a class; those of Python and torch belong to their versions."""
    if one.__module__.partition(".")[0] in _OTHERS:
        return {}
    plain = {key: item for key, item in vars(one).items() if isinstance(item, _PLAIN) and not key.startswith("__")}
    return plain | {key: item for key, item in vars(one).items() if isinstance(item, FunctionType)}


def _held(function: FunctionType) -> list[Any]:
    """What a closure's variables stand for now; one that is not set yet stands for nothing."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # noqa: PERF203 (a handful of variables)
            held.append(None)
    return held


def _numbers(value: Any) -> str:
    tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype}{tuple(tensor.shape)}{hashlib.blake2b(content, digest_size=16).hexdigest()}"
