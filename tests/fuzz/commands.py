"""Calls of the command line, drawn from a script: a valid call of every command, with arguments and options changed."""

import contextlib
import inspect
import io
import json
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

import numpy as np
import typer
from PIL import Image

from dubito.cli import app, main
from tests.fuzz.edits import Script
from tests.fuzz.world import World

_MODEL = "python:net.py:make --classes a,b --input-size 6"
FURNISHED = (
    f"extract {_MODEL} images --to cache --workers 0 --probe tiles:grids=2",
    "guard fit cache --coverage 0.6 --confidence 0.8 --novel 0 --to guard",
    "search build cache --to index --approximate HNSW4",
    "train cache --to ./head --set episodes=1,warmup=0,rows=48 --width 4 --depth 1",
    "watch guard cache --state watch",
    "score cache --score mahalanobis --learn-from cache --save scores",
)
"""What every call finds in its folder."""
CALLS = (
    *FURNISHED,
    "label cache labels.csv",
    "score cache --score entropy --to out.csv --top 3",
    "score cache --load scores",
    "evaluate cache --score entropy --learn-from cache --resamples 5",
    "compare cache --score entropy --score energy --resamples 5",
    "diagnose cache cache --resamples 5 --draws 1",
    "ensemble cache --of tiles_2 --resamples 5 --partitions 1",
    "reject cache --of tiles_2 --resamples 5",
    "report cache --to out.html --images images --top 3",
    "acquire cache --strategy power --count 3 --to picks.csv",
    "label-issues cache --to issues.csv",
    f"audit {_MODEL} images --limit 12 --workers 0",
    "watch guard --state watch --labels labels.csv",
    "plan --images 1e6 --rate 250 --hours 24",
    "list models test_*",
    "list scores",
    "search query index cache --k 3 --sets",
    f"search query index images --model {_MODEL}",
    "guard run guard cache --csv out.csv",
    f"guard run guard images/a/00.png --model {_MODEL}",
    "guard refit guard cache --to out",
    "guard with-risk guard 0.3 --to out",
)
NOT_CALLED = {"--debug", "--help", "--address", "--replicas", "--gpus", "--png"}
"""Options that show tracebacks on purpose, reach for other machines, or are slow."""
NOT_CHOSEN = {"ray"}
"""Choices that start a cluster."""
PLACES = (
    "cache",
    "guard",
    "index",
    "head",
    "images",
    "images/a/00.png",
    "labels.csv",
    "net.py",
    "watch",
    "out",
    "scores",
)
NUMBERS = (
    "0",
    "1",
    "2",
    "-1",
    "0.5",
    "0.05",
    "1e-9",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "99999999999999999999",
    "٣",
    "0x10",
)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "none",
        "missing/place",
        "entropy",
        "mahalanobis",
        "tiles:grids=2",
        "a=b",
        "a.b=c",
        "a,b",
        "lr=nan",
    ),
    *("timm:test_resnet", "python:net.py:make", "python:missing.py:make", "nosuch:model", "risk", "both", "IVF2,Flat"),
    *("é\x1b[31m\n", "\udcff", "%s{}[bold]", "y" * 300, "-", "--", "--nosuch", "*", "{0..9}.tar", "{9..}", "file:///x"),
)
_MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
"""


def arguments(data: bytes) -> list[str]:
    """A command line: a valid one, and up to three changes of it."""
    script = Script(data)
    line = script.one_of(CALLS).split()
    words = 2 if line[0] in ("guard", "search") else 1
    options = _options(*line[:words])
    for _ in range(3):
        place = words + script.number(max(1, len(line) - words))
        change = script.number(12)
        if script.ended:
            break
        if change == 0:
            line.insert(place, script.one_of(TEXTS))
        elif change == 1:
            del line[place : place + 1]
        elif change <= 4 and place < len(line):
            flags = [flag for flag, _ in options]
            before = dict(options).get(line[place - 1]) if line[place - 1] in flags else str
            line[place] = _value(script, before)
        else:
            flag, kind = script.one_of(options)
            line += [flag] if kind is bool else [flag, _value(script, kind)]
    return line


@cache
def _options(*words: str) -> list[tuple[str, Any]]:
    """The options of a command, and what each takes."""
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    kinds = {name: one.annotation for name, one in inspect.signature(command.callback).parameters.items()}
    return [
        (flag, get_args(kinds[one.name])[0])
        for one in command.params
        if one.param_type_name == "option" and one.name in kinds and not NOT_CALLED & {*one.opts}
        for flag in (*one.opts, *one.secondary_opts)
    ]


def _value(script: Script, kind: Any) -> str:
    """Mostly what an option takes, by its type."""
    own: Sequence[str] = TEXTS
    if kind in (int, float, int | None, float | None):
        own = NUMBERS
    elif "Path" in str(kind):
        own = PLACES
    elif get_origin(kind) is Literal:
        own = [str(one) for one in get_args(kind) if one not in NOT_CHOSEN]
    return script.one_of(script.one_of((own, own, own, own, own, TEXTS, NUMBERS, PLACES)))


def scripts(_: World) -> list[bytes]:
    """Scripts to begin with: every call as it is, and with some changes."""
    draw = Random("cli")  # noqa: S311 (seeds, not secrets)
    calls = range(len(CALLS))
    return [bytes([call]) for call in calls] + [bytes([call]) + draw.randbytes(12) for call in calls for _ in range(3)]


def run(world: World, data: bytes) -> None:
    """Call the command line, in a folder with one artefact of every kind; its exit code and texts are checked."""
    furnished = _furnished(world)
    shutil.copytree(furnished, world.fresh(), dirs_exist_ok=True)
    line = arguments(data)
    code, out, err = _call(line)
    shown = f"dubito {line!r} ended with {code}: {err[-1000:]}"
    assert code in (0, 1, 2, 3), shown
    assert "bug in dubito" not in err, shown
    assert "Traceback" not in out + err, shown
    assert code in (0, 3) or err.strip(), shown
    if "--json" in line and code in (0, 1, 3) and "--help" not in line:
        assert isinstance(json.loads(out), dict), shown


def _call(line: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    return code, out.getvalue(), err.getvalue()


def _furnished(world: World) -> Path:
    """A folder with images, labels, code, and what the first commands make of them."""
    folder = world.folder / "furnished"
    if not folder.exists():
        place, rng = world.fresh(), np.random.default_rng(0)
        for index in range(48):
            path = Path("images", "ab"[index % 2], f"{index:02d}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(path)
        Path("labels.csv").write_text("path,label\n" + "".join(f"{index:02d}.png,a\n" for index in range(48)))
        Path("net.py").write_text(_MODULE)
        for call in FURNISHED:
            code, _, err = _call(call.split())
            assert code in (0, 3), f"dubito {call}: {err}"
        place.rename(folder)
    return folder


if __name__ == "__main__":  # shows the call of a saved input
    sys.stdout.write(repr(arguments(Path(sys.argv[1]).read_bytes())) + "\n")
