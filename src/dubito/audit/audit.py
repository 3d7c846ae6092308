"""Faults of a set-up that ruin every score: found before they do, each with its numbers and its repair.

    print(dubito.audit(model, "images/val", against="images/train"))

A score can only be as good as what it is computed from. The audit checks a sample of a few hundred images for common
mistakes, tries their repairs where possible (other normalisations, shifted labels), and reports those that a test on
the same images shows to be better by far more than chance. Nothing about the model changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dubito.audit import duplicates, modes, outputs, transforms
from dubito.audit import labels as label_checks
from dubito.audit.finding import Finding, NotChecked, Outcome, Severity, counted, percent
from dubito.cache.runner import default_batch_size, default_workers, in_batches, inputs_of, open_stream
from dubito.choices import LabelSpace
from dubito.data import Subset, open_images
from dubito.errors import first_words
from dubito.models import wrap
from dubito.models.load import as_classifier
from dubito.models.transform import Preprocess
from dubito.result import Result
from dubito.types import Classifier, Images, Json
from dubito.validate import check_model_first, check_number

_CLEARLY = 0.1
"""The share of images by which an order of classes must beat another transform to be the explanation."""


def audit(  # noqa: PLR0913 (one call that users type; everything after `images` is optional)
    model: Classifier | nn.Module | str,
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
        model: From dubito.load or dubito.wrap, or a name, which is loaded; a bare module is wrapped, for images that
            are inputs already.
        images: Whatever dubito.open_images takes; ideally a few hundred in-distribution images with labels.
        against: A second set, such as the images that the model was trained on: no image should be in both.
        labels: Labels for images that have none, as for dubito.extract.
        label_space: "own" if labels are classes of another set; this skips checks that need an accuracy.
        limit: How many images, drawn with `seed`, to run the model on; it runs once for each alternative transform.
        compare: How many images of each set to compare for duplicates; they are read, but not run.
        seed: Seed of the draw.
        batch_size: How many images pass through the model at once.
        workers: Number of processes that decode; by default one per core, and none for ready arrays.
        progress: Show a progress bar when a terminal is watching.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3), nn.Softmax(-1))
    >>> result = audit(net.eval(), torch.rand(30, 3, 2, 2), progress=False)
    >>> result.ok, result.issues[0].check
    (False, 'probabilities in place of logits')
    """
    check_model_first(model, images, by="audit", what="images")
    for name, value, least in (
        ("limit", limit, 1),
        ("compare", compare, 1),
        ("seed", seed, 0),
        ("batch_size", 1 if batch_size is None else batch_size, 1),
        ("workers", 0 if workers is None else workers, 0),
    ):
        check_number(value, f"[{least}, inf)", by="audit", what=name, whole=True, hint="Leave it out for the default.")
    if isinstance(model, nn.Module) and not isinstance(model, Classifier):
        model = wrap(model)
    classifier = as_classifier(model, by="audit")
    opened = open_images(images, labels)
    chosen = draw_subset(opened, limit, seed)
    result = Audit(classifier.name, opened.name, len(chosen), len(opened))
    processes = default_workers(opened) if workers is None else workers
    sample, findings, broken = take_sample(
        classifier, chosen, batch_size=batch_size, workers=processes, progress=progress
    )
    result.note(outputs.READABLE, outputs.check_readable(broken, chosen.ids))
    for finding in findings:
        result.note(finding.check, [finding])
    if sample is not None:
        _check_outputs(result, sample, chosen, label_space)
    prints = []
    for one in [opened] if against is None else [opened, open_images(against)]:
        drawn, processes = draw_subset(one, compare, seed), default_workers(one) if workers is None else workers
        prints.append(duplicates.take_fingerprints(drawn, workers=processes, progress=progress, of=len(one)))
    result.note(duplicates.WITHIN, duplicates.check_duplicates(prints[0]), duplicates.compared(prints[0]))
    across = duplicates.check_duplicates(*prints) if len(prints) > 1 else NotChecked("needs a second set: against=")
    result.note(duplicates.ACROSS, across, duplicates.compared(*prints))
    return result


