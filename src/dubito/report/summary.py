"""What a report says first, in plain words: four questions, each with a short answer and a few sentences.

How good is the model? Which score should you use? What could be accepted? What should worry you?
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dubito.evaluate.compare import Comparison, Question
from dubito.metrics import Interval, proportion
from dubito.page.render import words
from dubito.report.parts import Acceptance, best_score
from dubito.report.report import SURE, ModelReport

ACCEPTED = "What could be accepted?"
_LEVEL = {True: "too high", False: "too low"}
_NAMED = 4
"""Most names in one sentence."""
_MISCALIBRATED = 0.03
"""Calibration error from which a sentence is worth it."""
_SEEN = 0.1
"""Share of confident OOD images from which a sentence is worth it."""
_ENOUGH = 200
"""Images from which on it means something that nothing stands out."""


class Answer(NamedTuple):
    """One question, answered.

    Attributes:
        question: The question.
        short: The answer in a word or a number.
        sentences: What it means.
        tone: "good", "fair" or "bad".
    """

    question: str
    short: str
    sentences: tuple[str, ...]
    tone: str = "fair"


def summary(report: ModelReport) -> tuple[Answer, ...]:
    """The four answers, in the order in which people ask."""
    return _quality(report), _score(report), _accepted(report), _worries(report)


def share(value: float) -> str:
    """A share in per cent with one decimal where it matters.

    >>> share(0.7525), share(0.5), share(0.0)
    ('75.2 %', '50 %', '0 %')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def _quality(report: ModelReport) -> Answer:
    question, evaluation = "How good is the model?", report.evaluation
    if evaluation is None:
        return Answer(question, "not known", ("Labels of the model's classes would show how often it is right.",))
    accuracy = evaluation.model["accuracy"]
    low, high = (f"{100 * end:.0f}" for end in (accuracy.low, accuracy.high))
    first = (
        f"{share(accuracy.value)} of {evaluation.rows:,} image{'s are' if evaluation.rows > 1 else ' is'} predicted "
        f"correctly (exact {share(accuracy.confidence)} interval {low} to {high} %)."
    )
    return Answer(question, share(accuracy.value), (first, _calibration(report, accuracy)))


def mean_confidence(report: ModelReport) -> float | None:
    """The mean probability of the predicted class; None without labels to compare it with."""
    if report.evaluation is None or report.evaluation.reliability is None:
        return None
    confidence, _, images = report.evaluation.reliability
    return sum(q * n for q, n in zip(confidence, images, strict=True)) / sum(images)


def _calibration(report: ModelReport, accuracy: Interval) -> str:
    """Whether probabilities are too high or too low on average, beyond chance."""
    mean = mean_confidence(report)
    if report.evaluation is None or mean is None:
        return ""
    ece = report.evaluation.model["ece"]
    claimed = f"on average it claims {share(mean)}, and is right in {share(accuracy.value)}"
    error = f"the expected calibration error is {ece.value:.3f} [{ece.low:.3f}, {ece.high:.3f}]"
    if accuracy.low <= mean <= accuracy.high:
        return f"Its probabilities are right on average: {claimed}; {error}."
    return f"Its probabilities are {_LEVEL[mean > accuracy.high]}: {claimed}; {error}."


def _score(report: ModelReport) -> Answer:
    question, comparison = "Which score should you use?", report.comparison
    best = best_score(comparison)
    if comparison is None:
        cannot = f"Scores cannot be compared here: images are ordered by {words(best)}."
        return Answer(question, words(best), (cannot,))
    if comparison.choice is None:
        leaders = dict.fromkeys(f"{words(one.leading[0])} finds {_about(one)} best" for one in comparison.questions)
        sentence = f"No score could be the best at everything. On these images, {listed([*leaders])}."
        return Answer(question, "it depends", (sentence, *_caveats(comparison)))
    caveats = _caveats(comparison)
    return Answer(question, words(best), (_lead(comparison, best), *caveats), "fair" if caveats else "good")


