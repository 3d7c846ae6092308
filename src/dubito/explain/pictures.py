"""Regions, clusters, boundaries and fields of two features as pictures.

Everything draws on the matplotlib axes that are passed, so that pictures can be combined; only figures import it.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import MissingPackageError
from dubito.explain.last_layer import Layer
from dubito.explain.regions import Gaussians, Region

GREEN, INK, GREY = "#7fbf7b", "#222222", "#8a8a8a"
COLOURS = ("#2166ac", "#b2182b", "#e08214", "#542788", "#01665e", "#bf5b9b")


def new_figure(rows: int, columns: int, *, width: float = 3.4, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes (rows, columns), each panel of a size in inches."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (only figures need it)
    except ModuleNotFoundError as error:
        raise MissingPackageError("Figures are drawn by matplotlib. pip install 'dubito[figures]'") from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def bin_edges(values: Float[Tensor, "n"], bins: int, *, room: float) -> Float[Tensor, "b1"]:
    """Edges of equal bins that hold all values, with a share of room on either side; also where all are equal."""
    low, high = float(values.min()), float(values.max())
    room *= max(high - low, 1e-6 * max(abs(low), abs(high), 1.0))
    return torch.linspace(low - room, high + room, bins + 1, dtype=torch.float64)


def plane(axes: Any, span: float, title: str = "") -> None:
    """A square window around the origin, without ticks."""
    axes.set(xlim=(-span, span), ylim=(-span, span), xticks=[], yticks=[], title=title, aspect="equal")


def draw_region(
    axes: Any, region: Region, span: float, *, colour: str = GREEN, outline: bool = False, points: int = 601
) -> None:
    """A region as a coloured area, or as its outline alone."""
    x, y, z = _grid(span, points)
    inside = region.contains(z).double().view(points, points).tolist()
    if outline:
        axes.contour(x, y, inside, levels=[0.5], colors=colour, linewidths=1.4)
    else:
        axes.contourf(x, y, inside, levels=[0.5, 1.5], colors=colour, alpha=0.55)


def draw_clusters(axes: Any, gaussians: Gaussians, *, share: float = 0.95, rows: int = 400, seed: int = 0) -> None:
    """Samples of every component, and the ellipse that holds a share of it."""
    z, component = gaussians.sample(rows, seed)
    turn = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    circle = math.sqrt(-2 * math.log(1 - share)) * torch.stack([turn.cos(), turn.sin()])  # chi-square, two dimensions
    factors = gaussians.factor.expand(len(gaussians.mean), -1, -1)
    for i, (mean, factor) in enumerate(zip(gaussians.mean.double(), factors, strict=True)):
        colour, mine = COLOURS[i % len(COLOURS)], z[component == i]
        axes.plot(*mine.T.tolist(), ".", color=colour, markersize=2, alpha=0.5)
        axes.plot(*(mean[:, None] + factor @ circle).tolist(), color=colour, linewidth=1.2)


def draw_boundaries(axes: Any, layer: Layer, span: float, *, points: int = 601) -> None:
    """Where the largest class changes, as dashed lines: pair by pair, where one of the two is the largest."""
    x, y, z = _grid(span, points)
    logits = layer.logits(z)
    top = logits.amax(1)
    for i, j in itertools.combinations(range(len(layer.bias)), 2):
        lead, near = logits[:, i] - logits[:, j], torch.maximum(logits[:, i], logits[:, j]) == top
        values = torch.where(near, lead, torch.nan).view(points, points).tolist()
        if bool((near & (lead > 0)).any()) and bool((near & (lead < 0)).any()):
            axes.contour(x, y, values, levels=[0.0], colors=INK, linewidths=0.9, linestyles="dashed")


def draw_weights(axes: Any, layer: Layer, length: float = 1.0) -> None:
    """Weights as arrows from the origin, the longest of a given length."""
    weight = layer.weight.double()
    arrows = length * weight / torch.linalg.vector_norm(weight, dim=1).max()
    for i, arrow in enumerate(arrows.tolist()):
        axes.annotate("", arrow, (0, 0), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.3})
        beyond = (1.22 * arrow[0], 1.22 * arrow[1])
        axes.annotate(f"$w_{{{i + 1}}}$", beyond, ha="center", va="center", fontsize="medium")


def draw_field(axes: Any, field: Callable[[Tensor], Tensor], span: float, *, arrows: int = 19) -> None:
    """The direction of a field at points of a grid, all arrows of one length; a point where it vanishes has none."""
    x, y, z = _grid(0.94 * span, arrows)
    way = field(z)
    length: Tensor = torch.linalg.vector_norm(way, dim=1, keepdim=True)
    way = torch.where(length > 1e-12 * length.max(), way / length.clamp(min=1e-300), torch.nan)
    u, v = (part.view(arrows, arrows).tolist() for part in way.T)
    axes.quiver(x, y, u, v, color=GREY, angles="xy", pivot="mid", scale=1.35 * arrows, width=0.005)


def _grid(span: float, points: int) -> tuple[list[float], list[float], Float[Tensor, "n 2"]]:
    """The axes of a square grid, and its points row by row."""
    line = torch.linspace(-span, span, points, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return line.tolist(), line.tolist(), torch.stack([x.flatten(), y.flatten()], dim=1)
