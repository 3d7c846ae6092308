"""Options of `dubito train` for the settings of `dubito.heads.Recipe`, in their order."""

from functools import partial
from typing import Annotated

import typer

from dubito import choices

FIT = "fit"
_setting = partial(typer.Option, rich_help_panel="Recipe")

Loss = Annotated[choices.LossName, _setting("--loss", help="What is minimised.")]
Margin = Annotated[float, _setting("--margin", help="Of the ranking loss.")]
Leeway = Annotated[float, _setting("--leeway", help="Losses that differ by no more than this have no order.")]
Target = Annotated[
    choices.Target, _setting("--target", help="Observed losses (of the labels), those that the model expects, or both.")
]
Temperature = Annotated[
    str | None,
    _setting(
        "--temperature",
        metavar=f"T|{FIT}",
        help="For expected losses: how far the model is believed; fit estimates it from the labels.",
        show_default="1",
    ),
]
Mix = Annotated[float, _setting("--mix", help="Weight of the expected loss in --target mixed.")]
Optimizer = Annotated[choices.Optimizer, _setting("--optimizer", help="Which optimiser.")]
Lr = Annotated[float, _setting("--lr", help="Peak learning rate at a batch of 256.")]
Betas = Annotated[str, _setting("--betas", metavar="B,B", help="Of AdamW, Adam and Lion.")]
WeightDecay = Annotated[float, _setting("--weight-decay", help="On matrices, not on biases.")]
Schedule = Annotated[choices.Schedule, _setting("--schedule", help="Learning rates after the warm-up.")]
WarmupLr = Annotated[float, _setting("--warmup-lr", help="Where the warm-up begins.")]
FinalLr = Annotated[float, _setting("--final-lr", help="Where the cosine ends.")]
Episodes = Annotated[int, _setting("--episodes", help="Steps of the schedule.")]
Warmup = Annotated[int, _setting("--warmup", help="How many of them warm up.")]
Batch = Annotated[
    int | None, _setting("--batch", min=2, help="Rows at once.", show_default="2048, less of a small cache")
]
Rows = Annotated[int | None, _setting("--rows", min=2, help="Rows seen in all.", show_default="by the caches' size")]
Dropout = Annotated[
    float, _setting("--dropout", help="Share of the features dropped while learning; 0.8 for few photographs.")
]
Init = Annotated[
    choices.Init,
    _setting("--init", help="First weights: random, zero (nothing is learned), or the classes', for few photographs."),
]


def parse_betas(text: str) -> tuple[float, float]:
    """Two numbers with a comma between them.

    >>> parse_betas("0.8,0.95")
    (0.8, 0.95)
    """
    try:
        first, second = map(float, text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--betas takes two numbers with a comma, such as 0.9,0.999; got '{text}'.") from error
    return first, second


def check_temperature(text: str | None, target: str) -> None:
    """Raise BadParameter for what is no temperature, and for one that nobody asks for."""
    if text is None:
        return
    if target == "observed":
        raise typer.BadParameter("--temperature is for expected losses: --target expected, or mixed.")
    if text != FIT and number(text) is None:
        raise typer.BadParameter(f"--temperature takes a number, or {FIT}; got '{text}'.")


def number(text: str) -> float | None:
    """The number that a text is, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None
