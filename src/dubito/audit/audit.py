"""Self-audit: set-ups that ruin every score, found before they do, each with its numbers and its repair.

    print(dubito.audit(model, "photos/val", against="photos/train"))

A score can only be as good as what it is computed from. The audit looks at a sample of images, a few hundred, for
faults that people make with every model, tries their repairs where that is possible (other normalisations, other
counts of labels), and reports those that a test on the same images finds to be better by far more than chance.
Nothing about the model changes.
"""

import math
from dataclasses import dataclass, field
from typing import Any, final, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from dubito.audit import labels as counting
from dubito.audit import modes, names, outputs, transforms, understand
from dubito.audit.chance import CHANCE, check_chance
from dubito.audit.duplicates import ACROSS, WITHIN, check_across, check_within, compared
from dubito.audit.finding import Finding, NotChecked, Outcome, Severity, counted, percent
from dubito.audit.prints import take_prints
from dubito.audit.sample import Sample, drawn, take_sample
from dubito.cache.runner import default_workers
from dubito.choices import LabelSpace
from dubito.data import Subset, open_images
from dubito.errors import ModelError, ValueRangeError
from dubito.models import wrap
from dubito.types import Classifier, Json

_CLEARLY = 0.1
"""By how much more images an order of classes must be right than another transform, to be the reason."""


