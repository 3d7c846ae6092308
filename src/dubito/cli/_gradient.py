"""The options of `dubito extract --gradient`: the settings of the gradient probe, under their own names."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from dubito.choices import ClassWeighting, GradientMethod

if TYPE_CHECKING:
    from dubito.types import Probe

_PANEL = "Gradients"

Asked = Annotated[
    bool,
    typer.Option(
        "--gradient",
        help="Also gradient norms of every layer, by backward passes: gradient ...",
        rich_help_panel=_PANEL,
    ),
]
Method = Annotated[
    GradientMethod | None,
    typer.Option(
        "--gradient-method",
        help="Of all classes, the most likely ones, random mixtures, or both of these.",
        show_default="combined",
        rich_help_panel=_PANEL,
    ),
]
Classes = Annotated[
    int | None,
    typer.Option(
        "--gradient-classes",
        metavar="N",
        help="How many of the most likely classes.",
        show_default="2",
        rich_help_panel=_PANEL,
    ),
]
Draws = Annotated[
    int | None,
    typer.Option(
        "--gradient-draws", metavar="N", help="How many random mixtures.", show_default="2", rich_help_panel=_PANEL
    ),
]
Weightings = Annotated[
    list[str] | None,
    typer.Option(
        "--gradient-weighting",
        metavar="NAME",
        help="Also root or expected_l1, several times for several; with the methods exact and top.",
        show_default="fisher",
        rich_help_panel=_PANEL,
    ),
]
Uniform = Annotated[
    bool,
    typer.Option("--gradient-uniform", help="Also GradNorm's gradient, of every layer.", rich_help_panel=_PANEL),
]
Last = Annotated[
    int | None,
    typer.Option("--gradient-last", metavar="N", help="Only the last N layers.", rich_help_panel=_PANEL),
]
Beta = Annotated[
    float | None,
    typer.Option(
        "--gradient-beta", metavar="B", help="Only layers that count with this weight of depth.", rich_help_panel=_PANEL
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--gradient-tolerance",
        metavar="W",
        help="The least weight that counts.",
        show_default="0.001",
        rich_help_panel=_PANEL,
    ),
]
Copies = Annotated[
    int | None,
    typer.Option(
        "--gradient-copies",
        metavar="N",
        help="Average gradients over N noisy copies and the image.",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
Sigma = Annotated[
    float | None,
    typer.Option(
        "--gradient-sigma", metavar="S", help="Of the copies' noise.", show_default="0.1", rich_help_panel=_PANEL
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--gradient-seed", metavar="N", help="Of mixtures and noise.", show_default="0", rich_help_panel=_PANEL
    ),
]


def gradients(asked: bool, settings: dict[str, Any]) -> list["Probe"]:
    """The gradient probe, if it was asked for; settings that are None or False are the probe's own.

    Settings for a probe that was not asked for are a mistake, and so are those that another one must give a meaning.
    """
    from dubito.probes import Gradient

    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    if given and not asked:
        option = next(iter(given)).replace("weightings", "weighting")
        raise typer.BadParameter(f"--gradient-{option} needs --gradient.")
    for weighting in given.get("weightings", ()):
        if weighting not in get_args(ClassWeighting):
            known = ", ".join(get_args(ClassWeighting))
            raise typer.BadParameter(f"--gradient-weighting is one of {known}; got '{weighting}'.")
    for name, needed in (("sigma", "copies"), ("tolerance", "beta")):
        if name in given and needed not in given:
            raise typer.BadParameter(f"--gradient-{name} needs --gradient-{needed}.")
    return [Gradient(**given)] if asked else []
