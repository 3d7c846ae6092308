"""How far members agree, in plain words: what was found, what it means, and which level to use."""

import math
from typing import TYPE_CHECKING

from dubito.metrics import Interval

if TYPE_CHECKING:
    from dubito.explain.collapse_result import Collapse, EnsembleDiagnosis

_GROUPS = {2: "Pairs", 3: "Triples"}
_LARGE = 1000


def verdict(found: "Collapse") -> str:
    """Whether MI collapses, and what to do."""
    last, whole = found.levels[-1], f"all {found.members} members at once"
    groups = _GROUPS.get(last.size, f"Sub-ensembles of {last.size}")
    falls = f"MI falls {times(last.fall.value)} from 1 to {last.size}"
    by_averaging = f"averaging alone explains {times(found.expected_fall)}"
    if found.kind == "same":
        return (
            f"Your members are the same model: they disagree about none of {found.rows} images. "
            f"Give members that were trained apart: with other seeds, data or architectures."
        )
    if found.kind == "unknown":
        return _unknown(found)
    if found.kind == "collapse":
        return f"{groups} of your members agree; {falls} ({by_averaging}): use the inner level ({whole})."
    if found.kind == "partial":
        return (
            f"{falls}, less than averaging would make it ({by_averaging}): {groups.lower()} keep differences of their "
            f"own. Use {whole}: nothing is lost there."
        )
    stays = "MI hardly falls" if last.fall.value >= 1 else "MI does not fall"
    return (
        f"No collapse: {stays} from 1 to {last.size} ({times(last.fall.value)}; {by_averaging}). Members that came "
        f"together are much alike, and sub-ensembles differ: one member of each would tell nearly as much."
    )


def findings(found: "Collapse") -> list[str]:
    """The verdict, and what it rests on."""
    told = [verdict(found)]
    if found.kind == "same":
        return told
    first, last = found.levels[0], found.levels[-1]
    share = f"Of all uncertainty, {percent(first.share)} is epistemic with single members ({first})"
    if len(found.levels) == 1:
        return [*told, f"{share}."]
    told.append(
        f"{share} and {percent(last.share)} with {last}. The rest has not gone: members disagree inside sub-ensembles, "
        f"where the outer level does not look."
    )
    half = next((level for level in found.levels if level.fall.value >= 2), None)
    if half is not None:
        told.append(f"Half of it is lost from {half} on.")
    if found.decay is not None and found.decay.expected is not None:
        told.append(
            f"MI falls about as s^-{found.decay.exponent.value:.2f} "
            f"[{found.decay.exponent.low:.2f}, {found.decay.exponent.high:.2f}] with the size s of sub-ensembles; if "
            f"members were alike and differed little, as s^-{found.decay.expected:.2f}."
        )
    if found.change is not None and first.auroc is not None and last.auroc is not None:
        told.append(_detection(found, first.auroc, last.auroc, found.change))
    return told


def over_models(found: "EnsembleDiagnosis") -> str:
    """What the size of models does to the disagreement of all their members."""
    small, large = found.ensembles[0], found.ensembles[-1]
    if found.fall is None or found.decay is None:
        return "Members of some of these ensembles are the same model, so that nothing can be fitted."
    way = f"from {small.key:g} to {large.key:g}"
    change = found.decay.exponent
    fitted = f"MI ~ size^{-change.value:+.2f} [{-change.high:+.2f}, {-change.low:+.2f}]"
    if found.fall.low > 1:
        return (
            f"Your larger models agree more: MI falls {times(found.fall.value)} {way} ({fitted}). A low MI of large "
            f"models is no sign that they know more: compare it within one size only, or take members from inside the "
            f"models (tiles, masks)."
        )
    if found.fall.high < 1:
        return f"Your larger models disagree more: MI grows {times(1 / found.fall.value)} {way} ({fitted})."
    return f"MI does not change beyond its interval {way} ({fitted})."


def times(value: float) -> str:
    """How many times less.

    >>> times(4.04), times(float("inf"))
    ('4.0x', 'to nothing')
    """
    if not math.isfinite(value):
        return "to nothing"
    return f"{value:.1f}x" if value < _LARGE else f"{value:.3g}x"


def percent(share: Interval) -> str:
    """With its interval."""
    return f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _unknown(found: "Collapse") -> str:
    divisible = any(found.members % size == 0 for size in range(2, found.members // 2 + 1))
    if divisible:
        return (
            f"MI of {found.members} members is known, but not that of sub-ensembles, so whether it collapses cannot be "
            f'seen. Keep the members\' logits (keep="logits") to cut them into some.'
        )
    return (
        f"{found.members} members have no equal sub-ensembles of two or more, so whether MI collapses cannot be seen. "
        f"Give at least 4, of an even number."
    )


def _detection(found: "Collapse", first: Interval, last: Interval, change: Interval) -> str:
    ends = f"AUROC of MI, {found.foreign} against {found.name}: {percent(first)} with single members"
    told = f"{percent(last)} with {found.levels[-1]}"
    gap = f"{100 * change.value:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    if change.high < 0:
        return f"{ends}, but {told}, {gap}: the outer level also tells foreign images less well."
    if change.low > 0:
        return f"{ends}, and even {told}, {gap}."
    return f"{ends}, {told}: no change beyond the interval ({gap})."
