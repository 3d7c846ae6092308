"""Layouts of plain values: what fits, and where something does not."""

from typing import Any

import pytest

from dubito.storage import COUNT, check_layout

LAYOUT = {
    "rows": COUNT,
    "gate": float | None,
    "names": (None, [str, ...]),
    "pair": [str, bool],
    "scores": {str: float},
    "sets?": {"coverage": float, str: Any},
}
VALUE = {"rows": 3, "gate": 1, "names": ["a"], "pair": ["a", True], "scores": {"x": 0.5}, "more": object()}


@pytest.mark.parametrize(
    "change",
    [
        {"gate": None},
        {"gate": -2.5},
        {"names": None},
        {"names": []},
        {"scores": {}},
        {"scores": {"x": 1, "y": 2.0}},
        {"sets": {"coverage": 0.9, "other": []}},
        {"rows": 0},
    ],
)
def test_values_that_fit(change):
    check_layout(VALUE | change, LAYOUT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": -1}, "rows is -1"),
        ({"rows": 1.0}, r"rows is 1\.0"),
        ({"rows": True}, "rows is True"),
        ({"rows": 1 << 62}, "rows is 46116"),
        ({"gate": "1"}, "gate is '1'"),
        ({"gate": True}, "gate is True"),
        ({"gate": float("nan")}, "gate is nan"),
        ({"gate": float("inf")}, "gate is inf"),
        ({"gate": 10**400}, "gate is 1000"),  # no float is so large
        ({"names": ["a", 1]}, r"names is \['a', 1\]"),
        ({"names": {}}, "names is {}"),
        ({"pair": ["a"]}, "pair is"),
        ({"pair": ["a", True, True]}, "pair is"),
        ({"pair": ["a", 1]}, r"pair\[1\] is 1"),
        ({"scores": {"x": "y"}}, r"scores\.x is 'y'"),
        ({"scores": [0.5]}, "scores is"),
        ({"sets": {}}, "sets has no 'coverage'"),
        ({"sets": None}, "sets is None"),
    ],
)
def test_values_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_layout(VALUE | change, LAYOUT)


def test_keys_that_are_missing():
    with pytest.raises(ValueError, match="its content has no 'gate'"):
        check_layout({"rows": 1}, LAYOUT)
    with pytest.raises(ValueError, match=r"its content is \[\]"):
        check_layout([], LAYOUT)


def test_a_long_value_is_cut():
    with pytest.raises(ValueError, match=r"rows is 'y{79}$"):
        check_layout({"rows": "y" * 1000}, {"rows": COUNT})
