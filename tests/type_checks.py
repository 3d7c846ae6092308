"""jaxtyping's decorator without its long errors, for which it binds the arguments of every call.

It checks the same: arguments and what is returned, and that an axis has one size in all of them.
"""

import inspect
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import jaxtyping
from beartype import BeartypeConf

original = jaxtyping.jaxtyped
ERRORS = BeartypeConf(violation_type=jaxtyping.TypeCheckError)  # a TypeError
SPECIAL = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def jaxtyped(checked: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """In place of `jaxtyping.jaxtyped`, with which its import hook decorates every class and function."""
    if checked is None:
        return partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(checked):
        if is_dataclass(checked) and not hasattr(checked.__init__, "__wrapped__"):
            checked.__init__ = jaxtyped(checked.__init__, typechecker=typechecker)
        return checked
    if any(special(checked) for special in SPECIAL):
        return original(checked, typechecker=typechecker)
    function = with_known_types(checked)
    checks, shapes = typechecker(function, conf=ERRORS), any(map(has_shape, function.__annotations__.values()))

    @wraps(checked)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return checked(*args, **kwargs)
        if not shapes:
            return checks(*args, **kwargs)
        with original("context"):  # in which each axis has one size
            return checks(*args, **kwargs)

    # In a traceback, a frame of an installed package, and none of the user's code.
    wrapped.__code__ = wrapped.__code__.replace(co_filename=jaxtyping.__file__)
    return wrapped


def with_known_types(function: FunctionType) -> FunctionType:
    """A copy in which types that are imported for type checkers alone are Any."""

    def known(annotation: Any) -> Any:
        try:
            one = SimpleNamespace(__annotations__={"one": annotation})
            return typing.get_type_hints(one, function.__globals__, include_extras=True)["one"]
        except Exception:
            return Any

    named = (function.__name__, function.__defaults__, function.__closure__)
    copy = FunctionType(function.__code__, function.__globals__, *named)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {name: known(annotation) for name, annotation in function.__annotations__.items()}
    return copy


def has_shape(annotation: Any) -> bool:
    """Is it, or is any part of it, a tensor with axes?"""
    return isinstance(annotation, type(jaxtyping.AbstractArray)) or any(map(has_shape, typing.get_args(annotation)))
