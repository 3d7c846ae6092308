"""`dubito guard`: accept or abstain under a guarantee: `fit` makes a guard, `run` uses it, `export` writes ONNX."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option

_Folder = Annotated[Path, Argument(metavar="GUARD", help="A folder that `dubito guard fit` wrote.")]


@command
def fit(
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[Path, option("A new folder, or that of a guard to replace.", "DIR")],
    risk: Annotated[
        float | None, option("At most this share of accepted images is wrong.", show_default="0.05")
    ] = None,
    confidence: Annotated[float, option("Confidence of the guarantee.")] = 0.95,
    coverage: Annotated[float | None, option("Instead: at least this share of images is accepted.")] = None,
    false_alarms: Annotated[
        float | None, option("Instead: at most this share of correct predictions is refused.")
    ] = None,
    score: options.Scores = [],
    train: Annotated[
        Path | None,
        Option("--learn-from", metavar="CACHE", help="Images that scores learn from; by default a part of CACHE."),
    ] = None,
    sets: Annotated[
        float | None, option("Coverage of prediction sets; 0 for none.", show_default="0.9 where labels allow")
    ] = None,
    class_wise: Annotated[bool, Option("--class-wise", help="Prediction sets that cover every class.")] = False,
    set_method: Annotated[choices.SetMethod, option("Of prediction sets: small ones, or never empty ones.")] = "lac",
    novel: Annotated[
        float, option("Refuse images rarer than all but this share of those that scores are chosen on.")
    ] = 0.005,
    seed: options.Seed = 0,
) -> None:
    """Find a threshold for labelled images of a CACHE that keeps a guarantee with a stated confidence.

    Scores are chosen on one part of the images and the threshold on another.
    """
    with screen.waiting("opening the cache"):
        from dubito.guard import PredictionSets
        from dubito.guard.guard import FOLDER

        FOLDER.check_place(to)  # before anything that takes long
        table = dubito.open(cache)
        learned = None if train is None else dubito.open(train)
        chosen: PredictionSets | bool = sets != 0
        if chosen and (sets or set_method != "lac" or class_wise):
            chosen = PredictionSets(sets or 0.9, set_method, class_wise)
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
            sets=chosen,
            novel=novel,
            seed=seed,
        )
        guard.save(to)
    inputs = options.describe_inputs(guard.provenance)
    screen.show(guard, *([f"inputs: {inputs}"] if inputs else []), written={"guard": to}, inputs=inputs)


@command
def run(
    screen: Screen,
    guard: _Folder,
    images: Annotated[
        str, Argument(metavar="IMAGES", help="A folder, an image, .csv, .zip or .npz; or a cache: needs no model.")
    ],
    *,
    model: options.OtherModel = None,
    load: options.ModelOptions,
    csv: Annotated[Path | None, option("All verdicts, one line per image.", "FILE")] = None,
    top: Annotated[int, option("Show the first N images; CSV and JSON have all.", "N", min=0)] = 20,
) -> None:
    """Accept or refuse the model's predictions for IMAGES, each with the reason.

    Says if the images are not like those of the calibration, about which the guarantee says nothing, and checks the
    guarantee where they have labels.
    """
    options.check_folder_first(guard, images, "guard.json", ("GUARD", "IMAGES"))
    cached = options.is_cache(images)
    if cached:
        options.check_no_model(model, load)
    with screen.waiting("loading the guard" if cached else "loading guard and model"):
        opened = None if cached else dubito.open_images(images)  # before the model is fetched
        loaded = dubito.Guard.load(guard) if cached else _with_model(screen, guard, model, load)
    with screen.waiting("deciding" if cached else "running the model"):
        decisions = loaded.decide(dubito.open(Path(images)) if cached else loaded.predict(opened))
    written = {"csv": csv and decisions.to_csv(csv)}
    screen.show(decisions.limited(top), written=written, guard=str(guard))


@command
def export(
    screen: Screen,
    guard: _Folder,
    *,
    to: Annotated[Path, option("The ONNX file.", "FILE")],
    model: options.OtherModel = None,
    load: options.ModelOptions,
) -> None:
    """Write model, score and threshold as one ONNX file: finished inputs in; logits, uncertainty, accept out."""
    with screen.waiting("loading guard and model"):
        loaded = _with_model(screen, guard, model, load)
    with screen.waiting("exporting"):
        path = loaded.export_onnx(to)
    screen.show(loaded, f"size: {path.stat().st_size / 1e6:.1f} MB", bytes=path.stat().st_size, written={"to": path})


def _with_model(screen: Screen, folder: Path, name: str | None, load: options.ModelOptions) -> "dubito.Guard":
    """The guard with its model, which it names unless `--model` does."""
    model = load.load_stored(screen, name, dubito.Guard.load(folder), f"the guard in '{folder}'")
    return dubito.Guard.load(folder, model)
