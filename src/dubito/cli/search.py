"""`dubito search`: an index of a cache, and what it answers; unclear queries are refused, unclear items left out."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.choices import Clean
from dubito.cli import _options as options
from dubito.cli._console import Screen, facts
from dubito.errors import SkippedImagesWarning, TableError

if TYPE_CHECKING:
    from dubito.search import SafeIndex
    from dubito.table import Table
    from dubito.types import Score

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")


@app.command(
    "build", epilog="Example: [bold]dubito search build cache/photos --to index --head auto --quantile 0.9[/bold]"
)
def build(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    to: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="The folder of the index: new, empty, or an index to replace.")
    ],
    score: Annotated[
        str | None,
        typer.Option(
            "--score", "-s", metavar="NAME", help="Judges items and queries; by default the model's own head."
        ),
    ] = None,
    fit: options.Fit = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    head: Annotated[
        str | None, typer.Option("--head", metavar="NAME|PATH|HUB", help="A trained uncertainty head, or auto.")
    ] = None,
    quantile: Annotated[float, typer.Option("--quantile", metavar="Q", help="The share of items that is kept.")] = 0.9,
    clean: Annotated[
        Clean, typer.Option("--clean", help="Refuse uncertain queries, leave uncertain items out, both or none.")
    ] = "both",
    per_class: Annotated[
        bool, typer.Option("--per-class", help="The quantile in each class; then queries need labels, too.")
    ] = False,
    approximate: Annotated[
        str | None,
        typer.Option("--approximate", metavar="KIND", help="Faster, not exact: auto, HNSW32, IVF1024,SQ8 ..."),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Build an index of the images of a CACHE, searched by the cosine of their features."""
    screen = Screen.current(json=json, debug=debug)
    wanted = options.parse_settings(settings)
    with screen.waiting("opening the cache"):
        from dubito.search import SafeIndex
        from dubito.search.saving import check_place

        check_place(to)  # before anything that takes long
        table = dubito.open(cache)
        if per_class and "label" not in table:
            raise TableError(
                f"--per-class needs the class of every image; {table.name} has no labels. Extract it with some (images "
                f"in class folders, or dubito extract --labels FILE), or leave --per-class out."
            )
    with screen.waiting("scoring and building"):
        judge = _judge(cache, table, screen, score, wanted, fit, head)
        index = SafeIndex.build(table, judge, quantile=quantile, clean=clean, per_class=per_class)
        if approximate is not None:
            index.approximate(None if approximate == "auto" else approximate)
        index.save(to)
    if index.rule.cleans_items and quantile < 1 and index.kept == len(index):
        few = (
            "a quantile of a class needs more images of it"
            if per_class
            else "there are too few images, or too many alike"
        )
        screen.note(
            f"no image is left out: {few}. Lower --quantile{', or leave --per-class out' if per_class else ''}."
        )
    found = _described(index, to)
    screen.result({"cache": str(cache), **found}, facts(f"index of {cache}", _told(found)))


