"""Do deeper networks filter better? Fig. 17: VGG-style networks of one to four blocks, MNIST against Fashion-MNIST.

    python experiments/depth_study.py --more-data DIR [--epochs 4] [--seeds 1 2 3] [--limit 6000] [--write]

Pearce et al. (2021), E.3 and C.4.3. DIR holds MNIST/raw and FashionMNIST/raw, as torchvision lays them. Every network
is trained on all ten classes of one set and meets the other as OOD images; accuracy and the AUROC of U_max and
U_entropy are measured on equally many test images of both. The paper trains on all 60,000 images for 12 epochs, five
runs each; by default this takes 6,000 images, 4 epochs and three runs, about twenty minutes on two cores. The values of
Fig. 17 stand in a drawing, not in the text; what can be compared is the claim: AUROC grows with depth, accuracy quickly
plateaus. The last line is one JSON object.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from _expected import write_expected
from _small_nets import logits_of, mean_and_error, measured, read, trained, vgg

EXPECTED = Path(__file__).parent / "expected" / "depth_study.json"
PAIRS = (("MNIST", "Fashion-MNIST"), ("Fashion-MNIST", "MNIST"))
BLOCKS = (1, 2, 3, 4)
MEASURES = {"accuracy": "accuracy", "max_probability": "AUROC U_max", "entropy": "AUROC U_entropy"}


def main() -> None:
    """Every pair, depth and seed, a table, the claim, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--limit", type=int, default=6000, help="training images")
    parser.add_argument("--test-limit", type=int, default=2000, help="test images of each set")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    actual = {
        f"{in_distribution} against {other}": study(args, in_distribution, other) for in_distribution, other in PAIRS
    }
    claims = verdicts(actual, len(args.seeds))
    print("\n".join([*lines(actual), *claims]))
    if args.figure:
        draw(actual, args.figure)
    settings = {key: getattr(args, key) for key in ("epochs", "seeds", "limit", "test_limit")}
    result = {"settings": settings, "findings": claims, "pairs": actual}
    if args.write:
        published = "Fig. 17, a drawing without numbers: AUROC improves with depth, accuracy quickly plateaus"
        write_expected(EXPECTED, "--more-data DIR", result, published=published)
    print(json.dumps(result))


def study(args: argparse.Namespace, in_distribution: str, other: str) -> dict[str, Any]:
    """By the number of convolutions, the mean and standard error of every measure over the seeds."""
    train = read(args.more_data, in_distribution, train=True, limit=args.limit)
    test, (ood, _) = (
        read(args.more_data, name, train=False, limit=args.test_limit) for name in (in_distribution, other)
    )
    result = {}
    for blocks in BLOCKS:
        runs = []
        for seed in args.seeds:
            title = f"{in_distribution}, {2 * blocks} convolutions, seed {seed}"
            module = trained(vgg(blocks, seed=seed), train, args.epochs, seed=seed, title=title)
            runs.append(measured(logits_of(module, test[0]), test[1], logits_of(module, ood)))
        result[str(2 * blocks)] = {key: mean_and_error([run[key] for run in runs]) for key in MEASURES}
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """As a table."""
    figures = [f"{'':28}{'convolutions':14}" + "".join(f"{title:20}" for title in MEASURES.values())]
    for pair, depths in result.items():
        for depth, row in depths.items():
            cells = "".join(f"{row[key]['mean']:.4f} ± {row[key]['error']:.4f}     " for key in MEASURES)
            figures.append(f"{pair:28}{depth:14}{cells}".rstrip())
    return figures


def verdicts(result: dict[str, Any], runs: int) -> list[str]:
    """The paper's claim for every pair, by the shallowest and the deepest network and their standard errors."""
    figures = []
    for pair, depths in result.items():
        first, last = (depths[str(2 * blocks)] for blocks in (BLOCKS[0], BLOCKS[-1]))
        gains = {key: last[key]["mean"] - first[key]["mean"] for key in MEASURES}
        error = math.hypot(first["entropy"]["error"], last["entropy"]["error"])
        verdict = "one run, no verdict" if runs == 1 else "within twice the standard error"
        if runs > 1 and abs(gains["entropy"]) > 2 * error:
            verdict = "as the paper says" if gains["entropy"] > 0 else "against the paper"
        figures.append(
            f"{pair}: from 2 to 8 convolutions AUROC of U_entropy changes by {gains['entropy']:+.3f}, accuracy by "
            f"{gains['accuracy']:+.3f}; {verdict}."
        )
    return figures


def draw(result: dict[str, Any], to: Path) -> None:
    """Accuracy and AUROC over depth, as in Fig. 17."""
    from dubito.explain.pictures import COLOURS, new_figure  # noqa: PLC0415 (only the figure needs it)

    figure, axes = new_figure(1, len(result), width=4.0, height=3.0)
    for panel, (pair, depths) in zip(axes[0], result.items(), strict=True):
        for colour, (key, title) in zip(COLOURS, MEASURES.items(), strict=False):
            at = [depths[depth][key] for depth in depths]
            means, errors = [row["mean"] for row in at], [row["error"] for row in at]
            panel.errorbar([int(depth) for depth in depths], means, errors, color=colour, label=title, marker=".")
        panel.set(title=pair, xlabel="convolutions")
    axes[0][0].legend(frameon=False, fontsize="small")
    figure.savefig(to, dpi=130)


if __name__ == "__main__":
    main()
