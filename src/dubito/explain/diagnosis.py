"""Why does a model's confidence fail on out-of-distribution images? What each of the causes of `causes.py` costs."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from dubito.choices import Covariance
from dubito.errors import DubitoWarning, TableError, ValueRangeError
from dubito.explain.causes import SCORES, Causes, Estimate, cause_costs, cause_findings, points, verdict
from dubito.explain.last_layer import cosines, directions, last_layer
from dubito.metrics import balanced_auroc, table_accuracy
from dubito.result import Axes, Result, axes, plain
from dubito.scores import Entropy, MaxProbability, ScaledEntropy
from dubito.scores.density import default_density, describe_density
from dubito.table import Table
from dubito.table.overlap import shared_rows
from dubito.table.views import chosen_rows
from dubito.types import Classifier, Json, Score
from dubito.validate import check_bootstrap, check_choice, check_number, check_rows, check_same_model

MEAN = "mean"
"""What the mean over OOD sets is called."""
_BY = "diagnose"


@final
@dataclass(frozen=True)
class Diagnosis(Result):
    """What `diagnose` returns: print it, plot it, take it as JSON, or write it as a page.

    Attributes:
        in_distribution: The name of the in-distribution table.
        rows: How many of its rows were scored.
        classes: The number of classes, c.
        accuracy: The accuracy on these rows, if they have labels of the model's classes.
        saturated: The share of them whose largest probability is exactly 1.0 in float32.
        by_set: By OOD set, what each cause costs.
        mean: The mean over OOD sets, if there are several.
        density: What D is.
        fitted_on: The rows that D was fitted on.
        draws: How many balanced sets were drawn.
        confidence: The confidence of the intervals.
        notes: What is questionable about the tables.
        scores: By score, the uncertainty of every in-distribution row; with a classifier also norm and cosine.
        ood_scores: The same by OOD set.
    """

    titles: ClassVar[Mapping[str, str]] = {
        "ood": "",
        "max_probability": "A max p",
        "entropy": "B entropy",
        "scaled_entropy": "C scaled",
        "density": "D density",
        "saturation": "1 saturation",
        "extrapolation": "2 extrapolation",
        "overlap": "3 overlap",
    }

    in_distribution: str
    rows: int
    classes: int
    accuracy: float | None
    saturated: float
    by_set: dict[str, Causes]
    mean: Causes | None
    density: str
    fitted_on: str
    draws: int
    confidence: float
    notes: tuple[str, ...]
    scores: dict[str, Tensor] = field(repr=False, compare=False)
    ood_scores: dict[str, dict[str, Tensor]] = field(repr=False, compare=False)

    def __getitem__(self, name: str) -> Causes:
        check_choice(name, self.by_set, by="Diagnosis", what="OOD set")
        return self.by_set[name]

    @property
    def all(self) -> list[Causes]:
        """Every set, and the mean last."""
        return [*self.by_set.values(), *([self.mean] if self.mean else [])]

    def title(self) -> str:
        """What the table shows."""
        return f"AUROC of OOD images against {self.in_distribution}, and what each cause costs, in per cent"

    def facts(self) -> dict[str, str]:
        """What was compared."""
        accuracy = "" if self.accuracy is None else f", accuracy {points(self.accuracy)} %"
        spread = max(value.spread for causes in self.all for value in causes.auroc.values())
        return {
            "in-distribution": f"{self.in_distribution}, {self.rows} images scored{accuracy}",
            "density": f"{self.density}; fitted on {self.fitted_on}",
            "draws": f"{self.draws} balanced sets; AUROCs vary by up to ±{100 * spread:.2f} between them",
            "intervals": f"{self.confidence:.0%}",
        }

    def records(self) -> list[dict[str, Any]]:
        """One row per OOD set, and the mean last: the AUROCs and the causes."""
        return [{"ood": causes.name, **causes.auroc, **causes.causes} for causes in self.all]

    def cell(self, key: str, value: Any) -> str:
        """Per cent, with the interval."""
        return str(value) if isinstance(value, Estimate) else super().cell(key, value)

    def findings_by_set(self) -> dict[str, list[str]]:
        """By OOD set: which cause is the largest, then a sentence or two about each; of the mean, the first alone."""
        return {
            causes.name: cause_findings(causes, self.in_distribution, self.classes, self.saturated)
            for causes in self.by_set.values()
        } | ({MEAN: [verdict(self.mean)]} if self.mean else {})

    def findings(self) -> list[str]:
        """The notes, then the findings of every set under its name."""
        by_set = self.findings_by_set().items()
        return [*self.notes, *(line for name, (first, *others) in by_set for line in (f"{name}: {first}", *others))]

    def to_dict(self) -> Json:
        """Plain values, without the scores of every row."""
        described: Json = {key: value for key, value in plain(self).items() if key not in ("by_set", "mean")}
        words = self.findings_by_set()
        sets = {
            causes.name: {**plain(causes), "dominant": causes.dominant, "findings": words[causes.name]}
            for causes in self.all
        }
        return {**described, "sets": sets, "findings": self.findings()}

    def _page(self) -> str:
        from dubito.explain.pages import diagnosis_page  # noqa: PLC0415 (which draws diagnoses)

        return diagnosis_page(self)

    def plot(self, ax: Axes | None = None, *, score: str = "entropy") -> Axes:
        """Histograms of a score, of in-distribution images and of every OOD set."""
        check_choice(score, self.scores, by="Diagnosis.plot", what="score")
        ax = axes(ax)
        values = {self.in_distribution: self.scores[score]}
        values |= {name: scores[score] for name, scores in self.ood_scores.items()}
        edges = np.histogram_bin_edges(torch.cat(list(values.values())).numpy(), 40).tolist()
        for name, one in values.items():
            ax.hist(one.numpy(), edges, density=True, alpha=0.5, label=name)
        ax.set(xlabel=score.replace("_", " "), ylabel="density of images", yticks=[])
        ax.legend(frameon=False)
        return ax


def diagnose(  # noqa: PLR0913 (one call that users type; everything after `ood` is optional)
    table: Table,
    ood: Table | Mapping[str, Table],
    *,
    train: Table | None = None,
    density: Score | None = None,
    covariance: Covariance | None = None,
    classifier: Classifier | str | nn.Linear | None = None,
    draws: int = 5,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Diagnosis:
    """Find out why a model's confidence does not separate in-distribution from out-of-distribution images.

    Args:
        table: In-distribution test images, with the columns feature and logit.
        ood: Out-of-distribution images, with the same columns: one table, or several by name.
        train: Images to fit the density on, ideally those that the model was trained on. By default half of `table`,
            drawn at random; the other half is scored.
        density: The score for D. It is fitted on `train`. Without `train`, a fitted score is used as it is and all of
            `table` is scored: it must not have been fitted on these rows, which cannot be checked here. By default a
            Density that suits the number of rows, features and classes.
        covariance: The kind of covariance of the default density.
        classifier: The classifier, its name or its last layer: adds lengths of features and largest cosines with class
            weights.
        draws: How many balanced sets to draw.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the split, the draws and the bootstrap.
    """
    check_bootstrap(by=_BY, confidence=confidence, resamples=resamples, seed=seed)
    check_number(draws, "[1, inf)", by=_BY, what="draws", whole=True, hint="5 are usual.")
    sets = _ood_sets(table, ood, train)
    train, scored, fitted, fitted_on = _fitted_density(table, train, density, covariance, seed)
    notes = _notes(table, scored, sets, train, fitted)
    scores, *others = _scores([scored, *sets.values()], fitted, classifier)
    ood_scores = dict(zip(sets, others, strict=True))
    inside, *outside = (torch.stack([one[score] for score in SCORES]).numpy() for one in (scores, *others))
    aurocs = [
        balanced_auroc(inside, one, draws=draws, resamples=resamples, seed=seed, number=number)
        for number, one in enumerate(outside)
    ]
    shares = [_saturated(one) for one in sets.values()]
    by_set = {
        name: cause_costs(name, [one], [share], confidence)
        for name, one, share in zip(sets, aurocs, shares, strict=True)
    }
    return Diagnosis(
        in_distribution=short_name(table, "table"),
        rows=len(scored),
        classes=table.shape("logit")[1],
        accuracy=table_accuracy(scored),
        saturated=_saturated(scored),
        by_set=by_set,
        mean=cause_costs(MEAN, aurocs, shares, confidence) if len(aurocs) > 1 else None,
        density=describe_density(fitted, train),
        fitted_on=fitted_on,
        draws=draws,
        confidence=confidence,
        notes=notes,
        scores=scores,
        ood_scores=ood_scores,
    )


def short_name(table: Table, default: str) -> str:
    """The last part of a table's name, because it does not matter where a cache lies; a default for arrays."""
    short = table.name.rstrip("/").rpartition("/")[2]
    return default if short in ("", "table in memory") else short


