"""Types and shapes are checked while tests run, in dubito and in whatever the tests decorate."""

from dataclasses import dataclass

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from dubito.ensembles.masks import mask_diversity

from .type_checks import jaxtyped

checked = jaxtyped(typechecker=beartype)


@checked
def product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"], transpose: bool = False) -> Float[Tensor, "n m"]:
    return (a @ b).T if transpose else a @ b


@checked
@dataclass
class Pair:
    a: Float[Tensor, "n 1"]
    b: Float[Tensor, "n 1"]


def test_dubito_is_checked():
    with pytest.raises(TypeCheckError, match="this array has 1 dimensions, not the 2 expected"):
        mask_diversity(torch.ones(3))


def test_an_axis_has_one_size():
    assert product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert product(torch.ones(5, 1), torch.ones(1, 5)).shape == (5, 5)  # another size in another call
    with pytest.raises(TypeCheckError, match="the size of dimension k is 4"):
        product(torch.ones(2, 3), torch.ones(4, 3))
    with pytest.raises(TypeCheckError, match="size of dimension n is 4"):
        product(torch.ones(2, 3), torch.ones(3, 4), transpose=True)
    assert Pair(torch.ones(2, 1), torch.ones(2, 1)).a.shape == (2, 1)
    with pytest.raises(TypeCheckError, match="size of dimension n is 3"):
        Pair(torch.ones(2, 1), torch.ones(3, 1))


def test_calls_within_a_call_have_axes_of_their_own():
    @checked
    def outer(a: Float[Tensor, "n k"]) -> Float[Tensor, "n n"]:
        return product(a, product(a.T, torch.ones(len(a), 7)))[:, : len(a)]

    assert outer(torch.ones(2, 3)).shape == (2, 2)


def test_types_for_type_checkers_alone_are_not_checked():
    @checked
    def unknown(a: "nowhere.Type", b: int) -> "list[nowhere.Type]":  # noqa: F821
        return [a, b]

    assert unknown("a", 1) == ["a", 1]
    with pytest.raises(TypeCheckError):
        unknown("a", "b")


def test_checks_are_switched_off(unchecked):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(torch.ones(2, 3), torch.ones(4, 3))
