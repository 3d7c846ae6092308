"""`dubito guard`: `fit` makes a guard, `run` uses it, `refit` and `with-risk` change its threshold; `dubito watch`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Argument, BadParameter, Exit, Option

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli._translate import translate
from dubito.cli.audit import SOMETHING_WRONG
from dubito.cli.score import NamedScores
from dubito.errors import ValueRangeError
from dubito.storage import Place

if TYPE_CHECKING:
    from dubito.guard import PredictionSets, Watch

_Folder = Annotated[Place, Argument(metavar="GUARD", help="A folder that `dubito guard fit` wrote.")]
_To = Annotated[Place, option("A new folder, or the folder of a guard to replace.", "DIR")]
_Groups = Annotated[
    Place | None,
    option("Groups of images, such as cameras: a CSV of image names, and the columns of --per and --sets-per.", "FILE"),
]
_OF_FIT = {"missed": "--missed of `dubito guard fit`"}
"""What a guard has, and commands that change its threshold do not take."""


@dataclass
class SetOptions:
    """Prediction sets, as `PredictionSets` takes them."""

    sets: Annotated[
        float | None, option("Coverage of prediction sets; 0 for none.", show_default="0.9 where labels allow")
    ] = None
    class_wise: Annotated[bool, Option("--class-wise", help="Prediction sets that cover every class.")] = False
    set_method: Annotated[
        choices.SetMethod, option("Prediction sets: small ones (lac), or never empty ones (aps, raps, saps).")
    ] = "lac"
    sets_per: Annotated[str | None, option("Prediction sets that cover every group: a column of --groups.", "NAME")] = (
        None
    )
    clusters: Annotated[
        int, option("Prediction sets that cover so many clusters of classes, where --class-wise lacks images.", "N")
    ] = 0
    penalty: Annotated[
        float | None, option("lambda of raps and saps, per rank.", show_default="0.01 of raps, 0.1 of saps")
    ] = None
    free_ranks: Annotated[int | None, option("Of raps: as many classes have no penalty.", "N", show_default="5")] = None

    arguments: ClassVar[Mapping[str, str]] = {"method": "--set-method"}
    """Arguments of the library that these options stand for under another name."""
    own_arguments: ClassVar[Mapping[str, str]] = {"coverage": "--sets", "per": "--sets-per"}
    """Those that stand for other options elsewhere in the command."""

    def made(self, seed: int) -> "PredictionSets | bool":
        """The prediction sets; True for the default ones, where images and labels allow them."""
        from dubito.guard import PredictionSets

        if self == SetOptions() or self.sets == 0:
            return self.sets != 0
        ranks = {} if self.free_ranks is None else {"free_ranks": self.free_ranks}
        try:
            return PredictionSets(
                PredictionSets.coverage if self.sets is None else self.sets,
                self.set_method,
                self.class_wise,
                self.sets_per,
                self.clusters,
                self.penalty,
                seed=seed,
                **ranks,
            )
        except ValueRangeError as error:  # translated here: `--coverage` is another option of the command
            raise BadParameter(translate(str(error), self.own_arguments)) from error


@command
def fit(
    screen: Screen,
    cache: options.Cache,
    *,
    to: _To,
    risk: Annotated[
        float | None,
        option(
            "At most this share of accepted images is wrong (with --costs: their mean cost).",
            show_default="0.05",
        ),
    ] = None,
    confidence: Annotated[float, option("Confidence of the guarantee.")] = 0.95,
    coverage: Annotated[float | None, option("Instead: at least this share of images is accepted.")] = None,
    false_alarms: Annotated[
        float | None, option("Instead: at most this share of correct predictions is refused.")
    ] = None,
    per: Annotated[
        str | None,
        option("The guarantee holds within every predicted class, or every group: a column of --groups.", "class|NAME"),
    ] = None,
    groups: _Groups = None,
    costs: Annotated[
        Path | None,
        option("What errors cost: CSV of numbers, a row per true and a column per predicted class.", "FILE"),
    ] = None,
    missed: Annotated[
        list[str],
        option("Also: at most this share of a class is accepted as another; repeat for several.", "CLASS=SHARE"),
    ] = [],
    scores: NamedScores,
    train: Annotated[
        Place | None,
        Option("--learn-from", metavar="CACHE", help="Images that scores learn from; by default a part of CACHE."),
    ] = None,
    sets: SetOptions,
    novel: Annotated[
        float, option("Refuse images that are rarer than all but this share of the reference images.")
    ] = 0.005,
    seed: options.Seed = 0,
) -> None:
    """Find a threshold for labelled images of a CACHE that keeps a guarantee with a stated confidence.

    Scores are chosen on one part of the images and the threshold on another.
    """
    with screen.waiting("opening the cache"):
        _check_place(to)
        columns = [one for one in (None if per == "class" else per, sets.sets_per) if one is not None]
        table = _with_groups(dubito.open(cache), groups, columns)
        learned = None if train is None else dubito.open(train)
        chosen = sets.made(seed)
    with screen.waiting("choosing scores and testing thresholds"):
        guard = dubito.Guard.fit(
            None,
            table,
            risk,
            confidence,
            coverage=coverage,
            false_alarms=false_alarms,
            per=per,
            costs=None if costs is None else _costs_in(costs),
            missed=_shares(missed),
            scores=scores.made(),
            train=learned,
            sets=chosen,
            novel=novel,
            seed=seed,
        )
        guard.save(to)
    inputs = options.describe_inputs(guard.provenance)
    screen.show(guard, *([f"inputs: {inputs}"] if inputs else []), written={"guard": to}, inputs=inputs)


@command
def refit(
    screen: Screen,
    guard: _Folder,
    cache: Annotated[
        Place, Argument(metavar="CACHE", help="Labelled images, drawn at random from those that are to come.")
    ],
    *,
    to: _To,
    groups: _Groups = None,
) -> None:
    """Calibrate a GUARD on the images of a CACHE: the same scores and the same guarantee, for images like these.

    They must be images that it was not fitted on. For another risk, call `dubito guard with-risk` first.
    """
    options.check_folder_first(guard, str(cache), "guard.json", ("GUARD", "CACHE"))
    screen.options = {**screen.options, "risk": "a risk of", **_OF_FIT}
    with screen.waiting("testing thresholds"):
        _check_place(to)
        old = dubito.Guard.load(guard)
        made = old.refit(_with_groups(dubito.open(cache), groups, old.group_columns))
        made.save(to)
    screen.show(made, written={"guard": to})


@command
def with_risk(
    screen: Screen,
    guard: _Folder,
    risk: Annotated[
        float,
        Argument(metavar="RISK", help="At most this share of accepted images is wrong (or: their mean cost)."),
    ],
    *,
    to: _To,
    confidence: Annotated[
        float | None, option("Confidence of the guarantee.", show_default="that of the GUARD")
    ] = None,
) -> None:
    """Change the risk that a GUARD guarantees: another threshold, tested on the images that it was calibrated on.

    With a smaller risk, it accepts fewer images. Choose a risk that you can accept anyway: the smallest of many that
    were tried holds with less confidence than it says.
    """
    screen.options = {**screen.options, **_OF_FIT}
    with screen.waiting("testing thresholds"):
        _check_place(to)
        made = dubito.Guard.load(guard).with_risk(risk, confidence)
        made.save(to)
    screen.show(made, written={"guard": to})


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
    groups: _Groups = None,
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
        table = _with_groups(dubito.open(images) if cached else loaded.predict(opened), groups, loaded.group_columns)
        decisions = loaded.decide(table)
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
    labels: Annotated[Place | None, option("True classes of images that it has seen: path,label.", "FILE.csv")] = None,
    drawn: Annotated[
        bool, Option("--drawn", help="The labelled images were drawn at random by you, not by --request-labels.")
    ] = False,
    request_labels: Annotated[int | None, option("Name N images to label, drawn at random.", "N", min=1)] = None,
    to: Annotated[
        Path | None, option("Write the images to label as CSV, to fill in and pass with --labels.", "FILE.csv")
    ] = None,
    alpha: Annotated[
        float | None,
        option("Probability of a false alarm, over the whole life.", show_default="that of the state, 0.01 if new"),
    ] = None,
    state: Annotated[Path | None, option("Where its state is kept.", "DIR", show_default="GUARD.watch")] = None,
    model: options.OtherModel = None,
    load: options.ModelOptions,
    groups: _Groups = None,
    csv: Annotated[Path | None, option("Verdicts of the new images.", "FILE")] = None,
) -> None:
    """Watch what a GUARD decides, run after run: are images still like its own, and is its guarantee kept?

    Exit code 3 once images have changed or the guarantee is broken. Several processes may feed one watch.
    """
    _check_watch_options(images, csv, labels, to, drawn=drawn, request_labels=request_labels)
    cached = images is not None and options.is_cache(images)
    if images is not None:
        options.check_folder_first(guard, images, "guard.json", ("GUARD", "IMAGES"))
    if images is None or cached:
        options.check_no_model(model, load)
    with screen.waiting("loading the guard" if images is None or cached else "loading guard and model"):
        opened = None if images is None or cached else dubito.open_images(images)  # before the model is fetched
        loaded = dubito.Guard.load(guard) if opened is None else _with_model(screen, guard, model, load)
        watched = loaded.watch(state or _beside(guard), alpha=alpha)
        known = {} if labels is None else _filled_in(screen, watched, labels)  # refused before IMAGES count
    written: dict[str, Path | None] = {}
    if images is not None:
        with screen.waiting("deciding" if cached else "running the model"):
            table = dubito.open(images) if cached else loaded.predict(opened)
            decisions = loaded.decide(_with_groups(table, groups, loaded.group_columns))
            watched.update(decisions)
        written["csv"] = csv and decisions.to_csv(csv)
    if labels is not None:
        watched.label(known, drawn=drawn)
    names = watched.request_labels(request_labels) if request_labels else []
    report = options.with_commands(watched.report())
    notes = [f"label these: {', '.join(names)}"] if names else []
    if request_labels and not names:
        notes = ["no labels are requested: a guaranteed coverage needs none, or those of all new images are known"]
    if to is not None:
        written["to"] = _write_requests(names, to) if names else None
    screen.show(report, *notes, written=written, to_label=names)
    if report.alarm:
        raise Exit(SOMETHING_WRONG)


def _check_watch_options(
    images: str | None,
    csv: Path | None,
    labels: Place | None,
    to: Path | None,
    *,
    drawn: bool,
    request_labels: int | None,
) -> None:
    """Raise for options that need another one, and for a file that may hold labels already."""
    if csv is not None and images is None:
        raise BadParameter("--csv writes verdicts of new images: pass IMAGES, too.")
    if drawn and labels is None:
        raise BadParameter("--drawn is about labels: pass --labels, too.")
    if to is not None and request_labels is None:
        raise BadParameter("--to writes the images of --request-labels: pass that, too.")
    if to is not None and to.exists():
        raise BadParameter(f"--to: '{to}' exists, and labels that were filled in would be lost. Choose another file.")


def _beside(guard: Place) -> Path:
    """Where the state of a watch is kept by default."""
    if not isinstance(guard, Path):
        raise BadParameter(f"--state: the GUARD '{guard}' is not on this machine. Choose a folder here for the state.")
    place = guard.resolve()
    return place.with_name(f"{place.name}.watch")


def _filled_in(screen: Screen, watched: "Watch", path: Place) -> dict[str, int | None]:
    """The labels of a file, by image, without those that nobody has filled in yet."""
    from dubito.data.labels import labels_by_image

    known, rows = watched.check_labels(path), len(labels_by_image(path))
    if len(known) < rows:
        screen.note(f"--labels: {rows - len(known):,} of {rows:,} images have no label yet.")
    return known


def _write_requests(names: Sequence[str], to: Path) -> Path:
    """A CSV of images, whose labels are to be filled in."""
    from dubito.storage import write_csv

    return write_csv(to, [("path", "label"), *((name, "") for name in names)])


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


def _with_groups(table: "dubito.Table", path: Place | None, columns: Sequence[str]) -> "dubito.Table":
    """A table with the groups of its images: columns of a CSV file, found by the names of images."""
    if path is None:
        return table
    if not columns:
        raise BadParameter("--groups: neither guarantee nor prediction sets hold for every group. Leave it out.")
    from dubito.data.image_set import some
    from dubito.data.labels import find_rows, read_csv

    listing, ids, what = read_csv(path), table.row_ids(), f"--groups: '{path}'"
    names = listing.names(what)
    row_of, groups = find_rows(names, ids, what), {}
    for column in columns:
        group_of = dict(zip(names, listing.column(listing.position(column.lower())), strict=True))
        of_rows = {row: group_of[name] for name, row in row_of.items()}
        if lacking := [name for row, name in enumerate(ids) if not of_rows.get(row)]:
            raise BadParameter(
                f"{what} must name the group of every image in column '{column}'; {len(lacking)} of {len(ids)} images "
                f"have none: {some(lacking)}."
            )
        groups[column] = [of_rows[row] for row in range(len(ids))]
    return table.extended(**groups)


def _costs_in(path: Path) -> list[list[float]]:
    """The numbers of a CSV file."""
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        return [[float(one) for one in row] for row in rows]
    except (OSError, ValueError) as error:
        raise BadParameter(
            f"--costs: '{path}' must be a CSV file of numbers alone, without a header ({error})."
        ) from error


def _shares(missed: Sequence[str]) -> dict[str | int, float]:
    """By class, its share; a class that is a number is an index."""
    shares: dict[str | int, float] = {}
    for text in missed:
        name, _, share = text.rpartition("=")
        try:
            shares[int(name) if name.isdecimal() else name] = float(share)
        except ValueError as error:
            raise BadParameter(f"--missed must be CLASS=SHARE, such as crack=0.01; got '{text}'.") from error
    return shares


def _check_place(to: Place) -> None:
    """Raise where no guard can be written, before anything that takes long."""
    from dubito.guard.guard_folder import FOLDER

    FOLDER.check_place(to)


def _with_model(screen: Screen, folder: Place, name: str | None, load: options.ModelOptions) -> "dubito.Guard":
    """The guard with its model, which it names unless `--model` does."""
    model = load.load_stored(screen, name, dubito.Guard.load(folder), f"the guard in '{folder}'")
    return dubito.Guard.load(folder, model)
