"""All commands in one app."""

from typing import Annotated

import typer

from dubito import __version__
from dubito.cli._console import Debug, Screen
from dubito.cli.active import acquire, label_issues
from dubito.cli.audit import audit
from dubito.cli.evaluate import compare, evaluate, reject
from dubito.cli.explain import diagnose, ensemble
from dubito.cli.extract import extract
from dubito.cli.guard import app as guard
from dubito.cli.listing import list_
from dubito.cli.report import demo, map_
from dubito.cli.score import score
from dubito.cli.search import app as search
from dubito.cli.train import train

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


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
    debug: Debug = False,
) -> None:
    """How far can a pretrained vision model be trusted on each image, and why not?"""
    Screen.current(debug=debug)


for _name, _command, _example in (
    ("extract", extract, "dubito extract pypi:efficientnet_lite0 photos --to cache/photos --probe tiles:grids=2,7"),
    ("train", train, "dubito train cache/photos --held-out 0.1 --set target=expected --to mine"),
    ("score", score, "dubito score cache/photos --score entropy --top 20 --to scores.csv"),
    ("evaluate", evaluate, "dubito evaluate cache/test --train cache/train --ood cache/other"),
    ("compare", compare, "dubito compare cache/test --train cache/train --ood cache/other"),
    ("diagnose", diagnose, "dubito diagnose cache/test cache/other --train cache/train --html why.html"),
    ("ensemble", ensemble, "dubito ensemble cache/lite0 cache/lite1 cache/lite2 --html members.html"),
    ("reject", reject, "dubito reject cache/test --of tiles_7 --calibration cache/val --html rejection.html"),
    ("map", map_, "dubito map cache/photos --images photos --to map.html --png map.png"),
    ("acquire", acquire, "dubito acquire cache/pool --strategy weighted --count 100 --to picks.csv"),
    ("label-issues", label_issues, "dubito label-issues cache/train --to issues.csv"),
    ("audit", audit, "dubito audit pypi:efficientnet_lite0 photos/val --against photos/train"),
    ("list", list_, "dubito list models 'resnet50*'"),
    ("demo", demo, "dubito demo --to demo"),
):
    app.command(_name, epilog=f"Example: [bold]{_example}[/bold]")(_command)

app.add_typer(search, name="search", help="Similar images, where uncertain queries are refused: `build`, `query`.")
app.add_typer(guard, name="guard", help="Accept or abstain, with a guarantee: `fit`, `run`, `export`.")
