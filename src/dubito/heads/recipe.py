"""How a head is trained: the paper's recipe as settings, scaled to the rows at hand.

    460 episodes of 200,000 rows, batches of 2,048      92 million rows, seven augmented epochs of ImageNet-21k-W
    lr(e) = warm-up from 1e-4 to 1e-3 sqrt(batch / 256) over 25 episodes, then cosine down to 1e-8 (steps of an episode)
    AdamW, betas 0.8 and 0.95, weight decay 1e-4 on matrices only

Kirchhof et al., Pretrained Visual Uncertainties (2024), appendix A. Who has fewer rows keeps the 460 episodes and their
schedule; the episodes shrink (`Recipe.plan`). That rule is ours; so are dropout, the start at the classes, and the
settings of SGD, Lion and of the step schedule, which the paper names in Table 3 without giving them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import final, get_args

from dubito.choices import Init, LossName, Optimizer, Schedule, Target
from dubito.errors import ValueRangeError
from dubito.types import Json

_BATCH = 2048
_REFERENCE_BATCH = 256
_PASSES = 7
_LEAST_ROWS = 2_000_000
_MOST_PASSES = 100
_STEP_FACTOR = 0.1
_STEP_PARTS = 3


@final
@dataclass(frozen=True)
class Recipe:
    """Settings of one training.

    Attributes:
        loss: "ranking" (eq. 3), or a direct one of `heads.losses`, "l2" being the loss prediction of eq. 2.
        margin: m of the ranking loss.
        leeway: l of the ranking loss (eq. 5).
        target: Whose losses: "given" labels', the ones that the model "expected" by itself, which needs no label, or
            "mixed", the weighted sum of both (`heads.targets`).
        temperature: T under which the model's own prediction is believed, for "expected" and "mixed".
        mix: Weight of the expected loss in "mixed".
        optimizer: "adamw", "adam", "sgd" (Nesterov momentum 0.9) or "lion".
        lr: Peak learning rate at a batch of 256; multiplied by sqrt(batch / 256).
        betas: Of AdamW, Adam and Lion.
        weight_decay: On matrices; biases are left alone.
        schedule: After the warm-up: "cosine", "step" (a tenth after each third) or "constant".
        warmup_lr: Where the warm-up begins.
        final_lr: Where the cosine ends.
        episodes: Steps of the schedule.
        warmup: How many of them warm up.
        batch: Rows at once; None is 2,048, or an eighth of a small table.
        rows: Rows seen in all, again and again as needed; None scales with the table.
        dropout: Share of a row's features that is set to zero while learning, the rest scaled up. 0 as in the paper;
            0.8 keeps a head from learning a thousand photographs by heart.
        init: Of the weights: "default" at random, "classes" at the classifier's own (`heads.class_start`), which learns
            more from few images; "zero" is there to show that it cannot learn.
    """

    loss: LossName = "ranking"
    margin: float = 0.1
    leeway: float = 0.0
    target: Target = "given"
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
        for name, kinds in choices.items():
            if getattr(self, name) not in get_args(kinds):
                raise ValueRangeError(
                    f"recipe: {name} must be one of {', '.join(get_args(kinds))}; got '{getattr(self, name)}'."
                )
        _check_numbers(self)

    def plan(self, rows: int) -> "Plan":
        """Batch size, number of steps and learning rates for a table of so many rows.

        A batch is 2,048 rows, less in a table of fewer than eight such. Seen are seven passes, but at least two million
        rows, unless that were more than a hundred passes.
        """
        batch = self.batch or min(_BATCH, max(2, rows // 8 // 2 * 2))
        seen = self.rows or max(_PASSES * rows, min(_LEAST_ROWS, _MOST_PASSES * rows))
        return Plan(replace(self, batch=batch), batch, max(1, round(seen / min(batch, rows))))

    def to_json(self) -> Json:
        """The settings."""
        return asdict(self) | {"betas": list(self.betas)}


def as_recipe(settings: object) -> Recipe:
    """A recipe from itself, or from its settings as they come back from JSON."""
    if isinstance(settings, Recipe):
        return settings
    if not isinstance(settings, Mapping):
        raise ValueRangeError(f"recipe: a dubito.Recipe is expected; got {type(settings).__name__}.")
    known = {one.name for one in fields(Recipe)}
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ValueRangeError(f"recipe: there is no setting '{unknown[0]}'; there are {', '.join(sorted(known))}.")
    betas = {"betas": tuple(settings["betas"])} if "betas" in settings else {}  # JSON has lists
    return Recipe(**{**settings, **betas})


@final
@dataclass(frozen=True)
class Plan:
    """A recipe for a table of a certain size.

    Attributes:
        recipe: With the batch filled in.
        batch: Rows at once.
        steps: Updates of the weights.
    """

    recipe: Recipe
    batch: int
    steps: int

    def episode(self, step: int) -> int:
        """In which episode a step lies: steps are spread evenly over the episodes."""
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


def _check_numbers(recipe: Recipe) -> None:
    for name in ("lr", "temperature", "margin"):
        if not (math.isfinite(getattr(recipe, name)) and getattr(recipe, name) > 0):
            raise ValueRangeError(f"recipe: {name} must be positive; got {getattr(recipe, name)}.")
    for name in ("leeway", "weight_decay", "warmup_lr", "final_lr"):
        if not (math.isfinite(getattr(recipe, name)) and getattr(recipe, name) >= 0):
            raise ValueRangeError(f"recipe: {name} must not be negative; got {getattr(recipe, name)}.")
    for name, least in (("episodes", 1), ("warmup", 0), ("batch", 2), ("rows", 2)):
        value = getattr(recipe, name)
        if value is not None and value < least:
            raise ValueRangeError(f"recipe: {name} must be at least {least}; got {value}.")
    if recipe.warmup >= recipe.episodes:
        raise ValueRangeError(
            f"recipe: warmup must be below the {recipe.episodes} episodes; got {recipe.warmup}. Give a shorter one."
        )
    _check_shares(recipe)


def _check_shares(recipe: Recipe) -> None:
    if not 0 <= recipe.mix <= 1:
        raise ValueRangeError(f"recipe: mix must lie between 0 and 1; got {recipe.mix}.")
    if not 0 <= recipe.dropout < 1:
        raise ValueRangeError(f"recipe: dropout must be a share from 0 to below 1; got {recipe.dropout}.")
    if len(recipe.betas) != 2 or not all(0 <= beta < 1 for beta in recipe.betas):
        raise ValueRangeError(f"recipe: betas must be two numbers from 0 to below 1; got {recipe.betas}.")