def _caveats(comparison: Comparison) -> tuple[str, ...]:
    """Where the best is a head: whether it has seen these very images, only the user knows."""
    return tuple(f"But {one}" for one in comparison.remarks if one.startswith(f"{best_score(comparison)} was trained"))


def _lead(comparison: Comparison, best: str) -> str:
    """Why this score: it leads, or it needs the fewest columns of those that tie."""
    tied = [name for name in comparison.ranking if all(name in one.leading for one in comparison.questions)]
    cost = f"{comparison.costs[best].microseconds:.1f} µs per image"
    what = listed([_about(one) for one in comparison.questions if one.metric != "aurc"] or ["errors"])
    if len(comparison.ranking) == 1:
        return f"{words(best)} is the only score that these columns allow ({cost})."
    if len(tied) == 1:
        return (
            f"Of {len(comparison.ranking)} scores, {words(best)} alone could be the best at finding {what}: every "
            f"other one is worse somewhere, by more than noise."
        )
    others = listed([words(name) for name in tied if name != best])
    return (
        f"It is a tie: at finding {what}, {words(best)} cannot be distinguished from {others} on these images. None "
        f"of them needs fewer columns ({cost})."
    )


def _about(question: Question) -> str:
    return "wrong predictions" if question.of_errors else f"images of {question.about}"


def _accepted(report: ModelReport) -> Answer:
    question, acceptance = ACCEPTED, report.acceptance
    if acceptance is None:
        why = report.missing["acceptance"].why
        return Answer(
            question, "not known", (why or "A guarantee takes labels that show which predictions are wrong.",)
        )
    feasible = [level for level in acceptance.levels if level.accepted is not None]
    sentences = [_levels(acceptance)] if feasible else []
    for level in acceptance.levels:
        if level.accepted is None:
            sentences.append(f"A risk of {share(level.risk)} cannot be guaranteed. {_plain(level.instead)}")
            break  # of smaller risks, the largest that fails says enough
    sentences += [_tested(acceptance), *report.trust.guard_findings]
    shown = next((level for level in feasible if level.risk >= 0.05), feasible[-1] if feasible else None)
    if shown is None or shown.accepted is None:
        return Answer(question, "nothing yet", tuple(sentences), "bad")
    short = f"{share(shown.accepted / shown.of)} at {share(shown.risk)} risk"
    return Answer(question, short, tuple(sentences), "good")


def _levels(acceptance: Acceptance) -> str:
    parts = [
        f"{share(level.accepted / level.of)} of the images if at most {share(level.risk)} of these may be wrong"
        for level in acceptance.levels
        if level.accepted is not None
    ]
    return f"A guard would accept {listed(parts)}."


def _tested(acceptance: Acceptance) -> str:
    """Which images a threshold was chosen on, and for which it holds."""
    of, confidence = acceptance.levels[0].of, share(acceptance.confidence)
    if acceptance.own:
        return (
            f"These are thresholds of your guard, tested on the {of:,} images that it was calibrated on; each holds "
            f"with confidence {confidence}, for images like those."
        )
    return (
        f"The uncertainty was selected on {acceptance.reference:,} of these images, and the thresholds were tested on "
        f"the other {of:,}; each holds with confidence {confidence}, for new images like these."
    )


def _worries(report: ModelReport) -> Answer:
    kinds = (_alarms, _shift, _confident_mistakes, _confident_ood, _label_issues, _miscalibration, _undecodable)
    found, question = [sentence for kind in kinds for sentence in kind(report)], "What should worry you?"
    if not found:
        if report.evaluation is None and not report.confident_ood:
            return Answer(
                question, "not known", ("Without labels or out-of-distribution images, mistakes stay hidden.",)
            )
        short, tone = (
            ("nothing stands out", "good")
            if len(report.trust.images) >= _ENOUGH
            else ("too few images to tell", "fair")
        )
        return Answer(question, short, ("Nothing stands out in what could be examined.",), tone)
    number = f"{len(found)} things" if len(found) > 1 else "1 thing"
    return Answer(question, number, tuple(found), "bad")


