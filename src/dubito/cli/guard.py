"""`dubito guard`: a guard is made by `fit`, used by `run`, written as ONNX by `export`; `dubito watch` watches it."""

from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Exit, Option

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli.audit import SOMETHING_WRONG

_Folder = Annotated[Path, Argument(metavar="GUARD", help="A folder that `dubito guard fit` wrote.")]


@command
def fit(
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[Path, option("A new folder, or the folder of a guard to replace.", "DIR")],
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
    set_method: Annotated[
        choices.SetMethod, option("Prediction sets: small ones (lac), or never empty ones (aps).")
    ] = "lac",
    novel: Annotated[
        float, option("Refuse images that are rarer than all but this share of the reference images.")
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
def watch(
    screen: Screen,
    guard: _Folder,
    images: Annotated[
        str | None, Argument(metavar="[IMAGES]", help="New images, or a cache of them; without, show the state.")
    ] = None,
    *,
    labels: Annotated[str | None, option("True classes of images that it has seen: path,label.", "FILE.csv")] = None,
    drawn: Annotated[
        bool, Option("--drawn", help="The labelled images were drawn at random by you, not by --request-labels.")
    ] = False,
    request_labels: Annotated[int | None, option("Name N images to label, drawn at random.", "N", min=1)] = None,
    alpha: Annotated[float, option("Probability of a false alarm, over the whole life.")] = 0.01,
    state: Annotated[Path | None, option("Where its state is kept.", "DIR", show_default="GUARD.watch")] = None,
    model: options.OtherModel = None,
    load: options.ModelOptions,
    csv: Annotated[Path | None, option("Verdicts of the new images.", "FILE")] = None,
) -> None:
    """Watch what a GUARD decides, run after run: are images still like its own, and is its guarantee kept?

    Exit code 3 once images have changed or the guarantee is broken. Several processes may feed one watch.
    """
    if csv is not None and images is None:
        raise BadParameter("--csv writes verdicts of new images: pass IMAGES, too.")
    if drawn and labels is None:
        raise BadParameter("--drawn is about labels: pass --labels, too.")
    cached = images is not None and options.is_cache(images)
    if images is not None:
        options.check_folder_first(guard, images, "guard.json", ("GUARD", "IMAGES"))
    if images is None or cached:
        options.check_no_model(model, load)
    with screen.waiting("loading the guard" if images is None or cached else "loading guard and model"):
        opened = None if images is None or cached else dubito.open_images(images)  # before the model is fetched
        loaded = dubito.Guard.load(guard) if opened is None else _with_model(screen, guard, model, load)
        place = guard.resolve()
        watched = loaded.watch(state or place.with_name(f"{place.name}.watch"), alpha=alpha)
    written: dict[str, Path | None] = {}
    if images is not None:
        with screen.waiting("deciding" if cached else "running the model"):
            decisions = loaded.decide(dubito.open(Path(images)) if cached else loaded.predict(opened))
            watched.update(decisions)
        written = {"csv": csv and decisions.to_csv(csv)}
    if labels is not None:
        watched.label(labels, drawn=drawn)
    names = watched.request_labels(request_labels) if request_labels else []
    report = watched.report()
    notes = [f"label these: {', '.join(names)}"] if names else []
    if request_labels and not names:
        notes = ["no labels are requested: a guaranteed coverage needs none, or no new image is waiting for one"]
    screen.show(report, *notes, written=written, to_label=names)
    if report.alarm:
        raise Exit(SOMETHING_WRONG)


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
