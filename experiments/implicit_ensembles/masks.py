"""Can one wide MLP be taken apart into an ensemble? Fig. 4 of Kirsch (2024): members by masks from width x64.

    python experiments/implicit_ensembles/masks.py --data DIR --mlps DIR [--epochs 4] [--width 64] [--write]

Ten members are extracted from one MLP of width x64 (`dubito.ensembles.extract_members`, default recipe, training
images of MNIST alone) and set beside the explicit ensembles of ten MLPs of width x4 and x64, and beside the entropy of
the single MLP: mean mutual information on every set, and how well mutual information and entropy separate Fashion-MNIST
from MNIST. DIR holds MNIST/raw and FashionMNIST/raw; the MLPs are those of `_mlps`, and trained if they are not in
--mlps; half of the "dirty" digits are ambiguous (`_ambiguous`). Fig. 4 is a drawing without numbers; published values
are those of Tables 1 and 2 for the explicit ensembles, and what the text says of the extracted one. They are of 100
epochs (`_mlps` says what differs here), and of other dirty digits. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _ambiguous import dirty_mnist
from _mlps import apart, logits_of, member, read
from matplotlib.figure import Figure
from torch import Tensor

from dubito.ensembles import MaskRecipe, extract_members
from dubito.metrics import decompose

EXPECTED = Path(__file__).parents[1] / "expected" / "implicit_ensembles_masks.json"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "masks.png"
MEMBERS, NARROW = 10, 4
IN_DISTRIBUTION, DIRTY, OOD = "MNIST", "dirty MNIST", "Fashion-MNIST"
SETS: dict[str, Callable[[Path, Path], tuple[Tensor, Tensor]]] = {
    IN_DISTRIBUTION: lambda data, _: read(data, IN_DISTRIBUTION, train=False),
    DIRTY: dirty_mnist,
    OOD: lambda data, _: read(data, OOD, train=False),
}
"""Test images and labels by name, from the folders of data and of MLPs; a further set is a further line."""
PUBLISHED = {
    "source": "Fig. 4, a drawing without numbers; Tables 1 and 2 for the explicit ensembles, of 100 epochs",
    "mean_mi": {
        "explicit x4": {IN_DISTRIBUTION: 0.0233, DIRTY: 0.149, OOD: 0.192},
        "explicit x64": {IN_DISTRIBUTION: 0.0104, DIRTY: 0.0882, OOD: 0.114},
    },
    "auroc": {
        "explicit x4": {"mutual information": 0.840, "entropy": 0.845},
        "explicit x64": {"mutual information": 0.848, "entropy": 0.851},
    },
    "claims": [
        "the extracted ensemble nearly recovers the mutual information of a trained ensemble of the same width",
        "its OoD detection approaches that of a narrower model",
        "the mean entropy difference between iD and OoD is larger for it than for the single model",
        "by entropy, its OoD detection does not match that of the single wide model",
    ],
}


def main() -> None:
    """Extract, measure, compare, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--mlps", type=Path, required=True, help="trained MLPs are kept here")
    parser.add_argument("--epochs", type=int, default=4, help="of the MLPs")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name} and {PICTURE.name}")
    args = parser.parse_args()
    train = read(args.data, IN_DISTRIBUTION, train=True)
    explicit = {
        f"explicit x{width}": [member(args.mlps, width, seed, train, args.epochs) for seed in range(MEMBERS)]
        for width in sorted({NARROW, args.width})
    }
    model = explicit[f"explicit x{args.width}"][0]
    with torch.autocast("cpu", torch.bfloat16):  # as the MLPs were trained
        actual = extract_members(model, *train, members=MEMBERS)
    ensembles = {"extracted": list(actual), **explicit, "single": [model]}
    sets = {name: load(args.data, args.mlps) for name, load in SETS.items()}
    logits = {key: {name: logits_of(of, x) for name, (x, _) in sets.items()} for key, of in ensembles.items()}
    figures = {key: measured(of, sets[IN_DISTRIBUTION][1]) for key, of in logits.items()}
    claims = verdicts(figures, args.width)
    print("\n".join([*(row(key, of) for key, of in figures.items()), *claims]))
    result = {
        "settings": {"epochs": args.epochs, "width": args.width, "members": MEMBERS, **asdict(MaskRecipe())},
        "masks": {"diversity": round(actual.diversity, 4), "kept": actual.kept()},
        "ours": figures,
        "findings": claims,
    }
    if args.write:
        command = "python experiments/implicit_ensembles/masks.py --data DIR --mlps DIR --write"
        EXPECTED.write_text(json.dumps({"command": command, "published": PUBLISHED} | result, indent=1) + "\n")
        draw(logits)
    print(json.dumps(result))


