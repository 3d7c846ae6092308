"""`dubito search`: an index of a cache, and its answers; uncertain queries are refused, uncertain items left out."""

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument, Option

import dubito
from dubito.choices import Clean
from dubito.cli import _console as options
from dubito.cli._console import CommandResult, Screen, command, option
from dubito.cli.score import OneScore
from dubito.errors import TableError
from dubito.result import plain
from dubito.storage import Place


@dataclass
class IndexScore(OneScore):
    """The options of the score of an index, which has a default of its own."""

    score: Annotated[
        str | None,
        Option(
            "--score",
            "-s",
            metavar="NAME",
            help="By default the model's own head, or max_probability; without logits, neighbours.",
        ),
    ] = None


@command
def build(
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[Place, option("The folder of the index: new, empty, or an index to replace.", "DIR")],
    score: IndexScore,
    quantile: Annotated[float, option("The share of items that is kept.", "Q")] = 0.9,
    clean: Annotated[Clean, option("Refuse uncertain queries, leave uncertain items out, both or none.")] = "both",
    per_class: Annotated[
        bool, Option("--per-class", help="The quantile in each class; then queries need labels, too.")
    ] = False,
    approximate: Annotated[str | None, option("Faster, not exact: auto, HNSW32, IVF1024,SQ8 ...", "KIND")] = None,
) -> None:
    """Build an index of the images of a CACHE, searched by the cosine of their features."""
    with screen.waiting("opening the cache"):
        from dubito.scores.available import default_score
        from dubito.search import SafeIndex
        from dubito.search.memory import FOLDER

        FOLDER.check_place(to)  # before anything that takes long
        table = dubito.open(cache)
        if per_class and "label" not in table:
            raise TableError(
                f"--per-class needs the class of every image; {table.name} has no labels. Add labels with "
                f"`dubito label {cache} LABELS`, or leave --per-class out."
            )
    with screen.waiting("scoring and building"):
        chosen = score.ready(screen, table)
        if chosen is None:
            chosen, words = default_score(table)
            screen.note(f"uncertainty by {words}. Choose another with --score or --head.")
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
def query(
    screen: Screen,
    index: Annotated[Place, Argument(metavar="INDEX", help="A folder that `dubito search build` wrote.")],
    queries: Annotated[str, Argument(metavar="CACHE|IMAGES", help="What to look for: a cache, or images.")],
    *,
    k: Annotated[int, Option("--k", "-k", min=1, metavar="K", help="Neighbours of each query.")] = 5,
    sets: Annotated[
        bool, Option("--sets", help="Also list all items that lie within each query's uncertainty.")
    ] = False,
    at_most: Annotated[int, option("Largest size of a set.", "N", min=1)] = 100,
    others: Annotated[
        bool,
        Option("--others", help="Leave out the item with the query's own id, for queries that are items themselves."),
    ] = False,
    refuse_above: Annotated[
        float | None, option("Refuse queries above this uncertainty; by default, the threshold of the index.", "U")
    ] = None,
    model: options.OtherModel = None,
    load: options.ModelOptions,
) -> None:
    """Find the most similar items of an INDEX for every image; uncertain queries are refused, with the reason."""
    options.check_folder_first(index, queries, "index.json", ("INDEX", "IMAGES"))
    if options.is_cache(queries):
        options.check_no_model(model, load)
    with screen.waiting("opening the index"):
        loaded = dubito.SafeIndex.load(index)
    table = _query_table(screen, loaded, queries, model, load)
    if refuse_above is None:
        _check_classes(loaded, table)
    with screen.waiting("searching"):
        own = table.id.tolist() if others else None
        result = loaded.search(table, k=k, sets=sets, at_most=at_most, exclude=own, refuse_above=refuse_above)
    skipped = [{"id": name, "reason": why} for name, why in table.skipped]
    counts: dict[str, Any] = {"k": k, "refused": int(result.refused.sum()), "skipped": skipped}
    screen.show(result, index=str(index), queries_from=queries, **counts)


def _summary(index: "dubito.SafeIndex", cache: Place, to: Place) -> CommandResult:
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


def _query_table(
    screen: Screen, index: "dubito.SafeIndex", queries: str, model: str | None, load: options.ModelOptions
) -> "dubito.Table":
    """A cache as it is; images through the model of the index."""
    if options.is_cache(queries):
        return dubito.open(queries)
    images = dubito.open_images(queries)  # before the model is fetched
    with screen.waiting("loading the model"):
        classifier = load.load_stored(screen, model, index, "the index")
    from dubito.cache.disk import model_identity
    from dubito.cache.runner import default_workers, predict_table
    from dubito.probes import base_probe

    return predict_table(
        classifier,
        images,
        feature_dtype=base_probe(index.provenance).feature_dtype,
        provenance=model_identity(classifier),
        labelled=True,
        workers=default_workers(images),
        progress=not (screen.json or screen.quiet),
    )


def _check_classes(index: "dubito.SafeIndex", queries: "dubito.Table") -> None:
    """Raise for queries that no threshold of a class is for, with the options that help."""
    thresholds = index.thresholds
    if thresholds.by_class is None or not index.rule.refuses_queries:
        return
    if queries.provenance and index.provenance and queries.provenance.difference(index.provenance):
        return  # of another model, which `search` refuses first
    if "label" not in queries:
        problem, repair = f"{queries.name} has no labels", "Pass a cache with labels (dubito extract --labels FILE)"
    elif unknown := sorted({*queries.label.tolist()} - thresholds.by_class.keys()):
        problem, repair = f"no item has class {unknown[0]}, as {queries.name} has", "Leave these images out"
    else:
        return
    raise TableError(
        f"the index has a threshold for each class, and {problem}. {repair}, or one threshold with --refuse-above U "
        f"(of all items together it is {thresholds.overall:.4g}), or build the index without --per-class."
    )
