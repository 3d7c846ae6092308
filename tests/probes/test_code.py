"""A callable's hash follows what it does, not where it stands."""

import functools
import subprocess
import sys
from enum import Enum

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dubito.probes._code import describe_callable


def made(source, name="f", **known):
    """A function compiled from text, as in a file of its own."""
    space = {"__name__": "made", "F": F, "torch": torch, **known}
    exec(source, space)  # noqa: S102 (our own text)
    return space[name]


def closed(value):
    return lambda logit, target: logit * value


class Weighted:
    power = 1

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, logit, target):
        return self.weight * logit[:, 0] ** self.power

    def again(self, logit, target):
        return self(logit, target)


class Colour(Enum):
    RED = 1
    BLUE = 2


ONE = "def f(a, b):\n    return F.relu(a).sum(1) + 1"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("\n\n# a comment, and other lines\n" + ONE, True),
        ("def f(logit, target):\n    return F.relu(logit).sum(1) + 1", True),  # other names of arguments
        ("def f(a, b):\n    return F.gelu(a).sum(1) + 1", False),
        ("def f(a, b):\n    return F.relu(a).sum(1) + 2", False),
        ("def f(a, b):\n    return F.relu(a).sum(1) - 1", False),
        ("def f(a, b, *, c=1):\n    return F.relu(a).sum(1) + 1", False),
        ("def g(a, b):\n    return F.relu(a).sum(1) + 1\nf = g", False),
    ],
)
def test_code(other, same):
    assert (describe_callable(made(ONE)) == describe_callable(made(other))) is same


def test_nested_functions_count():
    nested = "def f(a, b):\n    def inner(x):\n        return x + {}\n    return inner(a)"
    assert describe_callable(made(nested.format(1))) == describe_callable(made(nested.format(1)))
    assert describe_callable(made(nested.format(1))) != describe_callable(made(nested.format(2)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2), (1, 1.0), (True, 1), ("a", "b"), ((1, 2), [1, 2]), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}),
        (torch.zeros(2), torch.ones(2)), (torch.zeros(2), torch.zeros(1, 2)), (np.zeros(2), np.ones(2)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)),
        (torch.float16, torch.float32), (Colour.RED, Colour.BLUE), (torch.relu, torch.sigmoid), (F.relu, F.gelu),
        (Weighted(1), Weighted(2)), (closed(1), closed(2)), (int, float), (np.float32(1), np.float32(2)),
        (torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)),
    ],
)  # fmt: skip
def test_what_a_closure_or_a_partial_holds_counts(one, other):
    for hold in (closed, lambda value: functools.partial(closed(0), logit=value), Weighted):
        assert describe_callable(hold(one)) == describe_callable(hold(one))
        assert describe_callable(hold(one)) != describe_callable(hold(other))


def test_objects():
    assert describe_callable(Weighted(1)).startswith("Weighted ")
    assert describe_callable(Weighted(1).again).startswith("Weighted.again ")
    assert describe_callable(functools.partial(F.cross_entropy, reduction="none")).startswith("partial(cross_entropy) ")
    assert describe_callable(Weighted(1).again) != describe_callable(Weighted(2).again)
    assert describe_callable(torch.nn.BCELoss()) != describe_callable(torch.nn.BCELoss(reduction="none"))


def test_methods_and_constants_of_a_class_and_of_its_bases_count():
    source = (
        "class Base:\n    power = {}\n    def __call__(self, a, b):\n        return a + {}\nclass f(Base):\n    pass"
    )
    told = {describe_callable(made(source.format(*two))()) for two in ((1, 1), (2, 1), (1, 2), (1, 1))}
    assert len(told) == 3


def test_what_holds_itself_ends():
    held = []
    held.append(held)
    assert describe_callable(closed(held)) == describe_callable(closed(held))

    def recursive(a, b):
        return recursive(a, b) if later else a

    assert describe_callable(recursive).startswith("recursive ")  # while `later` stands for nothing
    later = 1


def test_what_a_global_name_stands_for_is_not_seen():
    source = "def f(a, b):\n    return helper(a)"
    assert describe_callable(made(source, helper=abs)) == describe_callable(made(source, helper=len))


def test_another_process_tells_the_same():
    source = "f = lambda a, b: a if b in {'x', 'y', 'z', 'w'} else {'k': b}"
    script = f"from dubito.probes._code import describe_callable\n{source}\nprint(describe_callable(f))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == describe_callable(made(source))