@final
@dataclass
class Audit(Result):
    """What `audit` returns: print it, check whether all is `ok`, or take it as JSON.

    Attributes:
        model: The name of the model.
        images: The name of the set.
        rows: How many images were drawn.
        of: How many images there are.
        issues: The findings of all checks, in the order of the checks.
        checked: The faults that were looked for.
        partly: By fault, which part of the images was checked, if not all that were drawn.
        unchecked: By fault, why it could not be looked for.
        figures: Accuracy (None without labels) and mean largest probability.
    """

    model: str
    images: str
    rows: int
    of: int
    issues: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    partly: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; there may be suspicious findings and notes."""
        return all(issue.severity != "wrong" for issue in self.issues)

    def in_order(self) -> list[Finding]:
        """The worst first."""
        return sorted(self.issues, key=lambda issue: get_args(Severity).index(issue.severity))

    def note(self, check: str, outcome: Outcome, part: str = "") -> None:
        """Add the outcome of a check, and which part of the images it saw."""
        if isinstance(outcome, NotChecked):
            self.unchecked[check] = outcome.reason
            return
        if check not in self.checked:
            self.checked.append(check)
        if part:
            self.partly[check] = part
        self.issues += outcome

    def title(self) -> str:
        """What was audited, and how many issues there are."""
        accuracy = self.figures.get("accuracy")
        where = f"{self.model} on {self.rows} of {counted(self.of, 'image')} of {self.images}"
        where += "" if accuracy is None else f" (accuracy {percent(accuracy)})"
        return f"{where}: {counted(len(self.issues), 'finding') if self.issues else 'nothing wrong was found'}."

    def records(self) -> list[dict[str, Any]]:
        """One row per issue, the worst first."""
        return [{key: getattr(one, key) for key in ("severity", "check", "what", "repair")} for one in self.in_order()]

    def lines(self) -> list[list[str]]:
        """No table when printed: the sentences are too long for one."""
        return []

    def findings(self) -> list[str]:
        """The issues, the worst first; then what was looked for and what was not."""
        partly = {check: f"{check} ({part})" for check, part in self.partly.items()}
        looked = f"Looked for: {', '.join(partly.get(check, check) for check in self.checked)}."
        skipped = "; ".join(f"{check} ({reason})" for check, reason in self.unchecked.items())
        return [*map(str, self.in_order()), looked, *([f"Not looked for: {skipped}."] if skipped else [])]

    def to_dict(self) -> Json:
        """Plain values, and whether all is `ok`."""
        return {**super().to_dict(), "ok": self.ok}


class Sample(NamedTuple):
    """The sample as the model sees it.

    Attributes:
        model: The classifier, repaired where it had to be so that the other checks can go on.
        rows: Which images of the sample could be read.
        x: The inputs of the first batch whose outputs are finite.
        feature: Features under the model's own transform.
        logit: Logits under the model's own transform.
        predictions: By transform, the model's own first, for rows without NaN and infinity.
        finite: Rows without NaN and infinity.
        size: Why the images' own size could not be tried; an empty list if it was, or if it is the model's.
    """

    model: Classifier
    rows: Int[Tensor, "n"]
    x: Float[Tensor, "b ..."]
    feature: Float[Tensor, "n d"]
    logit: Float[Tensor, "n c"]
    predictions: list[transforms.TransformedPredictions]
    finite: Bool[Tensor, "n"]
    size: Outcome


def draw_subset(images: Images, limit: int, seed: int) -> Subset:
    """Some images at random, in their own order; a smaller draw of the same seed is part of a larger one."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return Subset(images, sorted(order[:limit].tolist()))


def take_sample(
    model: Classifier, images: Subset, *, batch_size: int | None, workers: int, progress: bool
) -> tuple[Sample | None, list[Finding], list[tuple[int, str]]]:
    """Run the model over the images.

    Returns the sample, None if no image can be read or the outputs cannot be understood; what is wrong with the outputs
    of the model as it is; and which images are broken.
    """
    groups = in_batches(range(len(images)), batch_size or default_batch_size(model.device))
    understood: Classifier | None = model
    findings: list[Finding] = []
    rows: list[int] = []
    broken: list[tuple[int, str]] = []
    batches, predictions, first, scale, title = [], [], torch.empty(0), None, f"audit {images.name}"
    with open_stream(images, model.transform, groups, workers=workers, title=title, progress=progress) as stream:
        for batch in stream:
            broken += batch.broken
            x = inputs_of(batch, model) if understood is not None else None
            if x is not None and not rows:
                understood, findings = outputs.understand(model, x)
                first, scale = x, transforms.guessed(x) if batch.ready else transforms.measured(model.transform)
                predictions = [transforms.TransformedPredictions(other) for other in transforms.alternatives(x, scale)]
            if x is not None and understood is not None:
                batches.append(_run(understood, x, predictions))
                rows += batch.indices
    if understood is None or not rows:
        return None, findings, broken
    feature, logit = (torch.cat(parts) for parts in zip(*batches, strict=True))
    finite = logit.isfinite().all(-1) & feature.isfinite().all(-1)
    x = first[finite[: len(first)].to(first.device)]
    try:
        size = _add_own_size(predictions, understood, images, in_batches(rows, len(groups[0])), finite, workers)
    except Exception as error:  # a model may raise anything at a size that it was not made for
        size = NotChecked(f"the model does not run at the images' own size: {first_words(error)}")
    return Sample(understood, torch.tensor(rows), x, feature, logit, predictions, finite, size), findings, broken


