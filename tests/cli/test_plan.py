"""`dubito plan`: numbers as people type them, and the simulation beside the closed form."""

import math
from dataclasses import fields

import pytest

from dubito.cache import Cluster
from dubito.cli.plan import ClusterOptions

from .conftest import Run


def test_numbers_may_have_exponents(run: Run) -> None:
    result = run("plan", "--images", "1e6", "--rate", "250", "--workers", "4", "--simulated", "--json").json
    assert (result["images"], result["workers"]) == (1_000_000, 4)
    assert result["simulated_hours"] == pytest.approx(result["hours"], rel=0.05)


def test_the_rate_is_required(run: Run) -> None:
    failed = run("plan", "--images", "1e6")
    assert (failed.code, failed.err) == (2, "error: Missing option '--rate'. See `dubito plan --help`.\n")


def test_errors_name_options(run: Run) -> None:
    failed = run("plan", "--images", "1e6", "--rate", "0")
    assert failed.code == 1
    assert "--rate must be" in failed.err


def test_every_field_of_a_cluster_is_an_option_with_the_same_default() -> None:
    options = {one.name: one.default for one in fields(ClusterOptions)}
    cluster = {one.name: one.default for one in fields(Cluster)}
    assert {name: math.inf if value is None else value for name, value in options.items()} == cluster