def measured(logits: dict[str, Tensor], label: Tensor) -> dict[str, Any]:
    """Figures of one ensemble, from logits (m, n, c) of each set; one model alone has no mutual information."""
    parts = {name: decompose(z.softmax(-1)) for name, z in logits.items()}
    scores = {"entropy": {name: part.total for name, part in parts.items()}}
    if len(logits[IN_DISTRIBUTION]) > 1:
        scores["mutual information"] = {name: part.epistemic for name, part in parts.items()}
    z = logits[IN_DISTRIBUTION]
    right = [float((answer == label).double().mean()) for answer in z.argmax(-1)]
    return {
        "accuracy": {
            "ensemble": round(float((z.softmax(-1).mean(0).argmax(1) == label).double().mean()), 4),
            "members": round(sum(right) / len(right), 4),
            "lowest_member": round(min(right), 4),
        },
        "mean": {key: {name: round(float(u.mean()), 5) for name, u in of.items()} for key, of in scores.items()},
        "auroc": {key: round(apart(of[IN_DISTRIBUTION], of[OOD]), 4) for key, of in scores.items()},
        "mean_difference": {
            key: round(float(of[OOD].mean() - of[IN_DISTRIBUTION].mean()), 4) for key, of in scores.items()
        },
    }


def verdicts(figures: dict[str, Any], width: int) -> list[str]:
    """The paper's claims, by our numbers."""
    wide, extracted, single = figures[f"explicit x{width}"], figures["extracted"], figures["single"]
    by_mi = "mutual information"
    recovered = {name: extracted["mean"][by_mi][name] / wide["mean"][by_mi][name] for name in extracted["mean"][by_mi]}
    return [
        "mean mutual information, extracted over explicit of the same width: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in recovered.items()),
        f"AUROC by mutual information: extracted {extracted['auroc'][by_mi]}, explicit x{NARROW} "
        f"{figures[f'explicit x{NARROW}']['auroc'][by_mi]}, explicit x{width} {wide['auroc'][by_mi]}",
        f"mean entropy difference: extracted {extracted['mean_difference']['entropy']}, single "
        f"{single['mean_difference']['entropy']}",
        f"AUROC by entropy: extracted {extracted['auroc']['entropy']}, single {single['auroc']['entropy']}",
    ]


def row(key: str, figures: dict[str, Any]) -> str:
    """One ensemble in one line."""
    means = "; ".join(
        f"mean {score} " + ", ".join(f"{name} {value:.4f}" for name, value in of.items())
        for score, of in figures["mean"].items()
    )
    return f"{key}: accuracy {figures['accuracy']['ensemble']}; {means}; AUROC {figures['auroc']}"


def draw(logits: dict[str, dict[str, Tensor]]) -> None:
    """Fig. 4 (a): how mutual information is distributed, the extracted ensemble dashed."""
    figure = Figure(figsize=(4 * len(SETS), 3.4), layout="constrained")
    axes = figure.subplots(1, len(SETS), sharey=True)
    for ax, name in zip(axes, SETS, strict=True):
        for key, of in logits.items():
            if key == "single":
                continue
            ordered = decompose(of[name].softmax(-1)).epistemic.sort().values.clamp_min(1e-6)
            share = torch.arange(1, len(ordered) + 1) / len(ordered)
            ax.semilogx(ordered, share, linestyle="--" if key == "extracted" else "-", label=key)
        ax.set(title=name, xlabel="mutual information (nats)")
    axes[0].set_ylabel("share of images below")
    axes[0].legend(fontsize=8)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