def _alarms(report: ModelReport) -> Iterator[str]:
    if report.watch is not None and report.watch.alarm:
        yield f"Watch: {report.watch.title()}. {report.watch.advice}"


def _shift(report: ModelReport) -> Iterator[str]:
    if report.trust.shifted:
        yield "Shift: these images are not like those of your guard's calibration; its guarantee does not cover them."


def _confident_mistakes(report: ModelReport) -> Iterator[str]:
    """Predictions of 90 % or more that are wrong, where there are more than the probabilities allow."""
    sure = [one for one in report.trust.images if one.probability >= SURE and one.label is not None]
    wrong, expected = sum(one.label != one.predicted for one in sure), sum(1 - one.probability for one in sure)
    if not wrong or proportion(wrong, len(sure)).low <= expected / len(sure):
        return
    rate = f"{wrong:,} of {len(sure):,} predictions with {share(SURE)} or more are wrong ({share(wrong / len(sure))})"
    yield f"Confident mistakes: {rate}; by its own probabilities, about {expected:.0f} should be."


def _miscalibration(report: ModelReport) -> Iterator[str]:
    """Probabilities that are too high or too low on average, beyond chance."""
    mean = mean_confidence(report)
    if report.evaluation is None or mean is None:
        return
    accuracy, ece = report.evaluation.model["accuracy"], report.evaluation.model["ece"]
    if accuracy.low <= mean <= accuracy.high or ece.low < _MISCALIBRATED:
        return
    gap = f"{_LEVEL[mean > accuracy.high]} by {100 * abs(mean - accuracy.value):.0f} points on average"
    yield f"Miscalibration: probabilities are {gap}. Fit a temperature before you read them as probabilities."


def _confident_ood(report: ModelReport) -> Iterator[str]:
    """OOD images that look like any other."""
    for name, confident in report.confident_ood.items():
        levels = [] if report.acceptance is None else [one for one in report.acceptance.levels if name in one.ood]
        accepted = [f"{share(one.ood[name])} at {share(one.risk)} risk" for one in levels if one.ood[name] >= 0.01]
        if confident < _SEEN and not accepted:
            continue
        guard = f" A guard would accept {listed(accepted)}: its guarantee says nothing about them." if accepted else ""
        yield (
            f"Out-of-distribution images that look certain: {share(confident)} of {name} are predicted with "
            f"{share(SURE)} or more.{guard}"
        )


def _label_issues(report: ModelReport) -> Iterator[str]:
    if report.issues is not None and len(report.issues) and not report.issues.suspicious:
        count = len(report.issues)
        labels = "one label" if count == 1 else f"{count:,} of {report.issues.images:,} labels"
        wrong = round((1 - report.issues.expected_right) * count)
        yield f"Label issues: {labels} may well be wrong; by estimate, about {wrong:,} {'is' if wrong == 1 else 'are'}."


def _undecodable(report: ModelReport) -> Iterator[str]:
    if count := len(report.trust.skipped):
        images = "1 image" if count == 1 else f"{count:,} images"
        yield f"Undecodable images: {images} could not be read. No number here includes them."


def listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them; of many, the first.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdef"))
    ('a', 'a, b and c', 'a, b, c and 3 others')
    """
    shown = list(names) if len(names) <= _NAMED else [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _plain(sentence: str) -> str:
    """A sentence of the guard without the names of arguments, in per cent.

    >>> _plain("With these images, risk=0.033 is feasible at confidence 0.95.")
    'With these images, a risk of 3.3 % is feasible at confidence 95 %.'
    """
    texts = {"risk=": "a risk of ", "risk of ": "risk of ", "confidence ": "confidence "}
    return re.sub(
        r"(risk=|risk of |confidence )(\d+(?:\.\d+)?)", lambda one: texts[one[1]] + share(float(one[2])), sentence
    )
