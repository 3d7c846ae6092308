"""Why does a model's confidence fail on out-of-distribution images? What saturation, extrapolation and overlap cost.

    A = AUROC(max_probability)   B = AUROC(entropy)   C = AUROC(scaled_entropy)   D = AUROC(density)

    cause 1, saturation                             C - B
    cause 2, extrapolation with aleatoric overlap   D - C
    cause 3, feature overlap                        1 - D        together: 1 - B, all that the entropy misses

Pearce et al. 2021 (arXiv 2106.04972), section 6 and Table 1, on balanced sets (`metrics.balanced_auroc`). The caption
of Table 1 calls cause 1 dominant; its numbers say cause 3, and its 0.7 % for CIFAR-10 is 10.7 %.

Parts may be negative. They are shown as they are, with a sentence that says why. With a thousand classes, C is far
below B, and cause 2 is large only because it makes up for that; with a poor density, D is below C, and cause 3 is too
large. So the main cause is looked for among steps that do not fall beyond their intervals: where C < B, D - B and
1 - D; where D < C, C - B and 1 - C; where both C < B and D < B, the causes cannot be separated.

Which density is the default: `dubito.scores.default_density`.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from dubito.choices import Covariance
from dubito.errors import DubitoWarning, TableError, ValueRangeError
from dubito.explain._moments import cosines, directions
from dubito.explain.last_layer import last_layer
from dubito.metrics import balanced_auroc, table_accuracy
from dubito.metrics.bootstrap import BalancedAuroc, percentiles
from dubito.result import Result, axes, plain
from dubito.scores import Entropy, MaxProbability, ScaledEntropy
from dubito.scores.density import default_density, describe_density
from dubito.table import Table
from dubito.table.overlap import shared_rows
from dubito.table.views import chosen_rows
from dubito.types import Classifier, Json, Score
from dubito.validate import check_bootstrap, check_choice, check_rows, check_same_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = ("max_probability", "entropy", "scaled_entropy", "density")
CAUSES = ("saturation", "extrapolation", "overlap")
TOGETHER, REST, ALL = "saturation and extrapolation", "extrapolation and overlap", "all causes"
"""Where one score of the chain is worse than the one before, the parts on both sides of it cannot be separated."""
MEAN = "mean"
"""What the mean over OOD sets is called."""
_BY = "diagnose"
_MOST = 0.5
"""With a larger share of common images than this, mostly they are measured."""
_LITTLE = 0.005
"""Of AUROC: less than half a point is nothing to explain."""
_MANY_CLASSES = 100
_NAMES = {
    "saturation": "saturation",
    "extrapolation": "extrapolation with aleatoric overlap",
    "overlap": "feature overlap",
    TOGETHER: "saturation and extrapolation together",
    REST: "extrapolation and overlap together",
}
"""The parts as sentences call them."""


class Estimate(NamedTuple):
    """A mean over balanced draws, its bootstrap interval, and the standard deviation over the draws."""

    value: float
    low: float
    high: float
    spread: float

    def __str__(self) -> str:
        return f"{points(self.value)} [{points(self.low)}, {points(self.high)}]"


def points(share: float) -> str:
    """A share in per cent, one decimal, without a minus zero.

    >>> points(0.8571), points(-0.0001)
    ('85.7', '0.0')
    """
    return f"{round(100 * share, 1) + 0.0:.1f}"


@final
@dataclass(frozen=True)
class Causes:
    """What each cause costs on one OOD set, or on average over several.

    Attributes:
        name: The name of the OOD set.
        rows: How many images of either side a balanced set has.
        auroc: By score of SCORES, the AUROC of OOD against in-distribution images.
        causes: By name (saturation, extrapolation, overlap), a difference of AUROCs, which may be negative.
        together: Saturation and extrapolation as one, D - B.
        parts: What is compared to find the main cause: the causes, or two or three of them as one (TOGETHER, REST, ALL)
            where a negative one does not let them be separated.
        lead: By how much the largest part exceeds the second; None if there is only one.
        saturated: The share of the OOD images whose largest probability is exactly 1.0 in float32.
    """

    name: str
    rows: int
    auroc: dict[str, Estimate]
    causes: dict[str, Estimate]
    together: Estimate
    parts: dict[str, Estimate]
    lead: Estimate | None
    saturated: float

    @property
    def ranked(self) -> list[str]:
        """The parts, the largest first."""
        return sorted(self.parts, key=lambda part: -self.parts[part].value)

    @property
    def dominant(self) -> str | None:
        """The largest part if its lead is beyond the interval, else None."""
        return self.ranked[0] if self.lead is not None and self.lead.low > 0 else None


@final
@dataclass(frozen=True)
class Diagnosis(Result):
    """What `diagnose` returns: print it, plot it, take it as JSON, or write it as a page with `dubito.report`.

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
            causes.name: [
                _verdict(causes),
                _saturation(causes, self.in_distribution, self.classes, self.saturated),
                _extrapolation(causes, self.in_distribution),
                _overlap(causes, self.in_distribution),
            ]
            for causes in self.by_set.values()
        } | ({MEAN: [_verdict(self.mean)]} if self.mean else {})

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

    def plot(self, ax: "Axes | None" = None, *, score: str = "entropy") -> "Axes":
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
    classifier: Classifier | nn.Linear | None = None,
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
        classifier: The classifier or its last layer. Adds lengths of features and their largest cosines with class
            weights.
        draws: How many balanced sets to draw.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the split, the draws and the bootstrap.
    """
    check_bootstrap(by=_BY, confidence=confidence, resamples=resamples, seed=seed)
    if draws < 1:
        raise ValueRangeError(f"{_BY}: draws must be at least 1; got {draws}. 5 are usual.")
    inputs = _inputs(table, ood, train, density, covariance=covariance, seed=seed)
    notes = _notes(inputs)
    fitted = inputs.density if inputs.train is None else copy.deepcopy(inputs.density).fit(inputs.train)
    weight = None if classifier is None else _weight(classifier, inputs.table)
    scores = _scored(inputs.table, fitted, weight)
    ood_scores = {name: _scored(one, fitted, weight) for name, one in inputs.ood.items()}
    aurocs = {
        name: balanced_auroc(
            _stacked(scores), _stacked(others), draws=draws, resamples=resamples, seed=seed, number=number
        )
        for number, (name, others) in enumerate(ood_scores.items())
    }
    by_set = {name: _causes(name, [one], [_saturated(inputs.ood[name])], confidence) for name, one in aurocs.items()}
    shares = [causes.saturated for causes in by_set.values()]
    return Diagnosis(
        in_distribution=short_name(table, "table"),
        rows=len(inputs.table),
        classes=table.shape("logit")[1],
        accuracy=table_accuracy(inputs.table),
        saturated=_saturated(inputs.table),
        by_set=by_set,
        mean=_causes(MEAN, list(aurocs.values()), shares, confidence) if len(aurocs) > 1 else None,
        density=describe_density(fitted, inputs.train),
        fitted_on=inputs.train_name,
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


@final
@dataclass(frozen=True)
class _Inputs:
    """Checked: all rows, those to score, those to fit the density on (None if it is fitted), and the density."""

    whole: Table
    table: Table
    ood: dict[str, Table]
    train: Table | None
    train_name: str
    density: Score


def _inputs(
    table: Table,
    ood: Table | Mapping[str, Table],
    train: Table | None,
    density: Score | None,
    *,
    covariance: Covariance | None = None,
    seed: int = 0,
) -> _Inputs:
    """Check everything; split the table in two halves where there is nothing else to fit a density on."""
    if density is not None and covariance is not None:
        raise ValueRangeError(
            f"{_BY}: covariance is that of the default density; got '{covariance}' together with a density. Set it "
            f"there: Density(covariance='{covariance}')."
        )
    sets = _ood_sets(ood)
    named = {f"ood '{name}'": one for name, one in sets.items()}
    for what, one in {"table": table, **named}.items():
        check_rows(one, by=_BY, least=2, what=what)
        one.require("feature", "logit", by=f"{_BY} ({what})")
    if train is not None:
        check_rows(train, by=_BY, what="train")
    if train is table:
        raise TableError(
            f"{_BY}: train must be other rows than table; got the same table twice. A density knows the rows it was "
            f"fitted on too well. Give training images, or leave train out: then table is split."
        )
    check_same_model(table, {**named, "train": train}, by=_BY)
    if train is None and density is not None and density.is_fitted:
        return _Inputs(table, table, sets, None, "what it was fitted on before", density)
    scored, name = table, "" if train is None else f"{short_name(train, 'train')} ({len(train)} rows)"
    if train is None:
        train, scored = _halves(table, seed)
        name = f"half of {short_name(table, 'table')} ({len(train)} rows drawn with seed {seed}), which is not scored"
    if density is None:
        density = default_density(train, covariance, by=_BY)
    return _Inputs(table, scored, sets, train, name, density)


def _ood_sets(ood: Any) -> dict[str, Any]:
    if not isinstance(ood, Mapping):
        check_rows(ood, by=_BY, least=2, what="ood")
        ood = {short_name(ood, "ood"): ood}
    if not ood:
        raise TableError(f"{_BY} needs at least one OOD table; got none. Give a table, or several by name.")
    if MEAN in ood:
        raise TableError(
            f"{_BY}: no OOD set may be called '{MEAN}', which is the line of the mean over sets. Give it another name: "
            f"ood={{'...': table}}, or rename the folder of its cache."
        )
    return dict(ood)


def _halves(table: Table, seed: int) -> tuple[Table, Table]:
    """Rows to fit on and rows to score, at random."""
    if len(table) < 4:
        raise TableError(
            f"{_BY}: without train, table is split in two halves and needs at least 4 rows; it has {len(table)}. "
            f"Give train, a table of training images."
        )
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    half = len(table) // 2
    return chosen_rows(table, order[:half].sort().values), chosen_rows(table, order[half:].sort().values)


def _scored(table: Table, density: Score, weight: Float[Tensor, "c d"] | None) -> dict[str, Tensor]:
    """The four scores of every row, and where a weight is given the length and the angle of its feature."""
    by_name = dict(zip(SCORES, (MaxProbability(), Entropy(), ScaledEntropy(), density), strict=True))
    scores = {name: score.score(table) for name, score in by_name.items()}
    return scores if weight is None else scores | _geometry(table, weight)


def _weight(classifier: Classifier | nn.Linear, table: Table) -> Float[Tensor, "c d"]:
    weight: Tensor = last_layer(classifier)[1].weight
    if weight.shape[1] != table.shape("feature")[1]:
        raise TableError(
            f"{_BY}: classifier must read features of {table.shape('feature')[1]} numbers, as in "
            f"{short_name(table, 'table')}; its weight has {weight.shape[1]}. Give the model that made the tables."
        )
    return weight


def _geometry(table: Table, weight: Float[Tensor, "c d"]) -> dict[str, Tensor]:
    """||z||, and the largest cosine with a class weight: 0 where there is no direction."""
    unit = directions(weight)
    norms, largest = [], []
    for batch in table.batches("feature"):
        z = batch.feature.double()
        norms.append(z.norm(dim=1))
        largest.append(cosines(z, unit).amax(1))
    return {"norm": torch.cat(norms), "cosine": torch.cat(largest)}


def _stacked(scores: Mapping[str, Tensor]) -> Float64[np.ndarray, "s n"]:
    return torch.stack([scores[name] for name in SCORES]).numpy()


def _causes(name: str, results: Sequence[BalancedAuroc], saturated: Sequence[float], confidence: float) -> Causes:
    """From one set, or the mean over several, draw by draw and resample by resample."""
    drawn = _with_parts(np.mean([result.drawn for result in results], axis=0))
    resampled = _with_parts(np.mean([result.resampled for result in results], axis=0))

    def of(column: str, less: str | None = None) -> Estimate:
        of_draws, of_resamples = (part[column] - (0 if less is None else part[less]) for part in (drawn, resampled))
        low, high = percentiles(of_resamples, confidence).tolist()
        spread = float(of_draws.std(ddof=1)) if len(of_draws) > 1 else 0.0
        return Estimate(float(of_draws.mean()), low, high, spread)

    causes, together = {cause: of(cause) for cause in CAUSES}, of(TOGETHER)
    compared = _compared(causes, together)
    first, *others = sorted(compared, key=lambda part: -float(drawn[part].mean()))
    return Causes(
        name=name,
        rows=min(result.rows for result in results),
        auroc={score: of(score) for score in SCORES},
        causes=causes,
        together=together,
        parts={part: of(part) for part in compared},
        lead=of(first, less=others[0]) if others else None,
        saturated=float(np.mean(saturated)),
    )


def _compared(causes: Mapping[str, Estimate], together: Estimate) -> tuple[str, ...]:
    """The causes, with those on both sides of a score that is worse than the one before it as one."""
    if causes["saturation"].high < 0:
        return (ALL,) if together.high < 0 else (TOGETHER, "overlap")
    return ("saturation", REST) if causes["extrapolation"].high < 0 else CAUSES


def _with_parts(aurocs: Float64[np.ndarray, "b 4"]) -> dict[str, Float64[np.ndarray, "b"]]:
    """By name, the AUROCs and the parts that follow from them."""
    a, b, c, d = aurocs.T
    parts = {"saturation": c - b, "extrapolation": d - c, "overlap": 1 - d, TOGETHER: d - b, REST: 1 - c, ALL: 1 - b}
    return {**dict(zip(SCORES, (a, b, c, d), strict=True)), **parts}


def _saturated(table: Table) -> float:
    """As users compute it: in float32, where everything that rounds to one has no order."""
    full = sum(int((batch.logit.float().softmax(1).amax(1) == 1).sum()) for batch in table.batches("logit"))
    return full / len(table)


def _notes(inputs: _Inputs) -> tuple[str, ...]:
    """Images on both sides cannot be separated, whatever the scores do; how much that can matter."""
    name = short_name(inputs.whole, "table")
    notes = []
    for ood_name, table in inputs.ood.items():
        if same := len(shared_rows(table, inputs.whole).here):
            share = same / len(table)
            effect = (
                "Nothing can separate them, so AUROCs come near 50 % and overlap near 50 points."
                if share > _MOST
                else f"They draw AUROCs towards 50 % by at most about {points(share / 2)} points."
            )
            notes.append(
                f"{_shared(same, table, ood_name)} are also in {name}, by their features. {effect} Leave them out."
            )
    if inputs.train is not None and (same := len(shared_rows(inputs.table, inputs.train).here)):
        share = same / len(inputs.table)
        most = "" if share > _MOST else f" by at most about {points(share)} points"
        notes.append(
            f"{_shared(same, inputs.table, name)} are also among those that the density was fitted on, by their "
            f"features. It knows them too well, so D is too high{most}. Fit it on other images."
        )
    for note in notes:
        warnings.warn(note, DubitoWarning, stacklevel=3)
    if inputs.train is None and inputs.density.learned:  # no warning: usually it is fine
        notes.append(
            f"The density was fitted before; whether on images of {name} cannot be checked. If it was, D is too high."
        )
    return tuple(notes)


def _shared(same: int, table: Table, name: str) -> str:
    return f"{same} of {len(table)} images of {name} ({points(same / len(table))} %)"


def _verdict(causes: Causes) -> str:
    """Which cause is the largest, and whether that is more than chance."""
    missed = 1 - causes.auroc["entropy"].value
    if missed < _LITTLE:
        return f"There is little to explain: the entropy misses {points(missed)} points of AUROC."
    text = f"The entropy misses {points(missed)} points of AUROC."
    if causes.lead is None:
        return f"{text} Neither the scaled entropy nor the density does better, so the causes cannot be separated."
    first, second, *_ = causes.ranked
    text += f" The largest part is {_NAMES[first]}, {causes.parts[first]}"
    lead = f"it exceeds {_NAMES[second]} by {causes.lead}"
    if causes.dominant:
        return f"{text}; {lead}, beyond the interval."
    return f"{text}, but {lead}: within the interval, so neither can be called the main cause."


def _saturation(causes: Causes, name: str, classes: int, saturated: float) -> str:
    part = causes.causes["saturation"]
    shares = (
        f"In float32, the largest probability is exactly 1 for {points(saturated)} % of {name} and "
        f"{points(causes.saturated)} % of {causes.name}."
    )
    if part.high < 0:
        why = (
            f"0.1 x logits flatten the softmax of {classes} classes so far that the many small logits outweigh the "
            f"large ones"
            if classes >= _MANY_CLASSES
            else "it lets all small logits count, and here they say less than the large ones"
        )
        return (
            f"Saturation: {part} points, negative. Scaling the logits down makes it worse: {why}. Saturation is not "
            f"the problem: stay with the entropy. {shares}"
        )
    if part.low <= 0:
        return f"Saturation costs nothing distinguishable from zero, {part} points. {shares}"
    return (
        f"Saturation costs {part} points: so many probabilities lie so close to 1 that their order is lost or turned. "
        f"The score `scaled_entropy`, the entropy of 0.1 x logits, recovers these points with the same model. {shares}"
    )


def _extrapolation(causes: Causes, name: str) -> str:
    title, part = "Extrapolation with aleatoric overlap", causes.causes["extrapolation"]
    scaled_worse = causes.causes["saturation"].high < 0 < part.value
    if scaled_worse:
        part = causes.together
        text = (
            f"{title}: {causes.causes['extrapolation']} points, which first of all make up for what scaling lost. "
            f"Compared with the entropy itself, the density gains {part} points"
        )
    else:
        text = f"{title}{': ' if part.high < 0 else ' costs '}{part} points"
    rival = "entropy" if scaled_worse else "softmax"
    if part.high < 0:
        return (
            f"{text}, negative. The density is a worse guide than the {rival}: it has too few training images for its "
            f"covariances, or the features are not Gaussian. Give more training images (train=...) or another "
            f"covariance; or a density of your own, such as Density(space='log'), one tuned with Density.tune, or "
            f"Neighbours()."
        )
    if part.low <= 0:
        return f"{text}, indistinguishable from zero: the {rival} is as good a guide as the density."
    return (
        f"{text}: images of {causes.name} lie off the features of {name}, yet the softmax is sure of them, or it is as "
        f"unsure of ambiguous images of {name}. The score `density` recovers these points on the same features."
    )


def _overlap(causes: Causes, name: str) -> str:
    part = causes.causes["overlap"]
    if part.value < _LITTLE:
        return f"Feature overlap costs next to nothing, {part} points: the features separate {causes.name} from {name}."
    text = (
        f"Feature overlap costs {part} points: features of {causes.name} lie where those of {name} lie. No score on "
        f"these features can repair that, as far as the density is a good one. It takes other features: another model, "
        f"an earlier layer, or training on more kinds of images."
    )
    if causes.causes["extrapolation"].high < 0 or causes.together.high < 0:
        best = max(causes.auroc, key=lambda score: causes.auroc[score].value)
        least = points(1 - causes.auroc[best].value)
        text += f" Here the density is a poor one: `{best}` misses only {least} points, so overlap is at most that."
    if causes.auroc["density"].high < 0.5:
        text += (
            f" D is even below 50 %: images of {causes.name} lie closer to the training features than those of {name} "
            f"do, as plain or faint images often do."
        )
    return text