def _add_own_size(
    predictions: list[transforms.TransformedPredictions],
    model: Classifier,
    images: Subset,
    groups: Sequence[Sequence[int]],
    finite: Bool[Tensor, "n"],
    workers: int,
) -> Outcome:
    """Add what the model predicts at the images' own size, if they share one that is not its input size."""
    if not isinstance(model.transform, Preprocess):
        return NotChecked("the transform has no input size to change")
    sizes: set[tuple[int, ...]] = set()
    with open_stream(images, transforms.SizeOnly(), groups, workers=workers) as stream:
        for batch in stream:
            if batch.ready:
                return NotChecked("images are inputs already")
            sizes |= set() if batch.inputs is None else set(map(tuple, batch.inputs.tolist()))
            if len(sizes) > 1:
                break
    other = transforms.own_size(model.transform, sizes)
    if other is None or isinstance(other, NotChecked):
        return other or []
    sized, transform, start = transforms.TransformedPredictions(other[0]), other[1], 0
    with open_stream(images, transform, groups, workers=workers) as stream:
        for batch, group in zip(stream, groups, strict=True):
            feature = model.features(transform.finish(torch.as_tensor(batch.inputs).to(model.device)))
            usable = finite[start : start + len(group)].to(feature.device)
            sized.add(feature, model.logits(feature).float(), usable)
            start += len(group)
    predictions.append(sized)
    return []


def _run(
    model: Classifier, x: Float[Tensor, "n ..."], predictions: list[transforms.TransformedPredictions]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n c"]]:
    """Add a batch under every transform; features and logits under the model's own, which comes first."""
    feature = model.features(predictions[0].alternative(x))
    logit = model.logits(feature).float()
    usable = logit.isfinite().all(-1) & feature.isfinite().all(-1)
    predictions[0].add(feature, logit, usable)
    for other in predictions[1:]:
        changed = model.features(other.alternative(x))
        other.add(changed, model.logits(changed).float(), usable)
    return feature.float().cpu(), logit.cpu()


def _check_outputs(result: Audit, sample: Sample, images: Subset, label_space: LabelSpace | None) -> None:
    """Everything that needs features and logits."""
    good = sample.finite
    logit, feature = sample.logit[good], sample.feature[good]
    ids = [images.ids[row] for row in sample.rows.tolist()]
    result.note(outputs.FINITE, outputs.check_finite(sample.logit, sample.feature, ids))
    if outputs.LOGITS not in result.checked:
        result.note(outputs.LOGITS, outputs.check_form(logit))
    result.note(outputs.SATURATED, outputs.check_saturation(logit))
    result.note(outputs.DEAD, outputs.check_features(feature))
    result.note(modes.TRAIN, modes.check_train_mode(sample.model, sample.x))
    result.note(modes.STEADY, modes.check_steady(sample.model, sample.x))
    labels, outcome, missing = label_checks.model_labels(sample.model, images, logit.shape[1], label_space)
    labels = None if labels is None else labels[sample.rows]
    result.note(label_checks.NAMES, outcome)
    result.note(outputs.ONE_CLASS, outputs.check_one_class(logit, None if labels is None else labels[good]))
    result.figures["confidence"] = float(sample.predictions[0].confidence.mean()) if len(logit) else None
    result.figures["accuracy"] = None
    if labels is None:
        for check in (label_checks.COUNTING, label_checks.ORDER, label_checks.CHANCE):
            result.note(check, NotChecked(missing))
        result.note(transforms.TRANSFORM, transforms.check_transform(sample.predictions, None))
    else:
        _check_labels(result, sample, labels, images)
    result.note(transforms.SIZE, sample.size)
    if len(sample.predictions) > 1 and all(one.alternative.scale is None for one in sample.predictions):
        result.unchecked["other normalisations"] = "the scale of the inputs is not known"


def _check_labels(result: Audit, sample: Sample, labels: Int[Tensor, "n"], images: Subset) -> None:
    """Labels and transform together: each is checked with the faults of the others repaired."""
    good, classes = sample.finite, sample.logit.shape[1]
    predicted, own = sample.logit[good].argmax(-1), labels[good]
    if len(own):
        result.figures["accuracy"] = float((predicted == own).double().mean())
    by_place = images.labels is not None and torch.equal(images.labels[sample.rows], labels)
    shifted = label_checks.check_counting(predicted, own, classes, images.classes if by_place else None)
    result.note(label_checks.COUNTING, shifted.outcome)
    ours = sample.model.classes
    theirs = images.classes if by_place or images.classes is None else ours
    ordered = label_checks.check_order(predicted, own, ours, theirs, than=shifted.labels)
    transform = transforms.check_transform(sample.predictions, shifted.labels)
    if _accuracy_then(transform) > _accuracy_then(ordered.outcome) - _CLEARLY:
        # Wrong colours can exchange classes too; but a transform that repairs as much is the simpler explanation.
        for check in (label_checks.ORDER, label_checks.CHANCE):
            result.note(check, NotChecked("repair the transform first"))
    else:
        result.note(label_checks.ORDER, ordered.outcome)
        result.note(label_checks.CHANCE, label_checks.check_chance(predicted, ordered.labels, classes))
        transform = transforms.check_transform(sample.predictions, ordered.labels)
    result.note(transforms.TRANSFORM, transform)


def _accuracy_then(outcome: Outcome) -> float:
    """The accuracy after a repair; minus infinity where there is nothing to repair."""
    return float(outcome[0].evidence["accuracy_then"]) if isinstance(outcome, list) and outcome else -math.inf
