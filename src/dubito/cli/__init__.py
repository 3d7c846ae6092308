"""The command line: parsing, progress bars and output only. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 1 an error, reported in one sentence; 2 a call that cannot be understood; 3 `audit` found a
fault, or `watch` raised an alarm; 130 stopped by Ctrl-C.
"""

import codecs
import io
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from dubito import __version__
from dubito.choices import suggestion
from dubito.cli import (
    active,
    audit,
    calibrate,
    evaluate,
    explain,
    explore,
    extract,
    guard,
    imagenet_variants,
    listing,
    openood,
    plan,
    report,
    score,
    search,
    serve,
    train,
)
from dubito.cli._console import Debug, Json, Screen
from dubito.errors import DubitoError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
_UNENCODABLE = "dubito"
_ClickError = typer.BadParameter.__mro__[2]
"""The root of what parsing raises; taken from typer, because newer ones carry their own copy of click."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    texts = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_UNENCODABLE, _encode)
        sys.stdout.reconfigure(errors=_UNENCODABLE)
    # JSON is known before parsing, so that a call that cannot be parsed is answered in JSON too.
    screen = Screen(json="--json" in texts, debug=os.environ.get("DUBITO_DEBUG", "") not in ("", "0"))
    with screen.watching():
        try:
            code = _run(_built(), texts)
            screen.flush()
            return code
        except BrokenPipeError:  # the reader has gone: `dubito list models | head`
            screen.discard()
            return 1
        except (Exception, KeyboardInterrupt) as error:
            code, kind, text = _explain(error, screen)
            screen.fail(text, kind)
            if screen.debug and code == 1:
                raise
            return code


@cache
def _built() -> Any:
    """All commands, which are built from their functions once: that takes longer than many of them."""
    return typer.main.get_command(app)


def _encode(error: UnicodeError) -> tuple[str | bytes, int]:
    """What to write for a character that standard output cannot encode, and where to go on.

    Names of files may be any bytes, and go out as they came; of the rest, a terminal of ASCII shows question marks.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    return bytes([code - 0xDC00]) if 0xDC80 <= code <= 0xDCFF else "?", error.start + 1


def _run(command: Any, texts: Sequence[str]) -> int:
    """Run a command and return its exit code; its errors are raised."""
    try:
        with command.make_context("dubito", texts) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def _explain(error: BaseException, screen: Screen) -> tuple[int, str, str]:
    """The exit code of an error, its kind in the JSON, and its message."""
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return 130, "KeyboardInterrupt", f"stopped. {screen.when_stopped}".strip()
    if isinstance(error, _ClickError):
        text: str = error.format_message().rstrip(".").replace("Value error, ", "")  # type: ignore[attr-defined]
        if match := re.search(r"'([^']*)' is not one of (.*)", text):
            hint = suggestion(match[1], re.findall("'([^']*)'", match[2]))
            text += f".{hint}" if hint else ""
        path = getattr(getattr(error, "ctx", None), "command_path", "dubito")
        return 2, "UsageError", f"{text}{'' if text.endswith('?') else '.'} See `{path} --help`."
    if isinstance(error, DubitoError):
        return 1, kind, str(error)
    if isinstance(error, OSError):
        if reason := screen.unwritable():
            return 1, kind, f"the result cannot be written to standard output ({reason}). Free some space there."
        where = f" '{error.filename}'" if error.filename else ""
        return 1, kind, f"{error.strerror or error}{where}. Choose a place that can be read and written."
    bug = "This is a bug in dubito or in a package that it uses: run again with --debug to see where, and report it."
    return 1, kind, f"{kind}: {error or 'no message'}. {bug}"


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"dubito {__version__}")
        raise typer.Exit
    return wanted


@app.callback(
    epilog="Example: [bold]dubito extract timm:resnet50.a1_in1k photos --to cache/photos[/bold], "
    "then [bold]dubito score cache/photos[/bold]. To see it work: [bold]dubito demo[/bold].",
)
def start(
    version: Annotated[  # noqa: ARG001 (its callback answers)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """How far can a pretrained vision model be trusted on each image, and why not?"""
    Screen.current(json=json, debug=debug)


_groups = {
    "": app,
    "search": typer.Typer(help="Similar images, where uncertain queries are refused: `build`, `query`."),
    "guard": typer.Typer(help="Accept or abstain, with a guarantee: `fit`, `run`, `refit`, `with-risk`, `export`."),
}
for _name, _command, _example in (
    ("extract", extract.extract, "pypi:efficientnet_lite0 photos --to cache/photos --probe tiles:grids=2,7"),
    ("label", extract.label, "cache/photos labels.csv"),
    ("train", train.train, "cache/photos --held-out 0.1 --set target=expected --to mine"),
    ("score", score.score, "cache/photos --score entropy --top 20 --to scores.csv"),
    ("evaluate", evaluate.evaluate, "cache/test --learn-from cache/train --ood cache/other"),
    ("compare", evaluate.compare, "cache/test --learn-from cache/train --ood cache/other"),
    ("calibrate", calibrate.calibrate, "cache/val --to calibration"),
    ("openood", openood.openood, "timm:resnet50.a1_in1k --root data --to cache/openood --score energy"),
    (
        "imagenet-variants",
        imagenet_variants.imagenet_variants,
        "timm:resnet50.a1_in1k --root imagenet-a=data/imagenet-a --root imagenet-c=data/imagenet-c",
    ),
    ("diagnose", explain.diagnose, "cache/test cache/other --learn-from cache/train --html why.html"),
    ("ensemble", explain.ensemble, "cache/lite0 cache/lite1 cache/lite2 --html members.html"),
    ("reject", evaluate.reject, "cache/test --of tiles_7 --learn-from cache/val --html rejection.html"),
    ("report", report.report, "pypi:efficientnet_lite0 photos --to report.html"),
    ("explore", explore.explore, "cache/photos --images photos --guard guard --ood cache/other"),
    ("map", report.map_, "cache/photos --images photos --to map.html --png map.png"),
    ("acquire", active.acquire, "cache/pool --strategy weighted --count 100 --to picks.csv"),
    ("label-issues", active.label_issues, "cache/train --to issues.csv"),
    ("audit", audit.audit, "pypi:efficientnet_lite0 photos/val --against photos/train"),
    ("watch", guard.watch, "guard photos/today --request-labels 50"),
    ("serve", serve.serve, "guard --port 8000 --watch guard.watch"),
    ("plan", plan.plan, "--images 1e9 --rate 250 --hours 168 --images-per-request 9 --price 1.2"),
    ("list", listing.list_, "models 'resnet50*'"),
    ("demo", report.demo, "--to demo"),
    ("search build", search.build, "cache/photos --to index --head auto --quantile 0.9"),
    ("search query", search.query, "index photos/new --k 5 --json"),
    ("guard fit", guard.fit, "cache/val --learn-from cache/train --risk 0.05 --to guard"),
    ("guard run", guard.run, "guard photos --csv verdicts.csv"),
    ("guard refit", guard.refit, "guard cache/new --to guard-new"),
    ("guard with-risk", guard.with_risk, "guard 0.02 --to guard-strict"),
    ("guard export", guard.export, "guard --to guard.onnx"),
):
    _group, _, _verb = _name.rpartition(" ")
    _groups[_group].command(_verb, epilog=f"Example: [bold]dubito {_name} {_example}[/bold]")(_command)
for _name in ("search", "guard"):
    app.add_typer(_groups[_name], name=_name, no_args_is_help=True)
