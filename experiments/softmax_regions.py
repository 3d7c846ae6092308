"""Where does softmax notice an OOD image? Figs 2, 3, 8 and 9 of Pearce et al. (2021), drawn anew.

    python experiments/softmax_regions.py --to DIR [--epsilon 0.05]

Two features, two or three Gaussian classes, no data: valid regions of three uncertainties (fig2.png), of an optimal and
of another structure (fig3.png), the directions in which uncertainty grows (fig8.png), and the linear region inside the
exact one (fig9.png). The paper prints no numbers of its Gaussians; these are ours. The last line is one JSON object:
which share of the window each region takes, and of the training data (about epsilon, by definition).
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dubito.explain import pictures
from dubito.explain.last_layer import Layer, simplex
from dubito.explain.regions import (
    Gaussians,
    Region,
    density_field,
    entropy_field,
    exact_region,
    linear_region,
    max_probability_field,
    two_class_region,
)
from dubito.scores.softmax import entropy, max_probability

SPAN, ROWS = 4.0, 200_000
NAMES = {"max_probability": "$U_{max}$", "entropy": "$U_{entropy}$", "density": "$U_{density}$"}


def main() -> None:
    """Draw all four, tell the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="a folder for the pictures")
    parser.add_argument("--epsilon", type=float, default=0.05)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    result = {
        "epsilon": args.epsilon,
        "fig2": regions(args.to / "fig2.png", args.epsilon),
        "fig3": structures(args.to / "fig3.png", args.epsilon),
        "fig9": linear(args.to / "fig9.png", args.epsilon),
    }
    fields(args.to / "fig8.png")
    print(json.dumps(result))


def two_classes() -> tuple[Layer, Gaussians]:
    """A slanted boundary between two clusters of different shape."""
    weight = 2.0 * turned(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), 0.3)
    mean = 2.0 * turned(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), 0.45)
    covariance = torch.tensor([[[0.30, 0.10], [0.10, 0.25]], [[0.20, -0.05], [-0.05, 0.40]]], dtype=torch.float64)
    return Layer(weight, weight.new_zeros(2)), Gaussians(weight.new_full((2,), 0.5), mean, covariance)


def three_classes(
    angles: tuple[float, ...] = (90, 210, 330), lengths: tuple[float, ...] = (1, 1, 1)
) -> tuple[Layer, Gaussians]:
    """Three small round clusters at some angles, and weights that point at them."""
    turn = torch.tensor(angles, dtype=torch.float64).deg2rad()
    way = torch.stack([turn.cos(), turn.sin()], dim=1)
    weight = 2.0 * torch.tensor(lengths, dtype=torch.float64)[:, None] * way
    covariance = 0.12 * torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    return Layer(weight, weight.new_zeros(3)), Gaussians(weight.new_full((3,), 1 / 3), 2.2 * way, covariance)


def uncertainties(layer: Layer, gaussians: Gaussians) -> dict[str, Callable[[Tensor], Tensor]]:
    """The three of the paper, over features."""
    return {
        "max_probability": lambda z: max_probability(layer.logits(z)),
        "entropy": lambda z: entropy(layer.logits(z)),
        "density": gaussians.uncertainty,
    }


def regions(to: Path, epsilon: float) -> dict[str, dict[str, float]]:
    """Fig. 2: valid regions of each uncertainty, for two and for three classes."""
    figure, axes = pictures.new_figure(2, 3)
    hits = {}
    for row, (count, (layer, gaussians)) in zip(axes, (("2", two_classes()), ("3", three_classes())), strict=True):
        train, _ = gaussians.sample(ROWS, seed=1)
        for panel, (name, u) in zip(row, uncertainties(layer, gaussians).items(), strict=True):
            region = exact_region(u, train, epsilon)
            pictures.draw_region(panel, region, SPAN)
            pictures.draw_boundaries(panel, layer, SPAN)
            pictures.draw_clusters(panel, gaussians)
            pictures.plane(panel, SPAN, f"{NAMES[name]}, {count} classes")
            hits[f"{name}, {count} classes"] = shares(region, train)
        if count == "2":
            hits["theorem 1, 2 classes"] = shares(two_class_region(layer, gaussians, epsilon), train)
    figure.savefig(to, dpi=130)
    return hits


