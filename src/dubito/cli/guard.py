"""`dubito guard`: accept or abstain under a guarantee: `fit` makes a guard, `run` uses it, `export` writes ONNX."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import dubito
from dubito import choices
from dubito.cli import _options as options
from dubito.cli._console import Screen, grid, short

if TYPE_CHECKING:
    from dubito.guard import Decisions, Guard, PredictionSets
    from dubito.types import Classifier

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")

_Folder = Annotated[
    Path, typer.Argument(metavar="GUARD", help="A folder that `dubito guard fit` wrote.", show_default=False)
]
_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="source:name, or python:FILE.py:FUNCTION.",
        show_default="the one that the guard names",
    ),
]


@app.command(
    "fit", epilog="Example: [bold]dubito guard fit cache/val --train cache/train --risk 0.05 --to guard[/bold]"
)
def fit(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="A new folder, or that of a guard to replace.", show_default=False),
    ],
    risk: Annotated[
        float | None,
        typer.Option("--risk", help="At most this share of accepted images is wrong.", show_default="0.05"),
    ] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="Of the guarantee.")] = 0.95,
    coverage: Annotated[
        float | None, typer.Option("--coverage", help="Instead: at least this share of images is accepted.")
    ] = None,
    false_alarms: Annotated[
        float | None, typer.Option("--false-alarms", help="Instead: at most this share of right answers is refused.")
    ] = None,
    score: options.Scores = [],  # noqa: B006 (typer copies it)
    train: Annotated[
        Path | None,
        typer.Option("--train", metavar="CACHE", help="What scores learn from; by default a part of CACHE."),
    ] = None,
    sets: Annotated[
        float | None,
        typer.Option("--sets", help="Coverage of prediction sets; 0 for none.", show_default="0.9 where labels allow"),
    ] = None,
    class_wise: Annotated[bool, typer.Option("--class-wise", help="Of prediction sets: for every class.")] = False,
    set_method: Annotated[
        choices.SetMethod, typer.Option("--set-method", help="Of prediction sets: small ones, or never empty ones.")
    ] = "lac",
    novel: Annotated[
        float,
        typer.Option("--novel", help="Refuse images rarer than all but this share of those that scores are chosen on."),
    ] = 0.005,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the split.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find a threshold for labelled images of a CACHE that keeps a guarantee with a stated confidence.

    Scores are chosen on one part of the images and the threshold on another.
    """
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("opening the cache"):
        from dubito.guard.saving import FOLDER

        FOLDER.check_place(to)  # before anything that takes long
        table = dubito.open(cache)
        learned = None if train is None else dubito.open(train)
        if train is not None:
            from dubito.cli._scores import check_same_model

            check_same_model(cache, train, "--train")
    with screen.waiting("choosing scores and testing thresholds"):
        guard = dubito.Guard.fit(
            None,
            table,
            risk,
            confidence,
            coverage=coverage,
            false_alarms=false_alarms,
            scores=score or None,
            train=learned,
            sets=_sets(sets, set_method, class_wise),
            novel=novel,
            seed=seed,
        )
        guard.save(to)
    screen.result({"guard": str(to), **guard.to_dict()}, Text(str(guard)), Text(f"guard: {to}"))


@app.command("run", epilog="Example: [bold]dubito guard run guard photos --csv verdicts.csv[/bold]")
def run(  # noqa: PLR0913 (a command's options)
    guard: _Folder,
    images: Annotated[
        str,
        typer.Argument(
            metavar="IMAGES",
            help="A folder, an image, a .csv, .zip or .npz file; or a cache, for which no model is loaded.",
            show_default=False,
        ),
    ],
    *,
    model: _Model = None,
    weights: options.Weights = "pretrained",
    device: options.Device = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="All verdicts, one line an image.")] = None,
    top: Annotated[
        int, typer.Option("--top", min=0, metavar="N", help="Show the first N images; CSV and JSON have all.")
    ] = 20,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Accept or refuse what the model says of IMAGES, each with the reason."""
    screen = Screen.current(json=json, debug=debug)
    cached = (Path(images) / "manifest.json").is_file()
    with screen.waiting("loading the guard" if cached else "loading guard and model"):
        loaded = dubito.Guard.load(guard) if cached else _loaded(guard, model, weights, device)
    with screen.waiting("judging the cache" if cached else "asking the model"):
        found = loaded.decide(dubito.open(Path(images)) if cached else loaded.predict(images))
    if csv is not None:
        found.to_csv(csv)
    result = {
        "guard": str(guard),
        "guarantee": str(loaded.guarantee),
        "images": len(found),
        "accepted": int(found.accept.sum()),
        "skipped": [{"id": name, "reason": why} for name, why in found.skipped],
        "verdicts": [verdict.to_dict() for verdict in found],
        "csv": str(csv) if csv else None,
    }
    screen.result(result, *_shown(found, result, top))


@app.command("export", epilog="Example: [bold]dubito guard export guard --to guard.onnx[/bold]")
def export(
    guard: _Folder,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The ONNX file.", show_default=False)],
    model: _Model = None,
    weights: options.Weights = "pretrained",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write model, score and threshold as one ONNX file: finished inputs in; logits, uncertainty, accept out."""
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("loading guard and model"):
        loaded = _loaded(guard, model, weights, None)
    with screen.waiting("exporting"):
        path = loaded.export_onnx(to)
    size = path.stat().st_size
    result = {"guard": str(guard), "to": str(path), "bytes": size, "threshold": loaded.threshold.value}
    screen.result(result, Text(f"{path}: {size / 1e6:.1f} MB"))


def _sets(coverage: float | None, method: choices.SetMethod, class_wise: bool) -> "PredictionSets | bool":
    from dubito.guard import PredictionSets

    if coverage == 0:
        return False
    if coverage is None and method == "lac" and not class_wise:
        return True
    return PredictionSets(0.9 if coverage is None else coverage, method, class_wise)


def _loaded(folder: Path, name: str | None, weights: str, device: str | None) -> "Guard":
    """The guard with its model, which it names unless another source is given."""
    guard = dubito.Guard.load(folder)
    own = (guard.provenance.model if guard.provenance else None) or ""
    if name is None and ":" not in own:
        known = f"belongs to {own}, which was wrapped in Python" if own else "does not name its model"
        raise typer.BadParameter(
            f"the guard in '{folder}' {known}. Give --model source:name, of a module of your own "
            f"--model python:FILE.py:FUNCTION; run also takes a cache in place of images."
        )
    source = name or options.stored_model(own, f"the guard in '{folder}'")
    model: Classifier = dubito.load(source, weights=options.parse_weights(weights), device=device)
    return dubito.Guard.load(folder, model)


def _shown(found: "Decisions", result: dict[str, Any], top: int) -> list[Any]:
    rows = [
        [
            verdict.id,
            "accept" if verdict.accept else "abstain",
            short(verdict.class_name or str(verdict.label)),
            f"{verdict.probability:.3f}",
            *("-" if one is None else f"{one:.2f}" for one in (verdict.aleatoric, verdict.epistemic)),
            verdict.reason,
        ]
        for verdict, _ in zip(found, range(top), strict=False)
    ]
    title = f"{result['accepted']} of {result['images']} images accepted; guaranteed: {result['guarantee']}"
    header = ["image", "verdict", "prediction", "probability", "aleatoric", "epistemic", "why"]
    shown: list[Any] = [grid(title, header, rows)] if rows else [Text(title)]
    return shown + ([Text(f"all verdicts: {result['csv']}")] if result["csv"] else [])
