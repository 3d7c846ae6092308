"""What a guard decides about the rows of a table, and what labels show about its guarantee there."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from dubito.guard.calibrated import Rules, observe
from dubito.guard.check import GuaranteeCheck, GuaranteePart, check_guarantee
from dubito.guard.combination import rank
from dubito.guard.guard_words import group_name, rule_reasons
from dubito.guard.identity import labels_are_classes, share_of_calibration_images
from dubito.guard.shift import Observations, Shift, find_shift
from dubito.guard.thresholds import NO_LIMIT
from dubito.guard.verdict import Decisions, class_name, top_two
from dubito.table import Table

if TYPE_CHECKING:
    from dubito.guard.guard import Guard


def decide(guard: "Guard", table: Table) -> Decisions:
    """A verdict of every row of a table of the guard's model, and whether the guarantee is about such images."""
    selection, roles = guard.selection, guard.selection.roles
    values = {name: score.score(table) for name, score in selection.scores.items()}
    ranks = {name: rank(values[name], selection.reference_quantiles[name]) for name in filter(None, roles)}
    u, novel = selection.uncertainty(values)
    rules = Rules(guard.guarantee, guard.missed, tuple(one.group for one in guard.groups), guard.costs)
    observed = observe(selection, values, table, rules, labelled=labels_are_classes(table))
    limits = guard.limits(observed)
    accept, bounds = torch.from_numpy(observed.uncertainty <= limits), torch.from_numpy(limits)
    p, predicted = top_two(table.logit)
    density = ranks.get(roles.density or "")
    before = guard.limits(guard.calibration)
    shift = find_shift(guard.calibration, observed, threshold=limits, before=before, classes=guard.classes)
    return Decisions(
        ids=table.row_ids(),
        classes=guard.classes,
        predicted=predicted,
        probability=p,
        uncertainty=u,
        rank=rank(u, selection.uncertainty_quantiles),
        accept=accept,
        novel=novel,
        aleatoric=ranks.get(roles.aleatoric or ""),
        epistemic=ranks.get(roles.epistemic or ""),
        density_rank=None if density is None else 1 - density,
        sets=None if guard.sets is None else guard.sets.classes(table),
        threshold_rank=float(_limit_rank(guard, torch.tensor([guard.threshold.value], dtype=torch.float64))),
        guarantee=guard.guarantee.sentence(guard.threshold.of),
        shift=shift,
        check=_check(guard, table, observed, accept.numpy(), shift),
        label=None if observed.wrong is None else table.label,
        skipped=table.skipped,
        rules=rule_reasons(guard, table, observed, bounds),
        limit=bounds if guard.groups else None,
        limit_rank=_limit_rank(guard, bounds) if guard.groups else None,
    )


def _limit_rank(guard: "Guard", limits: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
    """The ranks of thresholds; infinite where there is no limit, so that no image is close to it."""
    return rank(limits, guard.selection.uncertainty_quantiles).masked_fill(limits == NO_LIMIT, torch.inf)


def _check(
    guard: "Guard", table: Table, observed: Observations, accept: Bool[np.ndarray, "n"], shift: Shift
) -> GuaranteeCheck | None:
    """What labelled images show about the guarantee, and about every part of it; None without labels."""
    if observed.wrong is None:
        return None
    guarantee, wrong = guard.guarantee, observed.wrong if guard.costs is None else observed.loss
    parts: list[GuaranteePart] = []
    if wrong is not None:
        counted = wrong / guarantee.largest if guard.costs is not None else wrong
        for place, one in enumerate(guard.groups):
            if not one.reason:
                about = accept & (observed.group == place)
                parts.append(GuaranteePart(group_name(guard, place), about, counted, guarantee.level))
        lost, label = accept & observed.wrong, table.label.numpy()
        for rare in guarantee.missed:
            name = f"missed {class_name(guard.classes, rare.label)}"
            parts.append(GuaranteePart(name, label == rare.label, lost, rare.level))
    own = share_of_calibration_images(guard, table)
    return check_guarantee(guarantee, accept, wrong, shift, own=own, parts=parts)
