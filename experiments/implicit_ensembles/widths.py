"""Does epistemic uncertainty fall as models grow wider? Fig. 3, Tables 1 and 2 of Kirsch (2024).

    python experiments/implicit_ensembles/widths.py --more-data DIR --mlps DIR [--epochs 4] [--widths 1 2 ...] [--write]

Ensembles of ten MLPs (`_mlps`) of every width factor, trained on MNIST, meet the MNIST test set, Fashion-MNIST, and
"dirty" digits, half of them ambiguous (`_ambiguous`). Mean mutual information, accuracy and NLL of the ensemble; AUROC
of mutual information and of the ensemble's entropy, Fashion-MNIST against MNIST; and the difference of their means.
DIR holds MNIST/raw and FashionMNIST/raw; what was trained is kept in --mlps, so that the script goes on where it was
stopped. Four epochs of all widths take about two core-hours, nearly all of it for x64 and x128. The published values
are of 100 epochs (`_mlps` says what differs), and of other dirty digits. Table 2's MNIST NLLs, down to 4e-8, cannot be
means. The last line is one JSON object.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _ambiguous import dirty_mnist
from _mlps import apart, logits_of, member, read
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from dubito.explain.collapse import diagnose_ensemble
from dubito.metrics import decompose
from dubito.table import Table

EXPECTED = Path(__file__).parents[1] / "expected" / "implicit_ensembles_widths.json"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "widths.png"
WIDTHS, MEMBERS = (1, 2, 4, 8, 32, 64, 128), 10
IN_DISTRIBUTION, DIRTY, OOD = "MNIST", "dirty MNIST", "Fashion-MNIST"
PUBLISHED = {
    "mean_mi": {
        IN_DISTRIBUTION: (0.0397, 0.0305, 0.0233, 0.0182, 0.011, 0.0104, 0.00956),
        DIRTY: (0.183, 0.176, 0.149, 0.125, 0.0838, 0.0882, 0.0805),
        OOD: (0.228, 0.225, 0.192, 0.162, 0.11, 0.114, 0.11),
    },
    "accuracy": {
        IN_DISTRIBUTION: (98.0, 98.4, 98.6, 98.5, 98.7, 98.6, 98.5),
        DIRTY: (76.1, 77.5, 77.7, 77.5, 77.2, 77.1, 76.6),
    },
    "auroc": {
        "mutual information": (0.824, 0.835, 0.840, 0.842, 0.847, 0.848, 0.848),
        "entropy": (0.833, 0.841, 0.845, 0.847, 0.851, 0.851, 0.851),
    },
    "mean_difference": {
        "mutual information": (0.188, 0.194, 0.169, 0.144, 0.099, 0.104, 0.100),
        "entropy": (0.482, 0.420, 0.362, 0.329, 0.285, 0.280, 0.275),
    },
}
"""Tables 1 and 2, in the order of WIDTHS. Of dirty digits, NLL 0.477, 0.531, 0.471, 0.415, 0.402, 0.46, 0.351."""


def main() -> None:
    """Every width, a table, a picture, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--mlps", type=Path, required=True, help="trained MLPs are kept here")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name} and {PICTURE.name}")
    args = parser.parse_args()
    train = read(args.more_data, IN_DISTRIBUTION, train=True)
    sets = {
        IN_DISTRIBUTION: read(args.more_data, IN_DISTRIBUTION, train=False),
        OOD: read(args.more_data, OOD, train=False),
    }
    sets[DIRTY] = dirty_mnist(args.more_data, args.mlps)
    actual, information, ood = {}, {}, {}
    for width in args.widths:
        members = [member(args.mlps, width, seed, train, args.epochs) for seed in range(MEMBERS)]
        logits = {name: logits_of(members, x) for name, (x, _) in sets.items()}
        actual[width], information[width] = measured(logits, {name: y for name, (_, y) in sets.items()})
        ood[width] = Table(members_logit=logits[OOD].transpose(0, 1), name=f"width x{width}")
        print(row(width, actual[width]), flush=True)
    collapse = diagnose_ensemble(ood)
    print(collapse)
    result = {
        "settings": {"epochs": args.epochs, "widths": args.widths, "members": MEMBERS},
        "published": {"widths": list(WIDTHS), **PUBLISHED},
        "widths": actual,
        "collapse": collapse.to_dict(),
    }
    if args.write:
        command = "python experiments/implicit_ensembles/widths.py --more-data DIR --mlps DIR --write"
        EXPECTED.write_text(json.dumps({"command": command} | result, indent=1) + "\n")
        draw(information)
    print(json.dumps(result))


def measured(logits: dict[str, Tensor], labels: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Figures of one ensemble, from logits (m, n, c) of each set; and the mutual information of every image."""
    parts = {name: decompose(z.softmax(-1)) for name, z in logits.items()}
    probs = {name: z.double().softmax(-1).mean(0) for name, z in logits.items()}
    scores = {
        "mutual information": {name: part.epistemic for name, part in parts.items()},
        "entropy": {name: part.total for name, part in parts.items()},
    }
    figures = {
        "mean_mi": {name: part.epistemic.mean() for name, part in parts.items()},
        "accuracy": {
            name: 100 * (probs[name].argmax(1) == labels[name]).double().mean() for name in (IN_DISTRIBUTION, DIRTY)
        },
        "nll": {name: -probs[name].gather(1, labels[name][:, None]).log().mean() for name in (IN_DISTRIBUTION, DIRTY)},
        "auroc": {name: apart(of[IN_DISTRIBUTION], of[OOD]) for name, of in scores.items()},
        "mean_difference": {name: of[OOD].mean() - of[IN_DISTRIBUTION].mean() for name, of in scores.items()},
    }
    rounded = {key: {name: round(float(value), 5) for name, value in of.items()} for key, of in figures.items()}
    return rounded, scores["mutual information"]


def row(width: int, figures: dict[str, Any]) -> str:
    """Ours, and the published values behind each where there are any."""
    place = WIDTHS.index(width) if width in WIDTHS else None
    cells = []
    for key, of in PUBLISHED.items():
        for name, values in of.items():
            published = "" if place is None else f" ({values[place]:g})"
            cells.append(f"{key} {name} {figures[key][name]:.4g}{published}")
    return f"x{width}: " + "; ".join(cells)


def draw(information: dict[int, dict[str, Tensor]]) -> None:
    """Fig. 3 (a): how mutual information is distributed, one line a width."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    shades = colormaps["viridis"](torch.linspace(0, 0.9, len(information)).numpy())
    for ax, name in zip(axes, (IN_DISTRIBUTION, DIRTY, OOD), strict=True):
        for (width, values), shade in zip(information.items(), shades, strict=True):
            ordered = values[name].sort().values.clamp_min(1e-6)
            share = torch.arange(1, len(ordered) + 1) / len(ordered)
            ax.semilogx(ordered, share, color=shade, label=f"x{width}")
        ax.set(title=name, xlabel="mutual information (nats)")
    axes[0].set_ylabel("share of images below")
    axes[0].legend(title="width", fontsize=8)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
