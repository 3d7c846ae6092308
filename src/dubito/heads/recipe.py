"""How a head is trained: the paper's recipe as settings, scaled to the rows at hand.

    460 episodes of 200,000 rows, batches of 2,048      92 million rows, seven augmented epochs of ImageNet-21k-W
    lr(e) = warm-up from 1e-4 to 1e-3 sqrt(batch / 256) over 25 episodes, then cosine down to 1e-8 (steps of an episode)
    AdamW, betas 0.8 and 0.95, weight decay 1e-4 on matrices only

Kirchhof et al., Pretrained Visual Uncertainties (2024), appendix A. With fewer rows, the 460 episodes and their
schedule stay and the episodes shrink (`Recipe.plan`). That rule is ours; so are dropout, the start at the classes, and
the settings of SGD, Lion and the step schedule, which Table 3 of the paper mentions without settings.

A head learns to rank the losses of the labels, or those that the model itself expects:

    observed   L_i = the column `loss`: of the true label                                       (the paper)
    expected   L_i = - sum_y softmax(logit_i / T)_y log softmax(logit_i)_y                       (ours)
    mixed      L_i = (1 - w) observed_i + w expected_i                                           (ours)

The expected loss is the mean of the task loss over labels drawn from the model's own temperature-scaled prediction. It
needs no label, so any folder of images will do, and it is less noisy than the loss of one label. T is what temperature
scaling finds on labelled images; 1 takes the prediction as it is. It is the expectation of cross-entropy: a table whose
losses are known to come from another task loss (BCE, a callable) is refused; use "observed" there.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import NamedTuple, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.choices import Init, LossName, Optimizer, Schedule, Target
from dubito.errors import TableError, ValueRangeError
from dubito.heads.losses import DIRECT_LOSSES
from dubito.table import Table
from dubito.table.views import Computed
from dubito.types import Json, finite
from dubito.validate import check_choice, check_number, check_rows

NEEDS: Mapping[Target, tuple[str, ...]] = MappingProxyType(
    {"observed": ("loss",), "expected": ("logit",), "mixed": ("loss", "logit")}
)
"""The columns of each target."""
_CROSS_ENTROPY = "cross_entropy"
_BATCH, _REFERENCE_BATCH = 2048, 256
_PASSES, _MOST_PASSES, _LEAST_ROWS = 7, 100, 2_000_000
_STEP_FACTOR, _STEP_PARTS = 0.1, 3
_INTERVALS = {
    "episodes": "[1, inf)",
    **dict.fromkeys(("batch", "rows"), "[2, inf)"),
    **dict.fromkeys(("lr", "temperature", "margin"), "(0, inf)"),
    **dict.fromkeys(("leeway", "weight_decay", "warmup_lr", "final_lr"), "[0, inf)"),
    "mix": "[0, 1]",
    "dropout": "[0, 1)",
}


@final
@dataclass(frozen=True)
class Recipe:
    """Settings of one training.

    Attributes:
        loss: What is minimised: "ranking" (eq. 3), or a direct loss of `heads.losses`; "l2" is eq. 2.
        margin: Margin m of the ranking loss.
        leeway: Leeway l of the ranking loss (eq. 5).
        target: Which task losses: "observed" ones, of the labels; those that the model has "expected", which need no
            label; or "mixed", the weighted sum of both.
        temperature: Temperature T of the model's own prediction, for "expected" and "mixed".
        mix: Weight of the expected loss in "mixed".
        optimizer: "adamw", "adam", "sgd" (Nesterov momentum 0.9) or "lion".
        lr: Peak learning rate at a batch of 256; multiplied by sqrt(batch / 256).
        betas: Betas of AdamW, Adam and Lion.
        weight_decay: Weight decay of matrices; biases have none.
        schedule: Learning rates after the warm-up: "cosine", "step" (a tenth after each third) or "constant".
        warmup_lr: Learning rate at which the warm-up starts.
        final_lr: Learning rate at which the cosine ends.
        episodes: Number of steps of the schedule.
        warmup: Number of warm-up episodes.
        batch: Rows per batch; None is 2,048, or an eighth of a small table.
        rows: Rows seen in all, repeatedly as needed; None scales with the table.
        dropout: Share of a row's features that is set to zero while learning; the rest is scaled up. 0 as in the paper;
            0.8 keeps a head from memorising a thousand images.
        init: Initial weights: "default" is random; "classes" starts at the classifier's own (`heads.module`), which
            learns more from few images; "zero" cannot learn, as Table 3 shows.
    """

    loss: LossName = "ranking"
    margin: float = 0.1
    leeway: float = 0.0
    target: Target = "observed"
    temperature: float = 1.0
    mix: float = 0.5
    optimizer: Optimizer = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 1e-4
    schedule: Schedule = "cosine"
    warmup_lr: float = 1e-4
    final_lr: float = 1e-8
    episodes: int = 460
    warmup: int = 25
    batch: int | None = None
    rows: int | None = None
    dropout: float = 0.0
    init: Init = "default"

    def __post_init__(self) -> None:
        choices = {"loss": LossName, "target": Target, "optimizer": Optimizer, "schedule": Schedule, "init": Init}
        for name, kind in choices.items():
            check_choice(getattr(self, name), get_args(kind), by="recipe", what=name)
        for name, interval in {**_INTERVALS, "warmup": f"[0, {self.episodes})"}.items():
            value = getattr(self, name)
            if value is not None or name not in ("batch", "rows"):
                whole = name in ("episodes", "warmup", "batch")
                check_number(value, interval, by="recipe", what=name, whole=whole)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueRangeError(
                f"recipe: betas must be two numbers from 0 to below 1; got {self.betas}. Pass betas=(0.8, 0.95)."
            )

    def plan(self, rows: int) -> "Plan":
        """Batch size, number of steps and learning rates for a table of so many rows.

        A batch has 2,048 rows, fewer for a table of less than eight batches. The training makes seven passes, or more
        to see two million rows, but at most a hundred.
        """
        batch = self.batch or min(_BATCH, max(2, rows // 8 // 2 * 2))
        seen = self.rows or max(_PASSES * rows, min(_LEAST_ROWS, _MOST_PASSES * rows))
        return Plan(replace(self, batch=batch), batch, max(1, round(seen / min(batch, rows))))

    def to_json(self) -> Json:
        """The settings."""
        return asdict(self) | {"betas": list(self.betas)}


def as_recipe(settings: object) -> Recipe:
    """A recipe, or one made from the settings that `Recipe.to_json` returned."""
    if isinstance(settings, Recipe):
        return settings
    if not isinstance(settings, Mapping):
        raise ValueRangeError(f"recipe must be a dubito.heads.Recipe; got {type(settings).__name__}. Pass Recipe(...).")
    for key in settings:
        check_choice(key, [one.name for one in fields(Recipe)], by="recipe", what="a setting")
    betas = {"betas": tuple(settings["betas"])} if "betas" in settings else {}  # JSON has lists
    return Recipe(**{**settings, **betas})


@final
class Plan(NamedTuple):
    """A recipe for a table of a certain size.

    Attributes:
        recipe: The recipe, with its batch set.
        batch: Rows per batch.
        steps: Number of updates.
    """

    recipe: Recipe
    batch: int
    steps: int

    def episode(self, step: int) -> int:
        """The episode of a step: steps are spread evenly over the episodes."""
        return step * self.recipe.episodes // self.steps

    def lr(self, step: int) -> float:
        """The learning rate of a step: constant within its episode."""
        return learning_rate(self.recipe, self.episode(step))


def learning_rate(recipe: Recipe, episode: int) -> float:
    """The learning rate of an episode.

    >>> recipe = Recipe(batch=2048)
    >>> learning_rate(recipe, 0), round(learning_rate(recipe, 25), 4)
    (0.0001, 0.0028)
    """
    peak = recipe.lr * math.sqrt((recipe.batch or _BATCH) / _REFERENCE_BATCH)
    if episode < recipe.warmup:
        return recipe.warmup_lr + (peak - recipe.warmup_lr) * episode / recipe.warmup
    if recipe.schedule == "constant":
        return peak
    done, all_ = episode - recipe.warmup, recipe.episodes - recipe.warmup
    if recipe.schedule == "step":
        return float(peak * _STEP_FACTOR ** (done * _STEP_PARTS // all_))
    return recipe.final_lr + (peak - recipe.final_lr) * (1 + math.cos(math.pi * done / all_)) / 2


def expected_loss(logits: Float[Tensor, "n c"], temperature: float = 1.0) -> Float[Tensor, "n"]:
    """The cross-entropy that the model expects if labels are drawn from its prediction at temperature T.

    >>> expected_loss(torch.tensor([[0.0, 0.0], [9.0, 0.0]])).round(decimals=3).tolist()  # log 2, and next to nothing
    [0.693, 0.001]
    """
    logits = logits.double()
    return -((logits / temperature).softmax(-1) * logits.log_softmax(-1)).sum(-1)


def with_expected_loss(table: Table, temperature: float = 1.0) -> Table:
    """The table with the expected loss as its loss, to combine unlabelled images with labelled ones (`concat`)."""
    table.require("logit", by="with_expected_loss")
    _check_task_loss(table, "with_expected_loss", "Take its own losses instead")
    check_number(temperature, "(0, inf)", by="with_expected_loss", what="temperature", hint="1 is the model's.")
    logits = table.column("logit")
    losses = Computed((len(table),), lambda rows: expected_loss(logits[rows], temperature).float())
    extended = table.extended(loss=losses)
    if table.provenance is not None:
        extended.provenance = replace(table.provenance, task_loss=_CROSS_ENTROPY)
    return extended


def target_column(table: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    """The losses to learn, one float32 per row, in memory: 4 bytes per row, 4 GB for a billion rows.

    Raises:
        TableError: Fewer than two rows, all losses are the same, or another task loss made them than the target's.
        ValueRangeError: A loss is NaN or infinite, or negative where the head must predict it.
    """
    needs = NEEDS[recipe.target]
    by = f"head.fit with target '{recipe.target}'" if recipe.target != "observed" else "head.fit"
    table.require(*needs, by=by)
    if recipe.target != "observed":
        _check_task_loss(table, by, "Train with target='observed'")
    check_rows(table, by="head.fit", least=2)
    column = torch.empty(len(table))
    start = 0
    for batch in table.batches(*needs):
        column[start : start + len(batch)] = _losses(batch, recipe)
        start += len(batch)
    finite(column, f"head.fit: losses of {table.name}", "Check the label and the logits of that row.")
    low, high = float(column.min()), float(column.max())
    if high - low <= recipe.leeway:
        apart = f" by more than the leeway {recipe.leeway}" if recipe.leeway else ""
        raise TableError(
            f"head.fit needs losses that differ{apart}; all {len(table)} of {table.name} lie between {low:g} and "
            f"{high:g}, so there is no order to learn."
        )
    if recipe.loss in DIRECT_LOSSES and low < 0:
        raise ValueRangeError(
            f"head.fit: the {recipe.loss} loss predicts losses of 0 or more; got {low:g} in {table.name}. "
            f"Use loss='ranking', which needs their order alone."
        )
    return column


def _losses(batch: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    if recipe.target == "observed":
        return batch.loss
    expected = expected_loss(batch.logit, recipe.temperature)
    return expected if recipe.target == "expected" else (1 - recipe.mix) * batch.loss.double() + recipe.mix * expected


def _check_task_loss(table: Table, by: str, repair: str) -> None:
    """Raise TableError for a table whose losses are known not to be cross-entropies."""
    task_loss = (table.provenance.task_loss if table.provenance else None) or _CROSS_ENTROPY
    if task_loss != _CROSS_ENTROPY:
        raise TableError(
            f"{by} takes the expectation of the task loss '{_CROSS_ENTROPY}'; the losses of {table.name} come from "
            f"'{task_loss}'. {repair}, or extract with Forward(task_loss='{_CROSS_ENTROPY}')."
        )
