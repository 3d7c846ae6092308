"""The frame of the command line: exit codes, errors in one sentence, JSON, help without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dubito
from dubito.cli import main

from .conftest import Run

COMMANDS = ("extract", "train", "score", "evaluate", "list", "demo")


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dubito.cache.disk.open_cache", broken)
    monkeypatch.setattr("dubito.cache.open_cache", broken)


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from dubito.cli import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0\n"
        "assert main(['extract', '--help']) == 0 and main(['train', '--help']) == 0\n"
        "assert main(['score', 'cache', '--set', 'k=5']) == 2\n"
        "assert main(['train', 'cache', '--to', 'head', '--set', 'loss']) == 2\n"
        "assert main(['extract', 'm', 'i', '--to', 'c', '--probe', 'tiles:2']) == 2\n"
        "heavy = {'torch', 'numpy', 'timm', 'torchvision', 'PIL', 'faiss', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_python_m_dubito_is_the_command() -> None:
    done = python("-m", "dubito", "--version")
    assert (done.returncode, done.stdout) == (0, f"dubito {dubito.__version__}\n")
    done = python("-m", "dubito", "score", "no/such/cache", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["kind"] == "CacheError"
    assert done.stderr.startswith("error: no cache in 'no/such/cache'")
    assert len(done.stderr.splitlines()) == 1


def test_without_a_command_there_is_help(run: Run) -> None:
    answer = run()
    assert answer.code == 0
    assert all(command in answer.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(run: Run, command: str) -> None:
    answer = run(command, "--help")
    assert answer.code == 0
    assert f"Example: dubito {command}" in answer.out
    assert "--json" in answer.out
    assert "--debug" in answer.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["extrct"], "error: No such command 'extrct'. Did you mean 'extract'? See `dubito --help`."),
        (["extract", "timm:test_resnet"], "Missing argument 'IMAGES'. See `dubito extract --help`."),
        (["list", "--colour"], "No such option: --colour"),
        (["score", "cache", "--top", "-1"], "Invalid value for '--top'"),
        (["score", "cache", "--to", "scores.txt"], "--to takes a file that ends in .csv or .npz; got 'scores.txt'."),
        (
            ["score", "cache", "--set", "k=5"],
            "'--set': expected NAME.KEY=VALUE, such as neighbours.k=5; got 'k=5'.",
        ),
    ],
)
def test_usage_errors_leave_with_two(run: Run, arguments: list[str], text: str) -> None:
    answer = run(*arguments)
    assert answer.code == 2
    assert text in answer.err
    assert len(answer.err.splitlines()) == 1
    assert answer.out == ""
    as_json = run(*arguments, "--json")
    assert as_json.code == 2
    assert as_json.json["kind"] == "UsageError"
    assert f"error: {as_json.json['error']}\n" == as_json.err


def test_an_error_is_one_sentence(run: Run) -> None:
    answer = run("score", "no/such/cache")
    assert answer.code == 1
    assert answer.out == ""
    assert answer.err == (
        "error: no cache in 'no/such/cache': there is no such folder. "
        "Make one with `dubito extract MODEL IMAGES --to no/such/cache`.\n"
    )


@pytest.mark.parametrize("arguments", [["--debug", "score", "x"], ["score", "x", "--debug"]])
def test_debug_shows_where_an_error_came_from(arguments: list[str]) -> None:
    with pytest.raises(dubito.DubitoError, match="no cache in 'x'"):
        main(arguments)


def test_debug_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUBITO_DEBUG", "1")
    with pytest.raises(dubito.DubitoError):
        main(["score", "x"])
    monkeypatch.setenv("DUBITO_DEBUG", "0")
    assert main(["score", "x"]) == 1


def test_a_bug_names_itself_and_the_way_to_see_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division\nby zero"))
    answer = run("score", "x", "--json")
    assert answer.code == 1
    assert answer.err == (
        "error: ZeroDivisionError: division by zero. This is a bug in dubito or in a package that it uses: "
        "run again with --debug to see where, and report it.\n"
    )
    assert answer.json["kind"] == "ZeroDivisionError"
    with pytest.raises(ZeroDivisionError):
        main(["score", "x", "--debug"])


def test_ctrl_c_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    answer = run("score", "x")
    assert (answer.code, answer.err) == (130, "error: stopped.\n")


def test_ctrl_c_during_extraction_says_what_is_safe(
    run: Run, monkeypatch: pytest.MonkeyPatch, images: Path, tmp_path: Path
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dubito.cache.extract", stopped)
    answer = run("extract", "timm:test_resnet", images, "--to", tmp_path / "cache", "--weights", "none")
    assert answer.code == 130
    assert answer.err == "error: stopped. Finished shards are safe: the same command continues from there.\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes close otherwise there")
def test_a_reader_that_leaves_early_is_no_bug() -> None:
    command = f"{sys.executable} -m dubito --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
