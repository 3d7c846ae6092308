"""What `compare` found: scores ranked by question, as a table, as JSON, and in words."""

from dataclasses import dataclass, field
from typing import NamedTuple, final

from dubito.errors import ValueRangeError
from dubito.evaluate._comparison_words import FEWEST, question_words, summary_words, without_words
from dubito.metrics import GapToBest, Interval
from dubito.result import aligned, cell
from dubito.types import Json

ERRORS = ("error_auroc", "aurc")
"""Metrics of the model's errors."""
_ONE_PASS = {"logit", "feature"}
"""Columns that a single pass of the model gives."""
TITLES = {"error_auroc": "error AUROC", "aurc": "AURC", "ood_auroc": "OOD AUROC"}


class Compared(NamedTuple):
    """One score on one question.

    Attributes:
        rank: 1 for the best on these images.
        value: The metric, with an interval of its own.
        gap_to_best: How far it is behind the best, with an interval that counts all comparisons.
    """

    rank: int
    value: Interval
    gap_to_best: GapToBest


class Cost(NamedTuple):
    """What a score costs, once its columns are there.

    Attributes:
        microseconds: An image, scoring alone.
        fit_seconds: Of fitting it here; None where it learned nothing here.
        reads: The columns that it needs: those of ensembles and gradients cost further passes of the model.
    """

    microseconds: float
    fit_seconds: float | None
    reads: tuple[str, ...]

    @property
    def order(self) -> tuple[bool, float]:
        """By which costs are compared: further passes of the model outweigh any scoring."""
        return not set(self.reads) <= _ONE_PASS, self.microseconds


@final
@dataclass
class Question:
    """What scores were asked to tell apart, and how well each of them did.

    Attributes:
        metric: A name in TITLES.
        about: "errors", or the name of the foreign images.
        images: How many were ranked.
        positives: How many of them should come out as uncertain.
        scores: By name, the best first.
    """

    metric: str
    about: str
    images: int
    positives: int
    scores: dict[str, Compared] = field(default_factory=dict)

    @property
    def of_errors(self) -> bool:
        """Whether it is about wrong answers, not about foreign images."""
        return self.metric in ERRORS

    @property
    def title(self) -> str:
        """As a column is headed."""
        return TITLES[self.metric] if self.of_errors else f"{TITLES[self.metric]} {self.about}"

    @property
    def rarer(self) -> int:
        """How many images there are of the rarer of the two kinds."""
        return min(self.positives, self.images - self.positives)

    @property
    def leading(self) -> list[str]:
        """The scores that could be the best: what separates them is noise on these images."""
        return [name for name, found in self.scores.items() if self.rarer < FEWEST or not found.gap_to_best.surely]


@final
@dataclass
class Comparison:
    """Scores ranked on a user's own images: print it, or take questions, JSON or sentences.

    Attributes:
        name: The table of known images.
        rows: How many there are.
        confidence: Of every interval and verdict.
        costs: By score.
        questions: What was asked, errors first.
        left_out: By score, why it could not be had.
        remarks: Why a question could not be asked, and what may flatter a score.
    """

    name: str
    rows: int
    confidence: float
    costs: dict[str, Cost]
    questions: list[Question] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __getitem__(self, title: str) -> Question:
        for question in self.questions:
            if title in (question.title, question.metric, question.about):
                return question
        raise ValueRangeError(
            f"comparison: there is no question '{title}'. Asked were {', '.join(one.title for one in self.questions)}."
        )

    @property
    def ranking(self) -> list[str]:
        """All scores, the best on the first question first."""
        return list(self.questions[0].scores)

    @property
    def choice(self) -> str | None:
        """The cheapest score that could be the best on every question; None where there is no such score.

        One that reads what a single pass of the model gives is cheaper than any that needs further passes.
        """
        everywhere = [name for name in self.ranking if all(name in one.leading for one in self.questions)]
        return min(everywhere, key=lambda name: self.costs[name].order, default=None)

    def findings(self) -> list[str]:
        """What was found, in sentences."""
        said = [question_words(question) for question in self.questions]
        return [*said, *self.remarks, *summary_words(self), *without_words(self.left_out)]

    def lines(self) -> list[list[str]]:
        """A header and one line a score; "=" marks those that cannot be told from the best."""
        header = ["score"]
        for question in self.questions:
            header += [question.title, "gap to best"]
        leading = [set(question.leading) for question in self.questions]
        body = []
        for name in self.ranking:
            line = [name]
            for question, ahead in zip(self.questions, leading, strict=True):
                found = question.scores[name]
                mark = "= " if name in ahead else ""
                line += [cell(found.value), mark + _difference(found)]
            cost = self.costs[name]
            body.append([*line, f"{cost.microseconds:.1f}", _seconds(cost.fit_seconds), ", ".join(cost.reads)])
        return [[*header, "µs / image", "fit", "reads"], *body]

    def to_json(self) -> Json:
        """Plain numbers and words."""
        return {
            "table": self.name,
            "rows": self.rows,
            "confidence": self.confidence,
            "questions": [_question_json(question) for question in self.questions],
            "costs": {name: cost._asdict() | {"reads": list(cost.reads)} for name, cost in self.costs.items()},
            "choice": self.choice,
            "left_out": self.left_out,
            "findings": self.findings(),
        }

    def title(self) -> str:
        """What was compared."""
        return f"{self.name}: {self.rows} images, {len(self.costs)} scores, {self.confidence:.0%} intervals"

    def __str__(self) -> str:
        return "\n".join([self.title(), *aligned(self.lines()), *self.findings()])


def _question_json(question: Question) -> Json:
    return {
        "metric": question.metric,
        "about": question.about,
        "images": question.images,
        "positives": question.positives,
        "leading": question.leading,
        "scores": {
            name: {"rank": found.rank, **found.value._asdict(), "behind": found.gap_to_best._asdict()}
            for name, found in question.scores.items()
        },
    }


def _difference(found: Compared) -> str:
    return (
        f"{found.gap_to_best.value:.3f} [{found.gap_to_best.low:.3f}, {found.gap_to_best.high:.3f}]"
        if found.gap_to_best.value
        else "-"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
