"""Which score for my model? All that the table's columns allow, ranked on your own images; says what is noise.

    errors     are wrong predictions more uncertain than right ones?     error AUROC, AURC         needs logit, label
    ood        are OOD images more uncertain than in-distribution ones?  OOD AUROC, one per set    needs a second table
    corrupted  are corrupted copies of these images more uncertain?      OOD AUROC                 needs their table

All scores see the same resamples of images (a paired bootstrap). The interval of each score's gap to the best accounts
for how many were compared, and for having chosen the best on these very images (`metrics.gap_to_best`): with this
confidence, the true best is among those whose gap may be zero. Wrong predictions are those of the table's own logits.
Lower AURC is better; its gap is how much more of it a score has than the best.

Corrupted copies (`dubito.data.CorruptedCopies`) stand in for OOD images that nobody has yet: `Comparison.ood_choice` is
the score that separates them best, by the mean over the corruptions of the AUROC of copies against the images
themselves. As there are equally many copies by each corruption, that mean is the AUROC of all copies together. Each
corruption changes the whole image. The rule is ours, and it sees no OOD image; experiments/ood_choice.py measures how
far its choice is behind the best.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from statistics import median
from textwrap import shorten
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, final

from jaxtyping import Bool, Float
from torch import Tensor

from dubito.data.corruptions import is_corrupted_copy
from dubito.errors import DubitoError, TableError
from dubito.evaluate.evaluate import (
    SEEN,
    SHARED_WITH_OOD,
    TITLES,
    USUAL,
    USUAL_KEY,
    USUAL_TITLE,
    ErrorsAtCoverage,
    check_any_scores,
    coverage_facts,
    errors_at_coverage,
    has_both,
)
from dubito.metrics import GapToBest, RankedScore, aurc, auroc, join_ood, rank_scores, wrong_predictions
from dubito.metrics.bootstrap import FEWEST
from dubito.result import Axes, Result, axes, plain, plot_intervals
from dubito.scores import UncertaintyHead
from dubito.scores.available import AvailableScores, available_scores, requested_scores, why_not_comparable
from dubito.table import Table
from dubito.types import Json, Score
from dubito.validate import check_bootstrap, check_choice, check_rows, check_same_model, has_model_labels, warn_shared

ERRORS = ("error_auroc", "aurc")
"""Metrics of the model's errors."""
CORRUPTED = "corrupted copies"
"""What the question of corrupted copies is about."""
_RARE = 30
_ONE_PASS = {"logit", "feature"}
"""Columns that a single pass of the model writes."""
_TWICE_BELOW = 0.2
"""Seconds: a faster scoring is timed again, because the first one also reads the columns from disk."""
_VISIBLE = 5e-4
"""Half of the last decimal that is shown."""
_CORPUS = 80
_NAMES = 6
"""Most names in one sentence."""
_HARM = {
    "train": SEEN,
    "ood": SHARED_WITH_OOD,
    CORRUPTED: "They are not corrupted. Extract dubito.data.CorruptedCopies(images).",
}

Uncertainties = dict[str, dict[str | None, Float[Tensor, "_"]]]
"""By score and OOD table; None stands for the in-distribution table."""


