"""Ensembles of ensembles collapse: Fig. 1 of Kirsch (2024), a regression with four points, drawn and measured anew.

    python experiments/implicit_ensembles/toy.py [--picture FILE] [--write]

    y = sin x + noise,  four points on [-5, 5];  network: 1 - 64 tanh - 2 tanh(.);  10 sub-ensembles of 1 to 64 networks

The uncertainty at x is the variance of the ten sub-ensembles' means (`decompose_variance`), averaged over x in [-5, 5].
Figure 1 has no numbers: the text says that it falls inversely with the size. Networks are independent, so that the
variance of means of s is 1/s of that of one; here the exponent is fitted.

OPEN in the paper: whether the 0.1 of N(0, 0.1) is a variance or a deviation (both are done here), how the points were
drawn (here uniformly), how networks were trained (here with Adam, learning rate 0.01, 1,000 steps on all four points)
and how they began (here as torch.nn.Linear does). All 640 networks of a data set are trained at once; sub-ensembles of
s are the 64 / s disjoint ones of each ten, over which the variance is averaged. The last line is one JSON object;
--write puts it into experiments/expected.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from dubito.explain.pictures import COLOURS, GREY, INK, new_figure
from dubito.metrics import decompose_variance

EXPECTED = Path(__file__).parents[1] / "expected" / "implicit_ensembles_toy.json"
SPAN, POINTS, HIDDEN, GROUPS = 5.0, 4, 64, 10
SIZES = (1, 2, 4, 8, 16, 32, 64)
RATE = 0.01
NOISES = {"deviation": 0.1, "variance": math.sqrt(0.1)}
"""What 0.1 may be, and the deviation that it makes."""
GRID = torch.linspace(-SPAN, SPAN, 201)


def main() -> None:
    """Both readings of the noise, a table, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--data-sets", type=int, default=5, help="four points each")
    parser.add_argument("--picture", type=Path, help="draw the first data set here")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    result = {"settings": {"steps": args.steps, "data_sets": args.data_sets, "learning_rate": RATE}}
    result["published"] = {"text": "inverse relationship between sub-ensemble size and mean epistemic uncertainty"}
    for name, deviation in NOISES.items():
        seeds = track(range(args.data_sets), description=f"0.1 as {name}")
        runs = [measured(deviation, args.steps, seed, args.picture if name == "deviation" else None) for seed in seeds]
        result[f"0.1 is the {name}"] = summed_up(runs)
    print(as_table(result))
    if args.write:
        command = "python experiments/implicit_ensembles/toy.py --write"
        EXPECTED.write_text(json.dumps({"command": command} | result, indent=1) + "\n")
    print(json.dumps(result))


def measured(deviation: float, steps: int, seed: int, picture: Path | None) -> dict:
    """One data set: uncertainty by size, the fitted exponent, and how well the points were learned."""
    draw = torch.Generator().manual_seed(seed)
    x = (2 * torch.rand(POINTS, generator=draw) - 1) * SPAN
    y = x.sin() + deviation * torch.randn(POINTS, generator=draw)
    weights = trained(x, y, steps, draw)
    outputs = forward(weights, GRID).double().reshape(GROUPS, max(SIZES), -1)
    by_size = {size: uncertainty(outputs, size) for size in SIZES}
    mean = {size: float(values.mean()) for size, values in by_size.items()}
    if picture is not None and seed == 0:
        draw_figure(picture, (x, y), outputs, by_size)
    return {
        "uncertainty": mean,
        "exponent": exponent(mean),
        "training_error": float((forward(weights, x) - y).square().mean().sqrt()),
    }


def trained(x: Tensor, y: Tensor, steps: int, draw: torch.Generator) -> list[Tensor]:
    """All networks at once: each its own row of every weight."""
    count = GROUPS * max(SIZES)

    def uniform(*shape: int, fan: int) -> Tensor:
        return ((2 * torch.rand(count, *shape, generator=draw) - 1) / math.sqrt(fan)).requires_grad_()

    weights = [uniform(HIDDEN, fan=1), uniform(HIDDEN, fan=1), uniform(HIDDEN, fan=HIDDEN), uniform(fan=HIDDEN)]
    adam = torch.optim.Adam(weights, lr=RATE, fused=True)
    for _ in range(steps):
        loss = (forward(weights, x) - y).square().mean(1).sum()  # a sum over networks: each has its own gradient
        adam.zero_grad()
        loss.backward()
        adam.step()
    return [weight.detach() for weight in weights]