def audit(  # noqa: PLR0913 (one call that users type; everything after `images` is optional)
    model: Classifier | nn.Module,
    images: Any,
    *,
    against: Any = None,
    labels: Any = None,
    label_space: LabelSpace | None = None,
    limit: int = 500,
    compare: int = 10_000,
    seed: int = 0,
    batch_size: int | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> "Audit":
    """Look for faults in a set-up of model, transform, images and labels.

    Args:
        model: From dubito.load or dubito.wrap; a bare module is wrapped, for images that are inputs already.
        images: Whatever dubito.open_images takes; best a few hundred images with labels that the model should know.
        against: A second set, such as the images that the model was trained on: no image should be in both.
        labels: Labels for images that bring none, as for dubito.extract.
        label_space: "own" if labels are classes of another set, which leaves out what needs an accuracy.
        limit: Images that the model is run on, drawn with `seed`; it runs once for each alternative transform.
        compare: Images of each set that are compared for duplicates; they are read, but not run.
        seed: Of the draw.
        batch_size: Images through the model at once.
        workers: Processes that decode; by default one a core, and none for ready arrays.
        progress: Show a bar when a terminal is watching.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3), nn.Softmax(-1))
    >>> found = audit(net.eval(), torch.rand(30, 3, 2, 2), progress=False)
    >>> found.ok, found.findings[0].check
    (False, 'probabilities in place of logits')
    """
    classifier = _classifier(model)
    for name, value in (("limit", limit), ("compare", compare)):
        if value < 1:
            raise ValueRangeError(f"audit: {name} must be at least 1; got {value}. Leave it out for the default.")
    opened = open_images(images, labels)
    chosen = drawn(opened, limit, seed)
    found = Audit(classifier.name, opened.name, len(chosen), len(opened))
    many = default_workers(opened) if workers is None else workers
    with modes.forked(classifier):  # torch's loader draws a seed, even without workers
        sample, entry, broken = take_sample(classifier, chosen, batch_size=batch_size, workers=many, progress=progress)
        named = [(chosen.ids[row], why) for row, why in broken]
        found.note(outputs.READABLE, outputs.check_readable(named, len(chosen)))
        for finding in entry.findings:
            found.note(finding.check, [finding])
        if sample is not None:
            _check_answers(found, sample, chosen, label_space)
        some = drawn(opened, compare, seed)
        prints = take_prints(some, workers=many, progress=progress, of=len(opened))
        found.note(WITHIN, check_within(prints), compared(prints, None))
        if against is None:
            found.note(ACROSS, NotChecked("no second set came; give against= (--against IMAGES)"))
        else:
            other = open_images(against)
            some, many = drawn(other, compare, seed), default_workers(other) if workers is None else workers
            taken = take_prints(some, workers=many, progress=progress, of=len(other))
            found.note(ACROSS, check_across(prints, taken), compared(prints, taken))
    return found


@final
@dataclass
class Audit:
    """What was found: print it, ask whether all is `ok`, or take it as JSON.

    Attributes:
        model: The name of the model.
        images: The name of the set.
        rows: How many images were drawn.
        of: How many there are.
        findings: In the order of the checks.
        checked: The faults that were looked for.
        partly: By fault, which part of the images it was looked for in, if not in all that were drawn.
        unchecked: By fault, why it could not be looked for.
        figures: Accuracy (None without labels), mean largest probability.
    """

    model: str
    images: str
    rows: int
    of: int
    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    partly: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; suspicious things and notes may be there."""
        return all(finding.severity != "wrong" for finding in self.findings)

    def in_order(self) -> list[Finding]:
        """The worst first."""
        return sorted(self.findings, key=lambda finding: get_args(Severity).index(finding.severity))

    def note(self, check: str, outcome: Outcome, part: str = "") -> None:
        """Add what a check said, and which part of the images it saw."""
        if isinstance(outcome, NotChecked):
            self.unchecked[check] = outcome.reason
            return
        if check not in self.checked:
            self.checked.append(check)
        if part:
            self.partly[check] = part
        self.findings += outcome

    def looked_for(self) -> list[str]:
        """The faults that were looked for, each with the part of the images where that was not all."""
        return [f"{check} ({self.partly[check]})" if check in self.partly else check for check in self.checked]

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "model": self.model,
            "images": self.images,
            "rows": self.rows,
            "of": self.of,
            "ok": self.ok,
            "figures": self.figures,
            "findings": [finding.to_json() for finding in self.findings],
            "checked": self.checked,
            "partly": self.partly,
            "unchecked": self.unchecked,
        }

    def __str__(self) -> str:
        looked = f"Looked for: {', '.join(self.looked_for())}."
        left = "; ".join(f"{check} ({reason})" for check, reason in self.unchecked.items())
        where = f"{self.model} on {self.rows} of {counted(self.of, 'image')} of {self.images}{self._accuracy()}"
        if not self.findings:
            lines = [f"{where}: nothing wrong was found. {looked}"]
        else:
            lines = [f"{where}: {counted(len(self.findings), 'finding')}.", *map(str, self.in_order()), looked]
        return "\n".join([*lines, f"Not looked for: {left}."] if left else lines)

    def _accuracy(self) -> str:
        accuracy = self.figures.get("accuracy")
        return "" if accuracy is None else f" (accuracy {percent(accuracy)})"


def _check_answers(found: Audit, sample: Sample, images: Subset, label_space: LabelSpace | None) -> None:
    """Everything that needs features and logits."""
    good = sample.finite
    logit, feature = sample.logit[good], sample.feature[good]
    ids = [images.ids[row] for row in sample.rows.tolist()]
    found.note(understand.FINITE, outputs.check_finite(sample.logit, sample.feature, ids))
    if understand.LOGITS not in found.checked:
        found.note(understand.LOGITS, outputs.check_logits(logit))
    found.note(outputs.SATURATED, outputs.check_saturation(logit))
    found.note(outputs.DEAD, outputs.check_features(feature))
    found.note(modes.TRAIN, modes.check_train_mode(sample.model, sample.x))
    found.note(modes.STEADY, modes.check_steady(sample.model, sample.x))
    known = names.model_labels(sample, images, label_space)
    found.note(names.NAMES, known.outcome)
    labels = known.labels
    found.note(outputs.ONE_ANSWER, outputs.check_answers(logit, None if labels is None else labels[good]))
    found.figures["confidence"] = float(sample.ways[0].confidence[good].mean()) if len(logit) else None
    found.figures["accuracy"] = None
    if labels is None:
        for check in (counting.COUNTING, counting.ORDER, CHANCE):
            found.note(check, NotChecked(known.missing))
        found.note(transforms.TRANSFORM, transforms.check_transform(sample, None))
    else:
        _check_labels(found, sample, labels, images)
    if len(sample.ways) > 1 and not sample.scaled:
        found.unchecked["other normalisations"] = "the scale of the inputs is not known"


def _check_labels(found: Audit, sample: Sample, labels: Int[Tensor, "n"], images: Subset) -> None:
    """Labels and transform together: each is judged with what was found to be wrong with the others repaired."""
    good, classes = sample.finite, sample.logit.shape[1]
    predicted, given = sample.logit[good].argmax(-1), labels[good]
    if len(given):
        found.figures["accuracy"] = float((predicted == given).double().mean())
    by_place = images.labels is not None and torch.equal(images.labels[sample.rows], labels)
    shifted = counting.check_counting(predicted, given, classes, images.classes if by_place else None)
    found.note(counting.COUNTING, shifted.outcome)
    ours = sample.model.classes
    theirs = images.classes if by_place or images.classes is None else ours
    ordered = counting.check_order(predicted, given, ours, theirs, than=shifted.labels)
    transform = transforms.check_transform(sample, _put(labels, good, shifted.labels))
    if _accuracy_then(transform) > _accuracy_then(ordered.outcome) - _CLEARLY:
        # Wrong colours can exchange classes, too; but a transform that repairs as much is the simpler reason.
        for check in (counting.ORDER, CHANCE):
            found.note(check, NotChecked("repair the transform first"))
    else:
        found.note(counting.ORDER, ordered.outcome)
        found.note(CHANCE, check_chance(predicted, ordered.labels, classes))
        transform = transforms.check_transform(sample, _put(labels, good, ordered.labels))
    found.note(transforms.TRANSFORM, transform)


def _accuracy_then(outcome: Outcome) -> float:
    """What a repair promises; minus infinity where there is nothing to repair."""
    return float(outcome[0].evidence["accuracy_then"]) if isinstance(outcome, list) and outcome else -math.inf


def _put(labels: Int[Tensor, "n"], where: Bool[Tensor, "n"], values: Int[Tensor, "k"]) -> Int[Tensor, "n"]:
    repaired = labels.clone()
    repaired[where] = values
    return repaired


def _classifier(model: object) -> Classifier:
    if isinstance(model, Classifier):
        return model
    if isinstance(model, nn.Module):
        return wrap(model)
    raise ModelError(
        f"audit: model must come from dubito.load or dubito.wrap, or be a torch.nn.Module; {type(model).__name__} "
        f"came. For a name, use dubito.load('source:name')."
    )