@app.command("query", epilog="Example: [bold]dubito search query index photos/new --k 5 --json[/bold]")
def query(  # noqa: PLR0913 (a command's options)
    index: Annotated[
        Path, typer.Argument(metavar="INDEX", help="A folder that `dubito search build` wrote.", show_default=False)
    ],
    queries: Annotated[
        str, typer.Argument(metavar="CACHE|IMAGES", help="What to look for: a cache, or images.", show_default=False)
    ],
    *,
    k: Annotated[int, typer.Option("--k", "-k", min=1, metavar="K", help="Neighbours of each query.")] = 5,
    sets: Annotated[
        bool, typer.Option("--sets", help="Also all items that lie within each query's uncertainty.")
    ] = False,
    at_most: Annotated[int, typer.Option("--at-most", min=1, metavar="N", help="Items of a set.")] = 100,
    others: Annotated[
        bool, typer.Option("--others", help="Never an item of the query's own id: for queries that are items.")
    ] = False,
    refuse_above: Annotated[
        float | None,
        typer.Option(
            "--refuse-above", metavar="U", help="Refuse queries above this uncertainty; by default as the index does."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="For images; by default the one of the index.")
    ] = None,
    weights: options.Weights = "pretrained",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find the most similar items of an INDEX for every image; uncertain queries are refused, with the reason."""
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("opening the index"):
        from dubito.search import SafeIndex

        opened = SafeIndex.load(index)
    table = _queries(opened, queries, model, weights, screen)
    if refuse_above is None:
        _check_classes(opened, table)
    with screen.waiting("searching"):
        names = table.id.tolist()
        own = names if others else None
        found = opened.search(table, k=k, sets=sets, at_most=at_most, exclude=own, refuse_above=refuse_above)
    result = {
        "index": str(index),
        "queries_from": queries,
        "k": k,
        "refused": int(found.refused.sum()),
        "skipped": [{"id": name, "reason": why} for name, why in table.skipped],
        **found.to_dict(),
    }
    screen.result(result, found)


def _judge(
    cache: Path,
    table: "Table",
    screen: Screen,
    name: str | None,
    settings: options.Values,
    fit: Path | None,
    head: str | None,
) -> "Score":
    """The one score that was asked for; without a word, the head of this model, or its largest probability."""
    from dubito.cli._scores import ready_scores
    from dubito.heads.shelf import entry_for

    if name is not None and head is not None:
        raise typer.BadParameter("--score and --head are two ways to name the one score of an index; give one of them.")
    if name is None and head is None:
        head = "auto" if entry_for(table.provenance) else None
        name = None if head else "max_probability"
        chosen = "the uncertainty head of this model" if head else "max_probability: there is no head for this model"
        screen.note(f"uncertainty by {chosen}. Choose another with --score or --head.")
    names, heads = ([name] if name else ["head"]), ([head] if head else [])
    scores = ready_scores(cache, table, screen, names=names, settings=settings, fit=fit, heads=heads, load=None)
    if len(scores) > 1:
        raise typer.BadParameter(
            f"--score must name one score; got {', '.join(scores)}. Choose with --set {name}.of=..."
        )
    return next(iter(scores.values()))


def _queries(index: "SafeIndex", queries: str, model: str | None, weights: str, screen: Screen) -> "Table":
    """A cache as it is; images through the model of the index."""
    if (Path(queries) / "manifest.json").is_file():
        return dubito.open(Path(queries))
    name = model or (index.provenance.model if index.provenance else None)
    if name is None:
        raise typer.BadParameter("the index does not know its model; give --model, or a cache instead of images.")
    name = name if model else options.stored_model(name, "the index")
    with screen.waiting(f"loading {name}"):
        classifier = dubito.load(name, weights=options.parse_weights(weights))
    from dubito.cache.manifest import model_identity
    from dubito.cache.runner import default_workers, describe_skipped, predict_table
    from dubito.probes import base_probe

    images = dubito.open_images(queries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedImagesWarning)  # noted below
        table = predict_table(
            classifier,
            images,
            feature_dtype=base_probe(index.provenance).feature_dtype,
            provenance=model_identity(classifier),
            labelled=True,
            workers=default_workers(images),
            progress=not screen.json,
        )
    if table.skipped:
        screen.note(describe_skipped(table))
    return table


def _check_classes(index: "SafeIndex", queries: "Table") -> None:
    """Raise for queries that no threshold of a class is for, with the options that help."""
    thresholds = index.thresholds
    if thresholds.by_class is None or not index.rule.refuses_queries:
        return
    if queries.model_id != index.backend.state().origin.model_id:
        return  # of another model, which `search` refuses first
    if "label" not in queries:
        wrong, better = f"{queries.name} has no labels", "Give a cache with labels (dubito extract --labels FILE)"
    elif unknown := sorted({*queries.label.tolist()} - thresholds.by_class.keys()):
        wrong, better = f"no item has class {unknown[0]}, as {queries.name} has", "Ask without these images"
    else:
        return
    raise TableError(
        f"the index has a threshold for each class, and {wrong}. {better}, or one threshold with --refuse-above U (of "
        f"all items together it is {thresholds.overall:.4g}), or build the index without --per-class."
    )


def _described(index: "SafeIndex", to: Path) -> dict[str, Any]:
    approximation = index.backend.approximation
    return {
        "to": str(to),
        "items": len(index),
        "searched": index.kept,
        "width": index.width,
        "score": None if index.score is None else index.score.name,
        **index.rule.to_json(),
        "threshold": index.thresholds.overall,
        "approximation": None if approximation is None else approximation.to_json(),
    }


def _told(found: dict[str, Any]) -> dict[str, str]:
    approximation = found["approximation"]
    told = {
        "folder": found["to"],
        "items": f"{found['items']:,}, of which {found['searched']:,} are searched",
        "uncertainty": f"{found['score']}, at most {found['threshold']:.4g} (quantile {found['quantile']:g}"
        f"{'; for each class another' if found['per_class'] else ''}; clean: {found['clean']})",
    }
    if approximation:
        told["approximation"] = f"{approximation['kind']}, recall {approximation['recall']:.3f} of ten neighbours"
    return told
