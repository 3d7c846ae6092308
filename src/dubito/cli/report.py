"""`dubito report`, `dubito map` and `dubito demo`: pages that show images and how far to trust the model on them."""

import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli.extract import Reading
from dubito.cli.score import OneScore
from dubito.errors import SkippedImagesWarning
from dubito.storage import Place, to_place

if TYPE_CHECKING:
    from dubito.types import Classifier

_PLACES = (
    "pass a model and images (`dubito report timm:resnet50.a1_in1k photos`), or caches (`dubito report cache/photos "
    "cache/other --images photos`): the first is what the report is about, others are out-of-distribution images."
)
_NO_EFFECT = (
    "a CACHE holds what a model predicted: --cache, --labels and all options that read images or load a MODEL have no "
    "effect on it. Leave them out; `dubito label CACHE LABELS` adds labels."
)


@command
def report(
    screen: Screen,
    places: Annotated[
        list[str],
        Argument(
            metavar="MODEL IMAGES | CACHE [OOD...]",
            help="A model and a folder of images, or a finished cache and caches of out-of-distribution images.",
        ),
    ],
    *,
    to: Annotated[Path, option("The page; a CSV of all images goes beside it.", "FILE")] = Path("report.html"),
    ood: Annotated[list[Place], option("Out-of-distribution images; repeat it for several caches.", "CACHE")] = [],
    train: Annotated[
        Place | None, Option("--learn-from", metavar="CACHE", help="In-distribution images for scores that learn.")
    ] = None,
    guard: Annotated[Place | None, option("Use the verdicts of this guard, by `dubito guard fit`.", "DIR")] = None,
    watch: options.WatchFolder = None,
    images: Annotated[str | None, option("The images of CACHE, for pictures.", "IMAGES")] = None,
    cache: Annotated[Place | None, option("Keep what MODEL predicts, to resume and for other commands.", "DIR")] = None,
    corrupted: Annotated[int, option("Images to corrupt for the corruption curve; 0 for no curve.", "N", min=0)] = 32,
    top: Annotated[int, option("Print the N least trusted images.", "N", min=1)] = 20,
    most: Annotated[int, option("Images in each gallery of the page, about 15 KB each.", "N", min=1)] = 12,
    reading: Reading,
    load: options.ModelOptions,
) -> None:
    """Write a report on a model and images as one page to send, and print which images to trust least.

    How good the model is, which score to use, what a guard would accept, what to worry about; then numbers, curves and
    images. Without --guard, verdicts read the model's own probabilities and guarantee nothing.
    """
    if to.suffix.lower() not in (".html", ".htm"):
        raise BadParameter(f"--to takes a file that ends in .html; got '{to}'.")
    if options.is_cache(places[0]) and all(map(options.is_cache, places)):
        if cache is not None or (reading, load) != (Reading(), options.ModelOptions()):
            raise BadParameter(_NO_EFFECT)
        model, others = None, [*map(to_place, places[1:]), *ood]
        table = dubito.open(places[0])
        chosen = None if guard is None else dubito.Guard.load(guard)
    elif len(places) == 2 and not options.is_cache(places[0]):
        if images is not None:
            raise BadParameter("--images belong to a CACHE; a MODEL takes them as its second argument.")
        options.check_model_first(*places)
        screen.options = {**screen.options, "images": "IMAGES"}  # which are no option here
        images, others = places[1], ood
        table, chosen, model = _predicted(screen, places[0], images, cache, guard, reading, load)
    else:
        raise BadParameter(_PLACES)
    with screen.waiting("opening the caches"):
        sets, learned = options.open_sets(others), None if train is None else dubito.open(train)
        watched = options.open_watch(chosen, watch)
    with screen.waiting("scoring, comparing and drawing"):
        made = dubito.report.model_report(
            table,
            images,
            ood=sets,
            train=learned,
            guard=chosen,
            watch=watched,
            model=model,
            corrupted=corrupted,
            gallery=most,
        )
        given = (
            {"--ood": others, "--learn-from": train, "--guard": guard, "--watch": watch, "--cache": cache}
            | _changed(reading)
            | _changed(load)
        )
        given |= {"--images": images} if model is None else {"--corrupted": corrupted}
        how = _calls(table, places, images, cache, given | {"--most": most, "--to": to})
        result = replace(made, how=how, watch=made.watch and options.with_commands(made.watch))
        written = {"page": result.to_html(to), "csv": result.to_csv(to.with_suffix(".csv"))}
    inputs = options.describe_inputs(table.provenance)
    below = [*([f"inputs: {inputs}"] if inputs else []), _address(to)]
    screen.show(result.limited(top), *below, written=written, inputs=inputs)