def forward(weights: list[Tensor], x: Tensor) -> Tensor:
    """(networks, x)."""
    first, bias, second, last = weights
    hidden = torch.tanh(first[:, None] * x[:, None] + bias[:, None])
    return 2 * torch.tanh((hidden @ second[..., None])[..., 0] + last[:, None])


def uncertainty(outputs: Tensor, size: int) -> Tensor:
    """Variance between the ten means of `size` networks, at every x; the mean over disjoint choices of them."""
    means = outputs.reshape(GROUPS, -1, size, outputs.shape[-1]).mean(2)
    return torch.stack([decompose_variance(choice).epistemic for choice in means.unbind(1)]).mean(0)


def exponent(mean: dict[int, float]) -> float:
    """Of the fall, by least squares in logarithms."""
    return -float(np.polyfit(np.log(list(mean)), np.log(list(mean.values())), 1)[0])


def summed_up(runs: list[dict]) -> dict:
    """Means over data sets; of the exponent also the deviation."""
    exponents = [run["exponent"] for run in runs]
    return {
        "uncertainty": {str(size): float(np.mean([run["uncertainty"][size] for run in runs])) for size in SIZES},
        "exponent": {"mean": float(np.mean(exponents)), "deviation": float(np.std(exponents, ddof=len(runs) > 1))},
        "training_error": float(np.mean([run["training_error"] for run in runs])),
    }


def draw_figure(to: Path, points: tuple[Tensor, Tensor], outputs: Tensor, by_size: dict[int, Tensor]) -> None:
    """Predictions, uncertainty over x, and its mean over sizes."""
    figure, axes = new_figure(1, 3, width=4.0, height=3.2)
    left, middle, right = axes[0]
    left.plot(GRID, GRID.sin(), color=INK, linestyle="--", linewidth=1, label="sin x")
    for size, colour in zip((1, 8, 64), COLOURS, strict=False):
        means = outputs.reshape(GROUPS, -1, size, len(GRID)).mean(2)[:, 0]
        low, high = means.mean(0) - 2 * means.std(0), means.mean(0) + 2 * means.std(0)
        left.fill_between(GRID, low, high, color=colour, alpha=0.3, label=f"10 x {size}")
    left.plot(*points, "o", color=INK)
    for size, values in by_size.items():
        middle.plot(GRID, values, linewidth=1, label=str(size), color=(0.1, 0.3, 0.6, 0.25 + 0.75 * size / 64))
    mean = {size: float(values.mean()) for size, values in by_size.items()}
    right.loglog(list(mean), list(mean.values()), "o-", color=COLOURS[0], label=f"exponent {exponent(mean):.2f}")
    right.loglog(list(mean), [mean[1] / size for size in mean], color=GREY, linestyle="--", label="1 / size")
    left.set(title="ten sub-ensembles, 2 deviations", xlabel="x")
    middle.set(title="variance between them", xlabel="x", yscale="log")
    right.set(title="its mean over x", xlabel="size of sub-ensembles")
    for panel in axes[0]:
        panel.legend(frameon=False, fontsize="x-small")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=130)


def as_table(result: dict) -> str:
    """Uncertainty by size, and its exponent."""
    lines = ["", f"{'mean variance of 10 x s':24}" + "".join(f"{size:>10}" for size in SIZES) + f"{'exponent':>18}"]
    for name in (key for key in result if key.startswith("0.1")):
        actual = result[name]
        cells = "".join(f"{value:10.5f}" for value in actual["uncertainty"].values())
        fall = f"{actual['exponent']['mean']:.3f} ± {actual['exponent']['deviation']:.3f}"
        lines.append(f"{name:24}{cells}{fall:>18}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
