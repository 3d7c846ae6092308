"""Does the arrangement of decision boundaries matter for OOD images? Fig. 5: the last layer frozen in structures.

    python experiments/counterfactual_structures.py --more-data DIR [--epochs 2] [--seeds 1 2 3] [--write]

Pearce et al. (2021), section 4.3 and C.3: a LeNet with H = 16 features is trained on three classes of MNIST (0, 1 and
2; the paper does not say which), its last layer trainable or frozen in one of the structures of
`dubito.explain.last_layer`, and meets Fashion-MNIST. Accuracy, cross-entropy, and the AUROC of U_max and U_entropy on
equally many images of both, mean and standard error over the seeds. The values of Fig. 5 stand in a drawing, not in
the text: what can be compared is that all structures reach about 99.5% accuracy, and that only trainable and optimal
reach a high AUROC. Which structures there are beside 'sandwich' and 'stack' is ours, and so is how 'stack' is made
trainable: biases part its classes from the start, where the paper moves the weights while it trains. A frozen layer is
turned at random by the run's seed, so that no class lies where features behind a ReLU cannot go, and its weights have
length --scale. All of it takes about half an hour on one core. The last line is one JSON object.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from _expected import write_expected
from _small_nets import Half, lenet, logits_of, mean_and_error, measured, read, trained
from torch import Tensor, nn

from dubito.explain.last_layer import STRUCTURES, layer

EXPECTED = Path(__file__).parent / "expected" / "counterfactual_structures.json"
WIDTH, CLASSES, FREE = 16, 3, "trainable"
GOOD = (FREE, "optimal")
"""Those that the paper finds to detect OOD images well."""
EQUAL = 0.005
"""Accuracies that differ by no more are called equal."""
RUNS = {2: "two", 3: "three", 4: "four", 5: "five"}
MEASURES = {
    "accuracy": "accuracy",
    "cross_entropy": "cross-entropy",
    "max_probability": "AUROC U_max",
    "entropy": "AUROC U_entropy",
}


def main() -> None:
    """Every structure and seed, a table, the claim, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--limit", type=int, help="training images of the three classes; by default all 18,623")
    parser.add_argument("--scale", type=float, default=1.0, help="of frozen weights and biases")
    parser.add_argument("--only", nargs="+", choices=[FREE, *STRUCTURES], default=[FREE, *STRUCTURES], metavar="NAME")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    train, test = (chosen(read(args.more_data, "MNIST", train=half)) for half in (True, False))
    train = (train[0][: args.limit], train[1][: args.limit])
    ood = balanced(read(args.more_data, "Fashion-MNIST", train=False)[0], len(test[0]))
    actual: dict[str, Any] = {}
    for name in args.only:
        runs = []
        for seed in args.seeds:
            module = frozen_in(name, lenet(WIDTH, CLASSES, seed=seed), args.scale, seed)
            module = trained(module, train, args.epochs, seed=seed, title=f"{name}, seed {seed}")
            runs.append(measured(logits_of(module, test[0]), test[1], logits_of(module, ood)))
        actual[name] = {key: mean_and_error([run[key] for run in runs]) for key in MEASURES}
    claims = verdicts(actual, len(args.seeds))
    print("\n".join([*lines(actual), *claims]))
    settings = {key: getattr(args, key) for key in ("epochs", "seeds", "limit", "scale")}
    result = {"settings": settings, "findings": claims, "structures": actual}
    if args.write:
        published = "Fig. 5, a drawing; all have around 99.5% accuracy, only trainable and optimal a high AUROC"
        write_expected(EXPECTED, "--more-data DIR", result, published=published)
    print(json.dumps(result))


def chosen(half: Half) -> Half:
    """The first three classes."""
    mine = half[1] < CLASSES
    return half[0][mine], half[1][mine]


def balanced(images: Tensor, count: int) -> Tensor:
    """So many, drawn at random."""
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]]


def frozen_in(structure: str, module: nn.Sequential, scale: float, seed: int) -> nn.Sequential:
    """The module with its last layer set to a structure and frozen; as it is, if that is 'trainable'."""
    last = module[-1]
    if structure != FREE:
        weight, bias = layer(structure, CLASSES, WIDTH, scale=scale, seed=seed)
        last.weight.data.copy_(weight)
        last.bias.data.copy_(bias)
        last.requires_grad_(False)
    return module


def lines(result: dict[str, Any]) -> list[str]:
    """As a table."""
    figures = [f"{'structure':14}" + "".join(f"{title:20}" for title in MEASURES.values())]
    for name, row in result.items():
        cells = "".join(f"{row[key]['mean']:.4f} ± {row[key]['error']:.4f}     " for key in MEASURES)
        figures.append(f"{name:14}{cells}".rstrip())
    return figures


def verdicts(result: dict[str, Any], runs: int = 3) -> list[str]:
    """The paper's claim, at equal accuracy: the good structures against each of the others, by AUROC of U_max.

    Three runs are too few for a test: a gap is held against twice its standard error, and that is what is told.
    """
    good = [name for name in GOOD if name in result]
    others = [name for name in result if name not in GOOD]
    if not good or not others:
        return []
    least = min(good, key=lambda name: result[name]["max_probability"]["mean"])
    worst, accuracy = result[least]["max_probability"], result[least]["accuracy"]["mean"]
    figures = [f"{' and '.join(good)} have an AUROC of U_max of {worst['mean']:.3f} or more."]
    for name in others:
        own = result[name]["max_probability"]
        gap, error = worst["mean"] - own["mean"], math.hypot(worst["error"], own["error"])
        apart = result[name]["accuracy"]["mean"] - accuracy
        equal = "at equal accuracy" if abs(apart) <= EQUAL else f"but its accuracy differs by {100 * apart:+.1f} points"
        as_said = ", as the paper says" if runs > 1 and gap > 2 * error and abs(apart) <= EQUAL else ""
        figures.append(f"{name}: {own['mean']:.3f}, {lower(gap, error, runs)}, {equal}{as_said}.")
    return figures


def lower(gap: float, error: float, runs: int) -> str:
    """How far one mean is below another, in words; one run has no error."""
    if gap <= 0 or runs < 2:
        return "not lower" if gap <= 0 else "lower in a single run"
    return (
        f"lower by {'more' if gap > 2 * error else 'less'} than twice the standard error of {RUNS.get(runs, runs)} runs"
    )


if __name__ == "__main__":
    main()
