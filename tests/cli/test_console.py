"""What all commands share."""

from inspect import signature

from dubito.cli import app
from dubito.cli._console import _option_names
from dubito.cli.evaluate import compare
from dubito.cli.explain import diagnose


def test_options_are_those_of_the_command() -> None:
    names = _option_names(signature(compare).parameters.values())
    assert (names["ood"], names["settings"], names["score"], names["cache"]) == ("--ood", "--set", "--score", "CACHE")
    assert (names["scores"], names["heads"]) == ("--score", "--head")  # repeated options, in the plural
    assert _option_names(signature(diagnose).parameters.values())["ood"] == "OOD"


def test_every_command_has_the_common_options() -> None:
    assert len(app.registered_commands) == 23
    for command in app.registered_commands:
        assert hasattr(command.callback, "__wrapped__"), command.name