def compare(
    table: Table,
    ood: Table | Mapping[str, Table] | Sequence[Table] | None = None,
    *,
    train: Table | None = None,
    corrupted: Table | None = None,
    scores: Mapping[str, Score | str] | Sequence[Score | str] | Score | str | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Comparison":
    """Rank scores on your own images, with intervals and costs, and say which differences are noise.

    Args:
        table: Images of the classes that the model was trained for. With labels, scores are ranked by how well they
            find its errors.
        ood: Out-of-distribution images: one table, or several by name.
        train: Other in-distribution images, for scores that learn. Without it they are left out.
        corrupted: Corrupted copies of the table's images, by `dubito.data.CorruptedCopies`. They decide `ood_choice` of
            the result: the score to use where there are no OOD images yet.
        scores: Scores by name or in a list, or names of registered ones. A copy of those that learn and are not fitted
            is fitted on `train`. Default: every registered score that the columns allow, and the head that ships for
            this very model, if there is one. Heads of your own are compared if you pass them.
        confidence: Probability that the true best is among the scores whose gap to the best may be zero.
        resamples: Number of resamples of the paired bootstrap.
        seed: Seed of the bootstrap.

    >>> table = Table(logit=[[3.0, 0.0], [0.2, 0.0], [0.0, 0.1], [0.0, 2.0]] * 5, label=[0, 1, 0, 1] * 5)
    >>> compare(table, resamples=50)["error_auroc"].leading
    ['max_probability', 'entropy', 'scaled_entropy', 'margin', 'max_logit', 'energy', 'gen']
    """
    check_rows(table, by="compare")
    check_bootstrap(by="compare", confidence=confidence, resamples=resamples, seed=seed, least=2)
    ood_tables = _checked_tables(table, train, ood, corrupted)
    if scores is None:
        chosen = available_scores(table, train)
    else:
        chosen = requested_scores(scores, table, train, by="compare")
        check_any_scores(chosen.scores, by="compare")
    u, costs = _score_tables(chosen, table, ood_tables, strict=scores is not None)
    if not u:
        if "feature" not in table:
            table.require("logit", by="compare")
        reasons = "; ".join(f"{name}: {why}" for name, why in chosen.left_out.items())
        raise TableError(
            f"compare: no score can be computed from {table.name} ({reasons}). Extract logits or features."
        )
    result = Comparison(table.name, len(table), confidence, costs, left_out=chosen.left_out)
    result.fitted, result.uncertainties = chosen.scores, u
    if has_model_labels(table):
        wrong = wrong_predictions(table, by="compare")
        result.errors_at_coverage = {name: errors_at_coverage(of[None], wrong) for name, of in u.items()}
    for metric, about, values, positives in _questions(result.remarks, table, u, ood_tables):
        options: Any = {"confidence": confidence, "resamples": resamples, "seed": seed, "by": "compare"}
        ranked = rank_scores(aurc if metric == "aurc" else auroc, values, positives, **options)
        result.questions.append(Question(metric, about, len(positives), int(positives.sum()), ranked))
    if not result.questions:
        raise TableError(f"compare: {' '.join(result.remarks)}")
    result.remarks += chosen.remarks
    for name, score in chosen.scores.items():
        if isinstance(score, UncertaintyHead):  # whether it learned from the very images here, only the user knows
            corpus = str(score.trained_.get("corpus") or "images that it does not name")
            result.remarks.append(
                f"{name} was trained on losses of {shorten(corpus, _CORPUS, placeholder=' ...')}: if these images were "
                f"among them, it looks better than it is."
            )
    return result


class Cost(NamedTuple):
    """What a score costs, once its columns are there.

    Attributes:
        microseconds: Time to score one image.
        fit_seconds: Time to fit it here; None if it was not fitted here.
        reads: The columns that it needs. Those of ensembles and gradients take further passes of the model.
    """

    microseconds: float
    fit_seconds: float | None
    reads: tuple[str, ...]


@final
@dataclass
class Question:
    """What the scores should separate, and how well each of them does.

    Attributes:
        metric: A name in TITLES.
        about: "errors", or the name of the OOD images.
        images: Number of ranked images.
        positives: Number of images that should be uncertain.
        scores: Scores by name, the best first.
    """

    metric: str
    about: str
    images: int
    positives: int
    scores: dict[str, RankedScore]

    @property
    def of_errors(self) -> bool:
        """Whether it is about wrong predictions, not about OOD images."""
        return self.metric in ERRORS

    @property
    def key(self) -> str:
        """Its column in `Comparison.records`."""
        return self.metric if self.of_errors else f"{self.metric}_{self.about}"

    @property
    def title(self) -> str:
        """The heading of its column."""
        return TITLES[self.metric] if self.of_errors else f"{TITLES[self.metric]} {self.about}"

    @property
    def rarer(self) -> int:
        """Number of images of the rarer of the two classes."""
        return min(self.positives, self.images - self.positives)

    @property
    def leading(self) -> list[str]:
        """The scores that could be the best: their differences are noise on these images."""
        return [name for name, score in self.scores.items() if not score.gap_to_best.surely]

    def finding(self) -> str:
        """Which scores lead, and how large a difference must be to count."""
        kind = "wrong predictions" if self.of_errors else "of them OOD"
        where = f"on these {self.images} images ({self.positives} {kind})"
        leading, (best, first) = self.leading, next(iter(self.scores.items()))
        if len(self.scores) == 1:
            return f"{self.title}: {best} has {first.value.value:.3f} {where}; there is no other score to compare."
        if len(leading) == 1:
            second, gap = next((name, one.gap_to_best) for name, one in self.scores.items() if one.rank == 2)
            text = (
                f"{self.title}: {best} is better than every other score {where}, {gap.value:.3f} "
                f"[{gap.low:.3f}, {gap.high:.3f}] ahead of {second}, the next best."
            )
        else:
            worse = len(self.scores) - len(leading)
            rest = "" if not worse else f" {worse} other {'score is' if worse == 1 else 'scores are'} worse."
            text = f"{self.title}: {_listed(leading)} cannot be distinguished {where}.{rest}"
        rare = f" Only {self.rarer} {'image is' if self.rarer == 1 else 'images are'} of the rarer class"
        if self.rarer < FEWEST:
            return f"{text}{rare}: too few to distinguish any scores."
        reach = median(one.gap_to_best.high - one.gap_to_best.value for one in list(self.scores.values())[1:])
        noise = f" Differences below about {reach:.2g} are noise here." if reach > _VISIBLE and len(leading) > 1 else ""
        return text + (f"{rare}." if self.rarer < _RARE else "") + noise


@final
@dataclass
class Comparison(Result):
    """Scores ranked on a user's own images: print it, plot it, or take questions, records or findings.

    Attributes:
        name: Name of the in-distribution table.
        rows: Number of its images.
        confidence: Confidence of every interval and verdict.
        costs: Costs by score.
        questions: What was compared, errors first.
        left_out: By score, why it could not be computed.
        remarks: Why a question could not be answered, and what may flatter a score.
        errors_at_coverage: By score, the share of wrong predictions among the most certain half, 80 %, 90 % and all
            images; empty without labels of the model's classes.
        fitted: The scores themselves, by name.
        uncertainties: By score and OOD table, the uncertainty of every image; None is the in-distribution table.
    """

    name: str
    rows: int
    confidence: float
    costs: dict[str, Cost]
    questions: list[Question] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    errors_at_coverage: dict[str, ErrorsAtCoverage] = field(default_factory=dict)
    # Not in repr, text and JSON.
    fitted: dict[str, Score] = field(default_factory=dict, repr=False, compare=False)
    uncertainties: Uncertainties = field(default_factory=dict, repr=False, compare=False)

    titles: ClassVar[Mapping[str, str]] = {
        USUAL_KEY: USUAL_TITLE,
        "microseconds": "µs / image",
        "fit_seconds": "fit",
    }

    def __getitem__(self, title: str) -> Question:
        questions = [one for one in self.questions if title in (one.title, one.metric, one.about)]
        if not questions:
            check_choice(title, [one.title for one in self.questions], by="Comparison", what="question")
        return questions[0]

    @property
    def ranking(self) -> list[str]:
        """All scores, the best on the first question first."""
        return list(self.questions[0].scores)

    @property
    def ood_choice(self) -> str | None:
        """The score for OOD images that nobody has seen: the best at corrupted copies; None without any."""
        copies = next((one for one in self.questions if one.about == CORRUPTED), None)
        return None if copies is None else next(iter(copies.scores))

    @property
    def choice(self) -> str | None:
        """Of the scores that could be best on every question, the one that needs the fewest columns; None without any.

        A score that reads what a single pass of the model writes comes before any that needs further passes, one that
        reads logits alone before one that reads features, and then the better one. Measured times do not count: they
        differ from run to run, and the choice must not. Corrupted copies count only if there is no other question.
        """
        questions = [one for one in self.questions if one.about != CORRUPTED] or self.questions
        everywhere = [name for name in self.ranking if all(name in one.leading for one in questions)]
        reads = {name: set(self.costs[name].reads) for name in everywhere}
        return min(reads, key=lambda name: (not reads[name] <= _ONE_PASS, len(reads[name])), default=None)

    def title(self) -> str:
        """The table, its size and the number of scores."""
        return f"{self.name}: {self.rows} images, {len(self.costs)} scores, {self.confidence:.0%} intervals"

    def facts(self) -> dict[str, str]:
        """How many errors remain among the most certain images."""
        return coverage_facts({name: self.errors_at_coverage[name] for name in self.ranking if self.errors_at_coverage})

    def records(self) -> list[dict[str, Any]]:
        """One row per score: value and gap to the best on every question, and costs."""
        records: list[dict[str, Any]] = []
        for name in self.ranking:
            record: dict[str, Any] = {"score": name}
            if self.errors_at_coverage:
                record[USUAL_KEY] = self.errors_at_coverage[name][USUAL]
            for question in self.questions:
                score = question.scores[name]
                record |= {question.key: score.value, f"{question.key}_gap_to_best": score.gap_to_best}
            records.append(record | self.costs[name]._asdict() | {"reads": ", ".join(self.costs[name].reads)})
        return records

    def heading(self, key: str) -> str:
        """Questions go by their titles."""
        titles = {question.key: question.title for question in self.questions}
        return titles.get(key) or ("gap to best" if key.endswith("_gap_to_best") else super().heading(key))

    def cell(self, key: str, value: Any) -> str:
        """Gaps that may be noise are marked "="."""
        if key in ("microseconds", "fit_seconds") and value is not None:
            return f"{value:.1f}" if key == "microseconds" else f"{value:.1f} s"
        if key == USUAL_KEY:
            return f"{100 * value:.1f} %"
        if not isinstance(value, GapToBest):
            return super().cell(key, value)
        return ("" if value.surely else "= ") + super().cell(key, value if value.value else None)

    def findings(self) -> list[str]:
        """Who leads on each question, which score serves all of them, and what was left out."""
        sentences = [*(question.finding() for question in self.questions), *self.remarks]
        if self.ood_choice is not None:
            best = self[CORRUPTED].scores[self.ood_choice].value.value
            sentences.append(
                f"For OOD images that you have not seen: {self.ood_choice}, which separates corrupted copies of these "
                f"images best (AUROC {best:.3f})."
            )
        questions = [one for one in self.questions if one.about != CORRUPTED] or self.questions
        every = "every question" if len(self.questions) > 1 else "this question"
        every += " except the corrupted copies" if len(questions) < len(self.questions) else ""
        if self.choice is None:
            sentences.append(f"No score could be best on {every}: choose by what you want to find.")
        elif len(self.costs) > 1:
            sentences.append(f"Of the scores that could be best on {every}, {self.choice} needs the fewest columns.")
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            by_reason.setdefault(why.removesuffix("."), []).append(name)
        return sentences + [f"Left out: {_listed(names, len(names))} ({why})." for why, names in by_reason.items()]

    def to_dict(self) -> Json:
        """Everything as plain values, with the choice and the leading scores."""
        questions = [plain(question) | {"leading": question.leading} for question in self.questions]
        return {**super().to_dict(), "questions": questions, "choice": self.choice, "ood_choice": self.ood_choice}

    def plot(self, ax: Axes | None = None, *, question: str | None = None) -> Axes:
        """The gap of every score to the best on one question, by default the first; a gap that crosses 0 is noise."""
        chosen = self.questions[0] if question is None else self[question]
        height = max(4.0, 1.0 + 0.2 * len(chosen.scores))  # inches: labels must not overlap
        picture = axes(ax, size=(5.0, height))
        plot_intervals(picture, {"": {name: one.gap_to_best for name, one in chosen.scores.items()}})
        labels = [f"{name}  {one.value.value:.3f}" for name, one in chosen.scores.items()]
        picture.set_yticks(range(len(labels)), labels)
        picture.axvline(0, color="grey", linestyle="--")
        picture.set(xlabel=f"{chosen.title}: gap to the best", title=self.title())
        return picture


def _checked_tables(table: Table, train: Any, ood: Any, corrupted: Table | None) -> dict[str, Table]:
    """OOD tables by name, corrupted copies last.

    Raises for tables without rows or of several models, and warns of images that two tables share.
    """
    # A path would be a sequence, too.
    tables = [] if ood is None else [ood] if isinstance(ood, Table | str | PathLike) else ood
    pairs = list(tables.items() if isinstance(tables, Mapping) else ((getattr(one, "name", ""), one) for one in tables))
    if train is not None:
        check_rows(train, by="compare", what="train")
    for _, one in pairs:
        check_rows(one, by="compare", what="ood")
    if len(dict(pairs)) < len(pairs):
        raise TableError(
            f"compare: ood tables need names of their own; got {len(pairs)} with {len(dict(pairs))}. "
            f"Pass them by name: ood={{'svhn': ..., 'textures': ...}}."
        )
    others = ({} if train is None else {"train": train}) | {f"ood '{name}'": one for name, one in pairs}
    if corrupted is not None:
        check_rows(corrupted, by="compare", what="corrupted")
        if CORRUPTED in dict(pairs):
            raise TableError(f"compare: with corrupted=, no ood table may be called '{CORRUPTED}'. Rename it.")
        other = next((name for name in corrupted.row_ids() if not is_corrupted_copy(name)), None)
        if other is not None:
            raise TableError(
                f"compare: corrupted must be a table of corrupted copies, with ids that look like NAME-SEVERITY/IMAGE, "
                f"such as 'fog-1/000000'; {corrupted.name} has '{other}'. Extract dubito.data.CorruptedCopies(images), "
                f"rename your own copies, or pass other OOD images as ood."
            )
        others[CORRUPTED] = corrupted
        pairs.append((CORRUPTED, corrupted))
    check_same_model(table, others, by="compare")
    for name, other in others.items():
        harm = _HARM[name if name == CORRUPTED else name.partition(" ")[0]]
        warn_shared(table, other, by="compare", what=name, harm=harm)
    return dict(pairs)


def _score_tables(
    chosen: AvailableScores, table: Table, ood: Mapping[str, Table], *, strict: bool
) -> tuple[Uncertainties, dict[str, Cost]]:
    """Every score on every table; one that fails is left out with its reason, unless the user named it.

    Scores whose values cannot be compared between the tables are always left out.
    """
    u: Uncertainties = {}
    costs = {}
    for name, score in chosen.scores.items():
        if why := next(filter(None, (why_not_comparable(score, table, other) for other in ood.values())), None):
            chosen.left_out[name] = why
            continue
        try:
            values, seconds = _timed(score, table)
            u[name] = {None: values} | {other: score.score(one) for other, one in ood.items()}
        except DubitoError as error:
            if strict:
                raise
            chosen.left_out[name] = str(error)
        else:
            costs[name] = Cost(1e6 * seconds / len(table), chosen.fit_seconds.get(name), score.columns_in(table))
    chosen.scores = {name: score for name, score in chosen.scores.items() if name in u}
    return u, costs


def _timed(score: Score, table: Table) -> tuple[Float[Tensor, "n"], float]:
    seconds = []
    for _ in range(2):
        start = perf_counter()
        u = score.score(table)
        seconds.append(perf_counter() - start)
        if seconds[0] > _TWICE_BELOW:
            break
    return u, min(seconds)


def _questions(
    remarks: list[str], table: Table, u: Uncertainties, ood: Mapping[str, Table]
) -> Iterator[tuple[str, str, dict[str, Tensor], Bool[Tensor, "n"]]]:
    """Metric, what it is about, the scores' values and the positives; a remark says why a question is missing."""
    values = {name: of[None] for name, of in u.items()}
    wrong = wrong_predictions(table, by="compare") if has_model_labels(table) else None
    if wrong is None:
        repair = "" if ood else " Add labels (dubito.cache.label_cache(folder, labels)), or give OOD images."
        remarks.append(f"{table.name} has no labels of the model's classes, so its errors are unknown.{repair}")
    elif not has_both(wrong):
        repair = "" if ood else " Give more images, or OOD images."
        kind = "wrong" if wrong.any() else "right"
        remarks.append(f"All {len(wrong)} predictions are {kind}, so errors cannot be ranked.{repair}")
    else:
        yield from ((metric, "errors", values, wrong) for metric in ERRORS)
    for other in ood:
        by_score = {name: join_ood(of[None], of[other]) for name, of in u.items()}
        is_ood = next(flags for _, flags in by_score.values())
        yield "ood_auroc", other, {name: scores for name, (scores, _) in by_score.items()}, is_ood


def _listed(names: Sequence[str], most: int = _NAMES) -> str:
    shown = list(names)[:most] if len(names) > most + 1 else list(names)
    if len(shown) < len(names):
        return f"{', '.join(shown)} and {len(names) - len(shown)} others"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