def _ood_sets(table: Table, ood: Any, train: Table | None) -> dict[str, Table]:
    """The OOD tables by name, after a check of all tables."""
    if not isinstance(ood, Mapping):
        check_rows(ood, by=_BY, least=2, what="ood")
        ood = {short_name(ood, "ood"): ood}
    if not ood or MEAN in ood:
        raise TableError(
            f"{_BY} needs at least one OOD table, and none called '{MEAN}', as the mean over sets is; got "
            f"{', '.join(ood) or 'none'}. Pass a table, or several by name: ood={{'...': table}}."
        )
    named = {f"ood '{name}'": one for name, one in ood.items()}
    for what, one in {"table": table, **named}.items():
        check_rows(one, by=_BY, least=2, what=what)
        one.require("feature", "logit", by=f"{_BY} ({what})")
    if train is not None:
        check_rows(train, by=_BY, what="train")
    if train is table:
        raise TableError(
            f"{_BY}: train must be other rows than table; got the same table twice. A density knows the rows it was "
            f"fitted on too well. Pass training images, or leave train out: then table is split."
        )
    check_same_model(table, {**named, "train": train}, by=_BY)
    return dict(ood)


def _fitted_density(
    table: Table, train: Table | None, density: Score | None, covariance: Covariance | None, seed: int
) -> tuple[Table | None, Table, Score, str]:
    """The rows that the density is fitted on here, if any, the rows to score, the density, and the first in words."""
    if density is not None and covariance is not None:
        raise ValueRangeError(
            f"{_BY}: covariance is that of the default density; got '{covariance}' together with a density. Set it "
            f"there: Density(covariance='{covariance}')."
        )
    if density is not None and density.is_fitted and train is None:
        return None, table, density, "what it was fitted on before"
    if train is None:
        if len(table) < 4:
            raise TableError(
                f"{_BY}: without train, table is split in two halves and needs at least 4 rows; it has {len(table)}. "
                f"Pass train, a table of training images."
            )
        order, half = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed)), len(table) // 2
        train, scored = (chosen_rows(table, rows.sort().values) for rows in (order[:half], order[half:]))
        name = f"half of {short_name(table, 'table')} ({half} rows drawn with seed {seed}), which is not scored"
    else:
        scored, name = table, f"{short_name(train, 'train')} ({len(train)} rows)"
    unfitted = default_density(train, covariance, by=_BY) if density is None else copy.deepcopy(density)
    return train, scored, unfitted.fit(train), name