@command
def map_(
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[Path | None, option("Write an interactive page.", "FILE")] = None,
    png: Annotated[Path | None, option("Write a figure, by matplotlib.", "FILE")] = None,
    images: Annotated[str | None, option("The images of the cache, for thumbnails.", "IMAGES")] = None,
    method: Annotated[choices.Layout, option("How the map is laid out.")] = "tsne",
    score: OneScore,
    perplexity: Annotated[float, option("Perplexity of t-SNE.", "P")] = 30.0,
    neighbours: Annotated[int, option("Neighbours of UMAP.", "K", min=2)] = 15,
    most: Annotated[int, option("Of a larger cache, this many images are drawn at random.", "N", min=1)] = 20_000,
    thumbnails: Annotated[int, option("At most this many, about 3 KB each.", "N", min=0)] = 2000,
    colour: Annotated[
        choices.Colouring | None,
        option("Colour of the circles; by default the class, or the uncertainty if there are more than ten classes."),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Draw a map of a CACHE: similar images lie together, uncertain ones are larger and more transparent."""
    if to is None and png is None:
        raise BadParameter("give --to map.html, --png map.png, or both.")
    if images is not None and to is None:
        raise BadParameter("--images are for the thumbnails of the page, but no page is written. Pass --to map.html.")
    with screen.waiting("opening the cache"):
        from dubito.scores.available import default_score

        table = dubito.open(cache)
        chosen = score.ready(screen, table)
        if chosen is None:
            chosen, words = default_score(table, dubito.Entropy())
            if "logit" not in table:
                screen.note(f"uncertainty by {words}. Choose another with --score or --head.")
    with screen.waiting("laying out"):
        drawn = dubito.draw_map(
            table,
            chosen,
            method=method,
            to=to,
            png=png,
            images=images,
            thumbnails=thumbnails,
            colour=colour,
            perplexity=perplexity,
            neighbours=neighbours,
            most=most,
            seed=seed,
        )
    screen.show(drawn, written={"page": to, "figure": png})


@command
def demo(
    screen: Screen,
    to: Annotated[Path, option("Images, cache and page go there.", "DIR")] = Path("demo"),
) -> None:
    """See it work: EfficientNet-Lite0 on photographs and their blurred, boxed, zoomed and noisy copies.

    Nothing is downloaded: weights and photographs come inside packages of the extra "demo".
    """
    screen.when_stopped = "Finished shards are safe: the same command continues from there."
    with screen.waiting("loading PyTorch"):
        pages = dubito.report
    result = pages.run_demo(to, progress=not screen.quiet)
    page = pages.write_demo_page(result, to / "demo.html")
    # Last, and as it was called: in a fresh clone, dubito is not on the path.
    program = sys.argv[0] if Path(sys.argv[0]).name == "dubito" else f"{Path(sys.executable).name} -m dubito"
    look = f"look into it: {program} explore {to / 'cache'} --images {to / 'images'}"
    # These are nine copies of each of ten photographs, without labels: nothing that a guarantee could be tested on.
    guard = "with labelled images of your own, `dubito guard fit` guarantees an error rate; these have no labels"
    screen.show(result, f"written: {page}", _address(page), guard, look, page=str(page))


def _predicted(
    screen: Screen,
    model: str,
    images: str,
    cache: Place | None,
    guard: Place | None,
    reading: Reading,
    load: options.ModelOptions,
) -> tuple["dubito.Table", "dubito.Guard | None", "Classifier"]:
    """What a model predicts for images, with the columns that a guard reads; the guard; and the model."""
    screen.when_stopped = "With --cache DIR, finished shards are safe: the same command continues from there."
    with screen.waiting(f"loading {model}"):
        from dubito.cache.disk import check_place
        from dubito.probes.registry import probes_for

        opened = dubito.open_images(images, reading.labels)  # what is cheap is checked before the model is fetched
        if cache is not None:
            check_place(cache)
        if guard is not None:
            dubito.Guard.load(guard)
        classifier = load.load(model)
        chosen = None if guard is None else dubito.Guard.load(guard, classifier)
        probes = [] if chosen is None else probes_for(chosen.needs, chosen.provenance, (), by="guard")
    settings = {**vars(reading), "labels": None}  # which the opened images have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedImagesWarning)  # the report lists them
        table = dubito.extract(classifier, opened, cache, probes=probes, **settings, progress=not screen.quiet)
    table.name = images
    return table, chosen, classifier


def _calls(
    table: "dubito.Table", places: Sequence[str], images: str | None, cache: Place | None, given: Mapping[str, object]
) -> dict[str, str]:
    """By what a report may lack, the command that adds it; and the commands that make this one.

    Args:
        table: What the report is about.
        places: The arguments.
        images: The images, if they are known.
        cache: Where the model's outputs are kept, if they are.
        given: The options; those without a value are left out.
    """
    from_cache = options.is_cache(places[0])
    kept = places[0] if from_cache else str(cache or "CACHE")
    model = (table.provenance and table.provenance.model if from_cache else places[0]) or "MODEL"
    made = table.provenance if from_cache else None
    weights = ["--weights", str(made.checkpoint["path"])] if made and made.checkpoint else []
    extract = shlex.join(["dubito", "extract", model, images or "IMAGES", "--to", kept, *weights])
    again = ["dubito", "report", *(places[:1] if from_cache else places)]
    for flag, value in given.items():
        several = value if isinstance(value, list) else [value]
        again += [text for one in several if one is not None for text in (flag, str(one))]
    quoted = shlex.quote(kept)
    return {
        "label": f"dubito label {quoted} labels.csv",
        "ood": f"dubito report {quoted} OOD_CACHE",
        "feature": extract,
        "issues": f"dubito label-issues {quoted}",
        "images": f"dubito report {quoted} --images IMAGES",
        "train": f"dubito report {quoted} --learn-from CACHE",
        "model": shlex.join(["dubito", "report", model, images or "IMAGES", *weights]),
        "reproduce": "\n".join([*([extract] if from_cache else []), shlex.join(again)]),
    }


def _changed(group: Any) -> dict[str, object]:
    """Of a group of options, those that are not as by default."""
    named = {f"--{one.name.replace('_', '-')}": (getattr(group, one.name), one.default) for one in fields(group)}
    return {flag: "none" if value is None else value for flag, (value, default) in named.items() if value != default}


def _address(page: Path) -> str:
    """Where a browser finds a page."""
    return f"open {page.absolute().as_uri()}"
