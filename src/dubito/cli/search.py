"""`dubito search`: an index of a cache, and its answers; uncertain queries are refused, uncertain items left out."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.choices import Clean
from dubito.cli import _console as options
from dubito.cli._console import CommandResult, Screen, command
from dubito.cli.score import one_score
from dubito.errors import TableError
from dubito.result import plain

if TYPE_CHECKING:
    from dubito.search import SafeIndex
    from dubito.table import Table


@command
def build(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the index: new, empty, or an index to replace.")
    ],
    score: Annotated[
        str | None,
        typer.Option("--score", "-s", metavar="NAME", help="By default the model's own head, or max_probability."),
    ] = None,
    train: options.Train = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    head: options.OneHead = None,
    quantile: Annotated[float, typer.Option(metavar="Q", help="The share of items that is kept.")] = 0.9,
    clean: Annotated[
        Clean, typer.Option(help="Refuse uncertain queries, leave uncertain items out, both or none.")
    ] = "both",
    per_class: Annotated[
        bool, typer.Option("--per-class", help="The quantile in each class; then queries need labels, too.")
    ] = False,
    approximate: Annotated[
        str | None, typer.Option(metavar="KIND", help="Faster, not exact: auto, HNSW32, IVF1024,SQ8 ...")
    ] = None,
) -> None:
    """Build an index of the images of a CACHE, searched by the cosine of their features."""
    with screen.waiting("opening the cache"):
        from dubito.heads.shelf import entry_for
        from dubito.search import SafeIndex
        from dubito.search.memory import FOLDER

        FOLDER.check_place(to)  # before anything that takes long
        table = dubito.open(cache)
        if per_class and "label" not in table:
            raise TableError(
                f"--per-class needs the class of every image; {table.name} has no labels. Extract it with labels "
                f"(images in class folders, or dubito extract --labels FILE), or leave --per-class out."
            )
    with screen.waiting("scoring and building"):
        if score is None and head is None:
            head, score = ("auto", None) if entry_for(table.provenance) else (None, "max_probability")
            name = "the uncertainty head of this model" if head else "max_probability: there is no head for this model"
            screen.note(f"uncertainty by {name}. Choose another with --score or --head.")
        chosen: Any = one_score(screen, table, score=score, settings=settings, train=train, head=head)
        index = SafeIndex.build(table, chosen, quantile=quantile, clean=clean, per_class=per_class)
        if approximate is not None:
            index.approximate(None if approximate == "auto" else approximate)
        index.save(to)
    if index.rule.cleans_items and quantile < 1 and index.kept == len(index):
        reason = "there are too few images, or too many alike. Lower --quantile."
        if per_class:
            reason = "a quantile of a class needs more images of it. Lower --quantile, or leave --per-class out."
        screen.note(f"no image is left out: {reason}")
    screen.show(_summary(index, cache, to))


@command
def query(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="A folder that `dubito search build` wrote.")],
    queries: Annotated[str, typer.Argument(metavar="CACHE|IMAGES", help="What to look for: a cache, or images.")],
    *,
    k: Annotated[int, typer.Option("--k", "-k", min=1, metavar="K", help="Neighbours of each query.")] = 5,
    sets: Annotated[
        bool, typer.Option("--sets", help="Also all items that lie within each query's uncertainty.")
    ] = False,
    at_most: Annotated[int, typer.Option(min=1, metavar="N", help="Largest size of a set.")] = 100,
    others: Annotated[
        bool, typer.Option("--others", help="Never an item of the query's own id: for queries that are items.")
    ] = False,
    refuse_above: Annotated[
        float | None,
        typer.Option(metavar="U", help="Refuse queries above this uncertainty; by default as the index does."),
    ] = None,
    model: options.OtherModel = None,
    weights: options.Weights = "pretrained",
) -> None:
    """Find the most similar items of an INDEX for every image; uncertain queries are refused, with the reason."""
    with screen.waiting("opening the index"):
        loaded = dubito.SafeIndex.load(index)
    table = _query_table(screen, loaded, queries, model, weights)
    if refuse_above is None:
        _check_classes(loaded, table)
    with screen.waiting("searching"):
        own = table.id.tolist() if others else None
        result = loaded.search(table, k=k, sets=sets, at_most=at_most, exclude=own, refuse_above=refuse_above)
    skipped = [{"id": name, "reason": why} for name, why in table.skipped]
    counts: dict[str, Any] = {"k": k, "refused": int(result.refused.sum()), "skipped": skipped}
    screen.show(result, index=str(index), queries_from=queries, **counts)


def _summary(index: "SafeIndex", cache: Path, to: Path) -> CommandResult:
    """How many items are searched, and by which uncertainty."""
    rule, approximation = index.rule, index.backend.approximation
    score, threshold = index.score.name if index.score else None, index.thresholds.overall
    by_class = "; another one for each class" if rule.per_class else ""
    facts = {
        "folder": str(to),
        "items": f"{len(index):,}, of which {index.kept:,} are searched",
        "uncertainty": f"{score}, at most {threshold:.4g} (quantile {rule.quantile:g}{by_class}; clean: {rule.clean})",
    }
    if approximation:
        facts["approximation"] = f"{approximation.kind}, recall {approximation.recall:.3f} of ten neighbours"
    values = {
        "cache": str(cache),
        "to": str(to),
        "items": len(index),
        "searched": index.kept,
        "width": index.width,
        "score": score,
        **plain(rule),
        "threshold": threshold,
        "approximation": plain(approximation),
    }
    return CommandResult(f"index of {cache}", values, facts)


def _query_table(screen: Screen, index: "SafeIndex", queries: str, model: str | None, weights: str | None) -> "Table":
    """A cache as it is; images through the model of the index."""
    if options.is_cache(queries):
        return dubito.open(Path(queries))
    name = options.stored_model(model, index.provenance, "the index")
    with screen.waiting(f"loading {name}"):
        classifier = dubito.load(name, weights=weights)
    from dubito.cache.manifest import model_identity
    from dubito.cache.runner import default_workers, predict_table
    from dubito.probes import base_probe

    images = dubito.open_images(queries)
    return predict_table(
        classifier,
        images,
        feature_dtype=base_probe(index.provenance).feature_dtype,
        provenance=model_identity(classifier),
        labelled=True,
        workers=default_workers(images),
        progress=not (screen.json or screen.quiet),
    )


def _check_classes(index: "SafeIndex", queries: "Table") -> None:
    """Raise for queries that no threshold of a class is for, with the options that help."""
    thresholds = index.thresholds
    if thresholds.by_class is None or not index.rule.refuses_queries:
        return
    if queries.model_id != (index.provenance and index.provenance.model_id):
        return  # of another model, which `search` refuses first
    if "label" not in queries:
        problem, repair = f"{queries.name} has no labels", "Give a cache with labels (dubito extract --labels FILE)"
    elif unknown := sorted({*queries.label.tolist()} - thresholds.by_class.keys()):
        problem, repair = f"no item has class {unknown[0]}, as {queries.name} has", "Leave these images out"
    else:
        return
    raise TableError(
        f"the index has a threshold for each class, and {problem}. {repair}, or one threshold with --refuse-above U "
        f"(of all items together it is {thresholds.overall:.4g}), or build the index without --per-class."
    )