def _scores(
    tables: Sequence[Table], density: Score, classifier: Classifier | str | nn.Linear | None
) -> list[dict[str, Tensor]]:
    """Of every row the four scores; with a classifier also ||z||, and its largest cosine with a class weight."""
    name, layer = ("", None) if classifier is None else last_layer(classifier)
    if layer is not None:
        layer.check_table(tables[0], by=_BY, name=name)
    by_name = dict(zip(SCORES, (MaxProbability(), Entropy(), ScaledEntropy(), density), strict=True))
    scores = [{name: score.score(table) for name, score in by_name.items()} for table in tables]
    if layer is not None:
        unit = directions(layer.weight)
        for table, of_table in zip(tables, scores, strict=True):
            features = (batch.feature.double() for batch in table.batches("feature"))
            pairs = [torch.stack([z.norm(dim=1), cosines(z, unit).amax(1)]) for z in features]
            of_table["norm"], of_table["cosine"] = torch.cat(pairs, 1)
    return scores


def _saturated(table: Table) -> float:
    """As users compute it: in float32, where everything that rounds to one has no order."""
    full = sum(int((batch.logit.float().softmax(1).amax(1) == 1).sum()) for batch in table.batches("logit"))
    return full / len(table)


def _notes(
    table: Table, scored: Table, ood: Mapping[str, Table], train: Table | None, density: Score
) -> tuple[str, ...]:
    """Images on both sides cannot be separated, whatever the scores do; how much that can matter."""
    name, notes = short_name(table, "table"), []

    def shared(one: Table, other: Table, called: str, where: str) -> tuple[float, str]:
        same = len(shared_rows(one, other).here)
        share = same / len(one)
        return (
            share,
            f"{same} of {len(one)} images of {called} ({points(share)} %) are also {where}, by their features.",
        )

    for called, one in ood.items():
        share, images = shared(one, table, called, f"in {name}")
        if share:
            towards = f"They draw AUROCs towards 50 % by at most about {points(share / 2)} points."
            notes.append(f"{images} {towards} Leave them out.")
    if train is not None:
        share, images = shared(scored, train, name, "among those that the density was fitted on")
        if share:
            known = f"It knows them too well, so D is too high by at most about {points(share)} points."
            notes.append(f"{images} {known} Fit it on other images.")
    for note in notes:
        warnings.warn(note, DubitoWarning, stacklevel=3)
    if train is None and density.learned:  # no warning: usually it is fine
        notes.append(
            f"The density was fitted before; whether on images of {name} cannot be checked. If it was, D is too high."
        )
    return tuple(notes)
