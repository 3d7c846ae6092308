"""An option takes the choices of its room, and names them all when it gets another."""

from typing import Any, get_args

import pytest

from dubito import choices

from .conftest import Run


@pytest.mark.parametrize(
    ("command", "original"),
    [
        (("extract", "timm:test_resnet", "photos", "--to", "c", "--label-space"), choices.LabelSpace),
        (("diagnose", "cache", "other", "--covariance"), choices.Covariance),
        (("map", "cache", "--to", "map.html", "--colour"), choices.Colouring),
        (("map", "cache", "--to", "map.html", "--method"), choices.Layout),
        (("acquire", "cache", "--strategy"), choices.Strategy),
        (("search", "build", "cache", "--to", "index", "--clean"), choices.Clean),
        (("audit", "timm:test_resnet", "photos", "--label-space"), choices.LabelSpace),
    ],
)
def test_another_value_is_answered_with_all_of_them(run: Run, command: tuple[str, ...], original: Any) -> None:
    answer = run(*command, "neither")
    assert (answer.code, f"Invalid value for '{command[-1]}'" in answer.err) == (2, True), answer.err
    assert all(f"'{value}'" in answer.err for value in get_args(original))
