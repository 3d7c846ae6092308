"""The command line: parsing, progress bars and output only. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 1 an error, reported in one sentence; 2 a call that cannot be understood; 3 `audit` found a
fault; 130 stopped by Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence

import typer

from dubito.cli._app import app
from dubito.cli._console import Screen
from dubito.errors import DubitoError

_ClickError = typer.BadParameter.__mro__[2]
"""The root of what parsing raises; taken from typer, because newer ones carry their own copy of click."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    texts = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # JSON is known before parsing, so that a call that cannot be parsed is answered in JSON too.
    screen = Screen(json="--json" in texts, debug=os.environ.get("DUBITO_DEBUG", "") not in ("", "0"))
    with screen.watching():
        return _run(texts, screen)


def _run(arguments: list[str], screen: Screen) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("dubito", arguments) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        screen.fail(f"stopped. {screen.when_stopped}".strip(), "KeyboardInterrupt")
        return 130
    except BrokenPipeError:
        _close_stdout()
        return 1
    except DubitoError as error:
        screen.fail(str(error), type(error).__name__)
        if screen.debug:
            raise
        return 1
    except Exception as error:
        return _report(error, screen)
    return 0


def _report(error: Exception, screen: Screen) -> int:
    """Report a call that cannot be parsed, a place that cannot be used, or a bug, and return the exit code."""
    if isinstance(error, _ClickError):
        text: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        path = getattr(getattr(error, "ctx", None), "command_path", "dubito")
        screen.fail(f"{text}{'' if text.endswith('?') else '.'} See `{path} --help`.", "UsageError")
        return 2
    if isinstance(error, OSError):
        where = f" '{error.filename}'" if error.filename else ""
        text = f"{error.strerror or error}{where}. Give a place that can be read and written."
    else:
        text = (
            f"{type(error).__name__}: {error or 'no message'}. This is a bug in dubito or in a package that it uses: "
            f"run again with --debug to see where, and report it."
        )
    screen.fail(text, type(error).__name__)
    if screen.debug:
        raise error
    return 1


def _close_stdout() -> None:
    """The reader has gone (`dubito list models | head`): nothing more can be written, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
