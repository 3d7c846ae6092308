"""docs/jobs.md leads to every job: every guide and command is there, and every line of it exists."""

import ast
import inspect
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

import dubito
from dubito.cli import app

DOCS = Path(__file__).parents[2] / "docs"
JOBS = (DOCS / "jobs.md").read_text()
LINES = re.findall(r"(?<=[ >])`([^`]+)`(?=<br>| \|)", JOBS)
COMMANDS = sorted({line for line in LINES if line.startswith("dubito ")})
PYTHON = sorted({line for line in LINES if not line.startswith("dubito ")})


def test_every_guide_and_every_command_is_reached_in_one_step() -> None:
    linked = set(re.findall(r"\]\((guides/[\w-]+\.md)", JOBS))
    assert linked == {f"guides/{path.name}" for path in (DOCS / "guides").glob("*.md")}
    assert {name for name in _commands() if not any(line.startswith(f"dubito {name}") for line in COMMANDS)} == set()


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_take_these_arguments(line: str) -> None:
    _, *words = shlex.split(line)
    if words == ["--help"]:
        return
    commands = _commands()
    verb = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0]
    with typer.Context(commands[verb]) as context:
        commands[verb].parse_args(context, words[len(verb.split()) :])


@pytest.mark.parametrize("line", PYTHON)
def test_functions_take_these_arguments(line: str) -> None:
    for call in (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)):
        function = _public(call.func)
        if function is not None:
            keywords = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(function).bind(*call.args, **keywords)


@cache
def _commands() -> dict[str, Any]:
    """Every command of the command line by its words, such as "guard fit"."""
    groups: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name in [name for name, command in groups.items() if hasattr(command, "commands")]:
        groups |= {f"{name} {verb}": command for verb, command in groups.pop(name).commands.items()}
    return groups


def _public(node: ast.expr) -> Any:
    """What `dubito.a.b` or `guard.a` names; None for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        home = {"guard": dubito.Guard, "dubito": dubito}.get(ast.unparse(node.value)) or _public(node.value)
        bound = getattr(home, node.attr) if home is not None else None
        return bound.__get__(object()) if home is dubito.Guard and inspect.isfunction(bound) else bound
    return None
