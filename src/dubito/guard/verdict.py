"""What a guard decides about images: accept or abstain, and why, in numbers and in words.

Ranks are shares of the reference images: the in-distribution images that the guard's scores were selected on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, final, overload

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from dubito.data.thumbnails import thumbnail_of
from dubito.guard.check import GuaranteeCheck
from dubito.guard.shift import Shift
from dubito.guard.thresholds import NO_LIMIT, percent
from dubito.result import Result, cell, html_card, plain
from dubito.storage import printable
from dubito.types import Images, Json

_NEAR = 0.02
"""Close to the threshold: within two percent of the reference images."""
_RARE, _HIGH = 0.02, 0.95
_CLEAR, _SURE = 0.5, 0.9
"""A prediction is clear if half of the reference images are more uncertain, and the softmax is this sure."""
_RIVAL = 0.5
"""A second class counts as a rival from half the probability of the first on."""
_PAIR = 0.5
"""Two classes explain an abstention if they have half of all probability between them."""
_OTHERWISE = "more uncertain than the threshold"


@final
@dataclass(frozen=True)
class Verdict(Result):
    """The decision about one image.

    Attributes:
        id: The image's name.
        predicted: The predicted class.
        predicted_class: Its name, if names are known.
        probability: Its softmax probability.
        label: The true class, if the image has a label.
        label_class: Its name, if names are known.
        aleatoric: How ambiguous the image is: the share of reference images that are less so.
        epistemic: How new it is to the model: the share of reference images that are less so.
        density_rank: The share of reference images whose features are rarer still: near 0 is unlike all of them.
        uncertainty: What is compared with the threshold.
        rank: The share of reference images that are less uncertain.
        accept: Whether the prediction can be used under the guard's guarantee.
        reason: Why, in words.
        prediction_set: Classes that contain the true one as often as guaranteed, most likely first.
        images: The set that the image is in, for its picture in a notebook.
    """

    id: str
    predicted: int
    predicted_class: str | None
    probability: float
    label: int | None
    label_class: str | None
    aleatoric: float | None
    epistemic: float | None
    density_rank: float | None
    uncertainty: float
    rank: float
    accept: bool
    reason: str
    prediction_set: tuple[int, ...] | None
    images: Images | None = field(default=None, repr=False, compare=False)

    def title(self) -> str:
        """The decision in one line."""
        name = self.predicted_class or f"class {self.predicted}"
        kinds = {"aleatoric": self.aleatoric, "epistemic": self.epistemic}
        numbers = "".join(f", {kind} {value:.2f}" for kind, value in kinds.items() if value is not None)
        decision = f"{'accept' if self.accept else 'abstain'} {name} ({self.probability:.3f}{numbers})"
        return printable(f"{self.id}: {decision}: {self.reason}")

    def records(self) -> list[dict[str, Any]]:
        """One row; the classes of a prediction set with spaces between."""
        classes = None if self.prediction_set is None else " ".join(map(str, self.prediction_set))
        return [{**plain(self), "prediction_set": classes}]

    def __str__(self) -> str:
        return self.title()

    def _repr_html_(self) -> str:
        kinds = {"aleatoric": self.aleatoric, "epistemic": self.epistemic}
        ranks = [f"{kind} {percent(value)}" for kind, value in kinds.items() if value is not None]
        name = self.predicted_class or f"class {self.predicted}"
        return html_card(
            name.partition(",")[0],
            percent(self.probability),
            "accept" if self.accept else "abstain",
            self.reason,
            good=self.accept,
            below=" · ".join([self.id, *ranks]),
            picture="" if self.images is None else thumbnail_of(self.images, self.id),
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class Decisions(Result, Sequence[Verdict]):
    """Verdicts of many images: a sequence of them, and their parts as columns.

    Attributes:
        ids: Names of the images.
        classes: Names of the classes, if known.
        predicted: (n, 2) the most likely class and the second.
        probability: (n, 2) of these two.
        uncertainty: (n) what is compared with the threshold.
        rank: (n) the share of reference images that are less uncertain.
        accept: (n).
        novel: (n) refused for their density alone.
        aleatoric: (n) as of `Verdict`; likewise epistemic and density_rank.
        sets: Of each image, the classes of its prediction set, most likely first.
        threshold_rank: The share of reference images below the threshold; infinite where there is no limit.
        guarantee: What is guaranteed, for which images, as a sentence.
        shift: Whether these images are like those that the guard was calibrated on.
        check: Whether the guarantee is kept on them; None where labels do not show which predictions are wrong.
        label: (n) the true classes; None where labels are not there, or not of the model's classes.
        skipped: Images that could not be decoded: (id, reason).
        images: The images themselves, for pictures in a notebook; None of a table.
        rules: By row, the kind of rule by which it is refused however certain it is, and the reason.
        limit: (n) up to which uncertainty each image is accepted; None where that is one threshold for all.
        limit_rank: (n) its rank.
    """

    titles: ClassVar = {"id": "image", "accept": "verdict"}
    columns: ClassVar = ("id", "accept", "predicted", "probability", "aleatoric", "epistemic", "reason")
    keys: ClassVar = tuple(one.name for one in fields(Verdict) if one.repr)
    text_rows: ClassVar = 10

    ids: Sequence[str]
    classes: Sequence[str] | None
    predicted: Int[Tensor, "n 2"]
    probability: Float64[Tensor, "n 2"]
    uncertainty: Float64[Tensor, "n"]
    rank: Float64[Tensor, "n"]
    accept: Bool[Tensor, "n"]
    novel: Bool[Tensor, "n"]
    aleatoric: Float64[Tensor, "n"] | None
    epistemic: Float64[Tensor, "n"] | None
    density_rank: Float64[Tensor, "n"] | None
    sets: list[tuple[int, ...]] | None
    threshold_rank: float
    guarantee: str
    shift: Shift
    check: GuaranteeCheck | None = None
    label: Int[Tensor, "n"] | None = None
    skipped: Sequence[tuple[str, str]] = ()
    images: Images | None = None
    rules: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    limit: Float64[Tensor, "n"] | None = None
    limit_rank: Float64[Tensor, "n"] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, row: int) -> Verdict: ...
    @overload
    def __getitem__(self, row: slice) -> list[Verdict]: ...
    def __getitem__(self, row: int | slice) -> Verdict | list[Verdict]:
        if isinstance(row, slice):
            return [self[one] for one in range(len(self))[row]]
        row = range(len(self))[row]
        predicted, label = int(self.predicted[row, 0]), None if self.label is None else int(self.label[row])
        return Verdict(
            id=str(self.ids[row]),
            predicted=predicted,
            predicted_class=None if self.classes is None else self.classes[predicted],
            probability=float(self.probability[row, 0]),
            label=label,
            label_class=None if self.classes is None or label is None else self.classes[label],
            aleatoric=_at(self.aleatoric, row),
            epistemic=_at(self.epistemic, row),
            density_rank=_at(self.density_rank, row),
            uncertainty=float(self.uncertainty[row]),
            rank=float(self.rank[row]),
            accept=bool(self.accept[row]),
            reason=self._reason(row),
            prediction_set=None if self.sets is None else self.sets[row],
            images=self.images,
        )

    @property
    def compared(self) -> Float64[Tensor, "n"]:
        """What one line divides: the uncertainty, or where thresholds differ, how far it is above the image's own.

        Infinite for images that are refused however certain they are. Images of classes and groups without a limit lie
        below the line by the share of reference images that are at least as uncertain.
        """
        refused = self.novel.clone()
        refused[list(self.rules)] = True
        compared = self.uncertainty
        if self.limit is not None:
            compared = torch.where(self.limit == NO_LIMIT, self.rank - 1, compared - self.limit)
        return compared.masked_fill(refused, torch.inf)

    @property
    def coverage(self) -> float:
        """The share of images that is accepted; 0 of none."""
        return float(self.accept.double().mean()) if len(self) else 0.0

    def title(self) -> str:
        """How many are accepted."""
        return f"{int(self.accept.sum())} of {len(self)} images accepted"

    def facts(self) -> dict[str, str]:
        """Why images are refused: the main reasons, the most frequent first."""
        refused = (~self.accept).nonzero()[:, 0].tolist()
        counts = Counter(map(self.cause, refused))
        ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        return {"refused": "; ".join(f"{count:,} {cause}" for cause, count in ordered)} if ordered else {}

    def cause(self, row: int) -> str:
        """The kind of the main reason for which an image is refused, one of a handful: to count images by it."""
        return next(iter(self._causes(row)), _OTHERWISE)

    def findings(self) -> list[str]:
        """What is guaranteed, whether it says anything about these images, and whether it is kept on them."""
        checked = [] if self.check is None else [self.check.sentence()]
        return [self.guarantee, *self.shift.findings(), *checked]

    def records(self) -> list[dict[str, Any]]:
        """One row per image that has a verdict."""
        return [verdict.records()[0] for verdict in self]

    def cell(self, key: str, value: Any) -> str:
        """Verdicts in words, predicted classes by name where names are known, without synonyms."""
        if key == "accept":
            return "accept" if value else "abstain"
        return self.classes[value].partition(",")[0] if key == "predicted" and self.classes else cell(value)

    def to_dict(self) -> Json:
        """Every verdict, and the images that could not be decoded."""
        counts = {"images": len(self), "accepted": int(self.accept.sum())}
        skipped = [{"id": name, "reason": reason} for name, reason in self.skipped]
        about = {"guarantee": self.guarantee, "shift": self.shift.to_dict(), "check": plain(self.check)}
        return {**counts, **about, "verdicts": [plain(verdict) for verdict in self], "skipped": skipped}

    def __repr__(self) -> str:
        return f"Decisions({self.title()})"

    def __str__(self) -> str:
        return "\n".join([self.title(), *map(str, self[: self.text_rows]), *self._sentences()])

    def _html_body(self) -> str:
        """With the images at hand, cards with their pictures."""
        if self.images is None:
            return super()._html_body()
        return "".join(verdict._repr_html_() for verdict in self[: self.text_rows])

    def _reason(self, row: int) -> str:
        rank = float(self.rank[row])
        inside = 0 < rank < 1 and not self.novel[row]  # beyond all reference images, ranks are no distances
        inside = inside and row not in self.rules
        limit_rank = self.threshold_rank if self.limit_rank is None else float(self.limit_rank[row])
        near = "; close to the threshold" if inside and abs(rank - limit_rank) <= _NEAR else ""
        if bool(self.accept[row]):
            how = "clear" if rank <= _CLEAR and float(self.probability[row, 0]) >= _SURE else "certain enough"
            return f"{how}: more certain than {percent(1 - rank)} of the reference images{near}"
        if causes := self._causes(row):
            return f"{'; also '.join(causes.values())}{near}"
        limit = near or f"; accepted up to {percent(limit_rank)}"
        return f"more uncertain than {percent(rank)} of the reference images{limit}"

    def _causes(self, row: int) -> dict[str, str]:
        """What explains an abstention, by kind, best first: one reason for its novelty, one for its ambiguity.

        A rule by which an image is refused comes first, then rare features, then two likely classes, then what is
        highest among reference images; of equal ones, novelty.
        """
        ruled = [(4.0, *self.rules[row])] if row in self.rules else []
        reasons = [*ruled, *self._novelty(row), *self._ambiguity(row)]
        return {kind: text for _, kind, text in sorted(reasons, key=lambda one: -one[0])}

    def _novelty(self, row: int) -> list[tuple[float, str, str]]:
        """How strong, of which kind, in words; nothing if the image is like the reference images."""
        density, epistemic = _at(self.density_rank, row), _at(self.epistemic, row)
        if density is not None and (bool(self.novel[row]) or density <= _RARE):
            return [(3.0, "unlike the reference images", unlike(density, "reference images"))]
        if epistemic is not None and epistemic >= _HIGH:
            above = f"epistemic uncertainty above {percent(epistemic)} of the reference images"
            return [(epistemic, "new to the model", f"new to the model: {above}")]
        return []

    def _ambiguity(self, row: int) -> list[tuple[float, str, str]]:
        """How strong, of which kind, in words; nothing if one class stands out."""
        rivals = rival_classes(self.classes, self.predicted[row].tolist(), self.probability[row].tolist())
        if rivals is not None:
            kind = "ambiguous between two classes" if rivals.startswith("ambiguous") else "no class stands out"
            return [(2.0, kind, rivals)]
        aleatoric = _at(self.aleatoric, row)
        if aleatoric is not None and aleatoric >= _HIGH:
            above = f"aleatoric uncertainty above {percent(aleatoric)} of the reference images"
            return [(aleatoric, "ambiguous image", f"ambiguous image: {above}")]
        return []


def unlike(density_rank: float, others: str) -> str:
    """That features are rare, in words.

    Args:
        density_rank: The share of the others whose features are rarer still.
        others: Which images these are, such as "reference images".

    >>> unlike(0.003, "reference images")
    'unlike the reference images: density below all but 0.3 % of them'
    """
    return f"unlike the {others}: density below " + (
        f"all but {percent(density_rank)} of them" if density_rank > 0 else "all of them"
    )


def rival_classes(names: Sequence[str] | None, predicted: Sequence[int], probability: Sequence[float]) -> str | None:
    """That a second class comes close to the first, in words; None if it does not.

    Args:
        names: Names of the classes, if known.
        predicted: The most likely class and the second.
        probability: Of these two.

    >>> rival_classes(["tench, Tinca tinca", "eel"], [0, 1], [0.52, 0.45])
    'ambiguous between tench (52 %) and eel (45 %)'
    """
    (first, second), (one, other) = probability, (class_name(names, index) for index in predicted)
    if second < _RIVAL * first:
        return None
    if first + second < _PAIR:
        return f"no class stands out: {one} has {percent(first)} and {other} {percent(second)}"
    return f"ambiguous between {one} ({percent(first)}) and {other} ({percent(second)})"


def class_name(names: Sequence[str] | None, index: int) -> str:
    """A class by its name without synonyms, or by its number."""
    return f"class {index}" if names is None else names[index].partition(",")[0]


def top_two(logits: Tensor) -> tuple[Float64[Tensor, "n 2"], Int[Tensor, "n 2"]]:
    """Probabilities and classes of the two most likely, the first of equal ones as `argmax` takes it."""
    p = logits.double().softmax(-1)
    first = logits.argmax(-1, keepdim=True)
    second = p.scatter(-1, first, -1.0).argmax(-1, keepdim=True)
    both = torch.cat([first, second], -1)
    return p.gather(-1, both), both


def _at(column: Tensor | None, row: int) -> float | None:
    return None if column is None else float(column[row])
