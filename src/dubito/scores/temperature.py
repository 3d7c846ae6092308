"""Temperature scaling: one number T, fitted on labels, that calibrates the softmax; any softmax score on top of it.

    T = argmin_T  mean_i  -log softmax(logits_i / T)[label_i]          (Guo et al. 2017)

Scores of an ensemble can be scaled too: T is fitted on the model's own logits, and the logits of every member are
divided by it, as Kirsch (2024) scales the models whose tiles are the members.

In b = 1/T the mean loss is convex: its slope is mean(E_p[logit] - logit_label), its curvature mean(Var_p[logit]), so a
Newton step kept inside a shrinking bracket finds the minimum; the table is streamed, never held.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast, final

from jaxtyping import Float
from torch import Tensor

from dubito.choices import Kind
from dubito.errors import TableError, ValueRangeError
from dubito.metrics import labelled_logits
from dubito.scores.information import ScoreOfMembers, member_batches
from dubito.scores.softmax import MaxProbability
from dubito.table import Table, check_size_of_logits
from dubito.types import Score
from dubito.validate import check_model_labels

_SMALLEST, _LARGEST = 1e-3, 1e3


def fit_temperature(table: Table, *, steps: int = 60, tolerance: float = 1e-9) -> float:
    """The T that minimises the mean negative log-likelihood of the labels."""
    for _ in labelled_logits(table, by="temperature.fit", repair="Fit on held-out images."):
        pass  # every block is checked before the first step
    low, high, b = 1 / _LARGEST, 1 / _SMALLEST, 1.0
    for _ in range(steps):
        slope, curvature = _derivatives(table, b)
        low, high = (low, b) if slope > 0 else (b, high)
        newton = b - slope / curvature if curvature > 0 else low
        # A slope of exactly zero is no minimum but saturation: there the bracket decides.
        if slope != 0 and abs(newton - b) <= tolerance * b:
            break
        following = newton if low < newton < high else (low * high) ** 0.5
        if abs(following - b) <= tolerance * b:
            break
        b = following
    if not 2 / _LARGEST < b < 0.5 / _SMALLEST:
        raise ValueRangeError(
            f"temperature.fit: the likelihood of {len(table)} labels in {table.name} grows without end towards T = "
            f"{'0, as when every label is predicted right' if b > 1 else 'infinity, as when none is'}. "
            f"Fit on held-out images with a few errors."
        )
    return 1 / b


@final
@dataclass
class Temperature(Score):
    """A softmax score, or one of an ensemble, of temperature-scaled logits.

    Attributes:
        score_of: The score that is computed from logits / T, or its name; of an ensemble, from its members' logits / T,
            which the column `NAME_logit` must have (keep="logits").
        temperature_: T, once fitted; above one when the model is over-confident.
    """

    score_of: Score | str = field(default_factory=MaxProbability)

    name = "temperature"
    kind: Kind = field(default="total", init=False, repr=False)
    needs = ("logit",)
    learns_from = ("logit", "label")
    learned = ("temperature_",)

    def __post_init__(self) -> None:
        if isinstance(self.score_of, str):
            from dubito.scores.registry import make_score  # noqa: PLC0415 (it imports this module)

            self.score_of = make_score(self.score_of)
        inner = self.score_of
        if isinstance(inner, ScoreOfMembers):
            self.needs = (inner.logits,)
        if inner.learned or (inner.needs != ("logit",) and not isinstance(inner, ScoreOfMembers)):
            raise TableError(
                f"temperature: score_of must read logits alone, or an ensemble, and learn nothing; {inner.name} reads "
                f"{', '.join(inner.needs)} and learns {', '.join(inner.learned) or 'nothing'}. "
                f"Use one of the softmax family; of weighted members, over='input'."
            )
        self.kind = inner.kind

    @property
    def inner(self) -> Score:
        """The score that is computed from logits / T."""
        return cast("Score", self.score_of)

    @property
    def family(self) -> str | None:
        """That of the inner score."""
        return self.inner.family

    def check_columns(self, table: Table) -> None:
        """Raise what the inner score would of the model's own logits."""
        super().check_columns(table)
        if self.inner.reads_size:
            check_size_of_logits(table, by=f"{self.name}.score")

    def learn(self, table: Table) -> None:
        """Fit T on the labels."""
        check_model_labels(table, by="temperature.fit")
        self.temperature_ = fit_temperature(table)

    def batches(self, table: Table) -> Iterator[Table]:
        """Rows of logits, or of members' logits."""
        of_members = isinstance(self.score_of, ScoreOfMembers)
        return member_batches(table, *self.needs, by="temperature.score") if of_members else super().batches(table)

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The inner score at logits / T."""
        if isinstance(self.score_of, ScoreOfMembers):
            return self.score_of.of_logits(batch, self.temperature_)
        return self.inner.score_batch(batch.extended(logit=batch.logit.double() / self.temperature_))


def _derivatives(table: Table, b: float) -> tuple[float, float]:
    """First and second derivative of the mean loss at b."""
    slope = curvature = 0.0
    for batch in table.batches("logit", "label"):
        logits = batch.logit.double()
        p = (b * logits).softmax(-1)
        mean = (p * logits).sum(-1)
        variance = (p * (logits - mean[:, None]).square()).sum(-1)
        slope += float((mean - logits.gather(-1, batch.label[:, None])[:, 0]).sum()) / len(table)
        curvature += float(variance.sum()) / len(table)
    return slope, curvature