def structures(to: Path, epsilon: float) -> dict[str, dict[str, float]]:
    """Fig. 3: what a structure that is not optimal costs."""
    figure, axes = pictures.new_figure(1, 2)
    chosen = {"optimal": three_classes(), "general": three_classes((90, 150, 330), (1, 1, 1))}
    result = {}
    for panel, (name, (layer, gaussians)) in zip(axes[0], chosen.items(), strict=True):
        train, _ = gaussians.sample(ROWS, seed=1)
        region = exact_region(uncertainties(layer, gaussians)["max_probability"], train, epsilon)
        pictures.draw_region(panel, region, SPAN)
        pictures.draw_boundaries(panel, layer, SPAN)
        pictures.draw_clusters(panel, gaussians)
        pictures.draw_weights(panel, layer, 0.9)
        pictures.plane(panel, SPAN, f"{name} structure")
        result[name] = shares(region, train)
    figure.savefig(to, dpi=130)
    return result


def fields(to: Path) -> None:
    """Fig. 8: arrows point to more uncertainty."""
    figure, axes = pictures.new_figure(1, 3)
    layer, gaussians = three_classes()
    chosen = (partial(max_probability_field, layer), partial(entropy_field, layer), partial(density_field, gaussians))
    for panel, field, name in zip(axes[0], chosen, NAMES.values(), strict=True):
        pictures.draw_clusters(panel, gaussians, rows=60)
        pictures.draw_field(panel, field, SPAN)
        pictures.plane(panel, SPAN, f"growing {name}")
    figure.savefig(to, dpi=130)


def linear(to: Path, epsilon: float) -> dict[str, dict[str, float]]:
    """Fig. 9: the linear region (green) inside the exact one (its outline), and the part that it misses."""
    figure, axes = pictures.new_figure(1, 1, width=4.4, height=4.4)
    layer, gaussians = three_classes()
    layer = Layer(1.5 * simplex(3, 2), layer.bias)
    gaussians = Gaussians(gaussians.share, 2.2 * simplex(3, 2), gaussians.covariance)
    train, _ = gaussians.sample(ROWS, seed=1)
    exact = exact_region(uncertainties(layer, gaussians)["max_probability"], train, epsilon)
    inside = linear_region(layer, -exact.threshold)
    panel = axes[0][0]
    pictures.draw_region(panel, inside, SPAN)
    pictures.draw_region(panel, exact, SPAN, colour=pictures.COLOURS[1], outline=True)
    pictures.draw_boundaries(panel, layer, SPAN)
    pictures.draw_weights(panel, layer, 1.6)
    pictures.plane(panel, SPAN, "linear region (green)\nand outline of the exact one (red)")
    figure.savefig(to, dpi=130)
    return {"exact": shares(exact, train), "linear": shares(inside, train)}


def shares(region: Region, train: Tensor) -> dict[str, float]:
    """How much of the window, and of the training data, lies in a region."""
    line = torch.linspace(-SPAN, SPAN, 401, dtype=torch.float64)
    window = torch.cartesian_prod(line, line)
    return {
        "window": round(float(region.contains(window).double().mean()), 4),
        "training": round(float(region.contains(train).double().mean()), 4),
    }


def turned(rows: Tensor, angle: float) -> Tensor:
    """Rows of two features, turned by an angle."""
    c, s = math.cos(angle), math.sin(angle)
    return rows @ torch.tensor([[c, s], [-s, c]], dtype=rows.dtype)


if __name__ == "__main__":
    main()
