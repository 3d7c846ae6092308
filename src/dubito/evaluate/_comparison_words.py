"""A comparison of scores in plain words: who leads, what is noise, what it costs."""

from collections.abc import Mapping, Sequence
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dubito.evaluate.comparison import Comparison, Question

_FEW = 30
FEWEST = 10
"""Images of the rarer kind, wrong or right, foreign or known, below which nobody is told to be behind. A bootstrap of
two of them called the best of eight equal scores better than a given one in 28 of 100 trials, where 5 were allowed."""
_SEEN = 5e-4
"""Half of the last decimal that is shown."""
_CORPUS = 80
_SHOWN = 6
"""Names in one sentence, at most."""


def question_words(question: "Question") -> str:
    """Who leads, who cannot be told from whom, and how large a difference would have to be."""
    kind = "wrong answers" if question.of_errors else "of them foreign"
    where = f"on these {question.images} images ({question.positives} {kind})"
    leading, (best, found) = question.leading, next(iter(question.scores.items()))
    if len(question.scores) == 1:
        return f"{question.title}: {best} has {found.value.value:.3f} {where}; there was nothing to compare it with."
    if len(leading) == 1:
        second, rival = list(question.scores.items())[1]
        said = (
            f"{question.title}: {best} is better than every other score {where}, {rival.gap_to_best.value:.3f} "
            f"[{rival.gap_to_best.low:.3f}, {rival.gap_to_best.high:.3f}] ahead of {second}, the next."
        )
    else:
        left = len(question.scores) - len(leading)
        rest = "" if not left else f" {left} other {'score is' if left == 1 else 'scores are'} behind."
        said = f"{question.title}: {_listed(leading)} cannot be told apart {where}.{rest}"
    few = question.rarer
    rare = f" Only {few} {'image of the rarer kind is' if few == 1 else 'images of the rarer kind are'} there"
    if few < FEWEST:
        return f"{said}{rare}: too few to tell any scores apart."
    reach = median(one.gap_to_best.high - one.gap_to_best.value for one in list(question.scores.values())[1:])
    noise = f" Differences below about {reach:.2g} are noise here." if reach > _SEEN and len(leading) > 1 else ""
    return said + (f"{rare}." if few < _FEW else "") + noise


def summary_words(found: "Comparison") -> list[str]:
    """One score for everything, if there is one."""
    choice = found.choice
    asked = "all questions" if len(found.questions) > 1 else "this question"
    if choice is None:
        return [f"No score could be the best on {asked}: choose by what you want to find."]
    if len(found.costs) == 1:
        return []
    cost = f"{found.costs[choice].microseconds:.1f} µs an image"
    return [f"{choice} is the cheapest ({cost}) of those that could be the best on {asked}."]


def head_words(name: str, trained: Mapping[str, Any]) -> str:
    """A head may have learned from the very images that it is compared on; only the user knows."""
    corpus = shorten(str(trained.get("corpus") or "images that it does not name"), _CORPUS, placeholder=" ...")
    return f"{name} has learned from losses of {corpus}: if these images were among them, it looks better than it is."


def without_words(left_out: Mapping[str, str]) -> list[str]:
    """What was left out, scores with one reason in one sentence."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out.items():
        by_reason.setdefault(why.removesuffix("."), []).append(name)
    return [f"Left out: {_listed(names, len(names))} ({why})." for why, names in by_reason.items()]


def _listed(names: Sequence[str], most: int = _SHOWN) -> str:
    shown = list(names)[:most] if len(names) > most + 1 else list(names)
    if len(shown) < len(names):
        return f"{', '.join(shown)} and {len(names) - len(shown)} others"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
