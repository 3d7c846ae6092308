"""`dubito diagnose` and `dubito ensemble`: why confidence fails, and whether members of an ensemble still disagree."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

import dubito
from dubito.choices import Covariance
from dubito.cli import _console as options
from dubito.cli._console import Bootstrap, Screen, command, option
from dubito.storage import Place

if TYPE_CHECKING:
    from dubito.table import Table
    from dubito.types import Classifier


@command
def diagnose(
    screen: Screen,
    cache: Annotated[Place, Argument(metavar="CACHE", help="A cache of in-distribution test images.")],
    ood: Annotated[list[Place], Argument(metavar="OOD...", help="Caches of out-of-distribution images.")],
    *,
    train: Annotated[
        Place | None,
        Option("--learn-from", metavar="CACHE", help="Fit the density on this; by default on half of CACHE."),
    ] = None,
    covariance: Annotated[
        Covariance | None, option("Covariances of the density; by default, what the number of images allows.")
    ] = None,
    model: Annotated[
        str | None, option("source:name of the model: adds lengths and angles of features.", "MODEL")
    ] = None,
    load: options.ModelOptions,
    draws: Annotated[int, option("Balanced sets that are drawn.", "N", min=1)] = 5,
    bootstrap: Bootstrap,
    html: options.Html = None,
) -> None:
    """Find out why a model's confidence does not separate the images of CACHE from those of OOD.

    What saturation, extrapolation and feature overlap cost in points of AUROC, and what to do about each.
    """
    with screen.waiting("opening the caches"):
        table, others = dubito.open(cache), options.open_sets(ood)
        learned = None if train is None else dubito.open(train)
    classifier = None
    if model is not None:
        with screen.waiting(f"loading {model}"):
            classifier = _model_of(screen, table, model, load)
    with screen.waiting("fitting the density and scoring, with bootstrap intervals"):
        diagnosis = dubito.diagnose(
            table,
            others,
            train=learned,
            covariance=covariance,
            classifier=classifier,
            draws=draws,
            **vars(bootstrap),
        )
    screen.show(diagnosis, written={"page": html and diagnosis.to_html(html)})


@command
def ensemble(
    screen: Screen,
    caches: Annotated[
        list[Place],
        Argument(
            metavar="CACHE...",
            help="A cache with an ensemble's columns, or caches of the same images by several models: its members.",
        ),
    ],
    *,
    of: options.Ensemble = "members",
    ood: Annotated[
        list[Place], option("Out-of-distribution images; once for each CACHE, in the same order.", "CACHE")
    ] = [],
    partitions: Annotated[int, option("Random partitions of each size; 0: members in their order.", "N", min=0)] = 5,
    bootstrap: Bootstrap,
    html: options.Html = None,
) -> None:
    """Find out how much members of an ensemble disagree, alone and in sub-ensembles.

    As sub-ensembles grow, they come to agree, and what members do not know is hidden.
    """
    if ood and len(ood) != len(caches):
        raise BadParameter(
            f"--ood takes as many caches as there are members, {len(caches)}, in their order; got {len(ood)}."
        )
    with screen.waiting("opening the caches"):
        table = _members(caches)
        other = _members(ood) if ood else None
    with screen.waiting("cutting members into sub-ensembles, with bootstrap intervals"):
        diagnosis = dubito.explain.diagnose_ensemble(table, of=of, ood=other, partitions=partitions, **vars(bootstrap))
    screen.show(diagnosis, written={"page": html and diagnosis.to_html(html)})


def _model_of(screen: Screen, table: "Table", name: str, load: options.ModelOptions) -> "Classifier":
    """The model that made the table: the weights of another would give angles without a meaning."""
    from dubito.cache.disk import model_identity
    from dubito.errors import ModelError
    from dubito.explain.last_layer import last_layer

    classifier = load.load_stored(screen, name, table, f"the cache '{table.name}'")
    last_layer(classifier)  # a model that has not seen a picture does not know its own head
    reason = None if table.provenance is None else table.provenance.difference(model_identity(classifier))
    if reason:
        raise ModelError(
            f"--model: {name} must be the model that made {table.name}; it is not: {reason}. "
            f"Pass the same name and --weights as to `dubito extract`."
        )
    return classifier


def _members(paths: list[Place]) -> "Table":
    """One cache as it is; of several, the members together."""
    tables = [dubito.open(path) for path in paths]
    if len(tables) == 1:
        return tables[0]
    combined: "Table" = dubito.ensemble(tables)
    combined.name = " + ".join(path.resolve().name for path in paths)
    return combined
