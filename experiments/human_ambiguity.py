"""Do people and the head doubt the same photographs? Fig. 7 and 6 of Kirchhof et al. (2024), and learning curves.

    python experiments/human_ambiguity.py --data DIR [--cache DIR] [--seeds 1 2 3] [--figure FILE] [--write]

DIR holds imagenet_val_dev2000/ (images256.zip, labels.csv with ReaL label sets, rater_votes.csv) and, for the mixture
with small photographs, tiny_imagenet_train_25k/ (images.zip, labels.csv). Photographs are scored by heads that never
saw them nor their labels: those of one half by a head trained on the other half, clean and in thirteen augmented
epochs. Some of these are blurred, noisy or mostly covered: without them, u falls again at single steps of the ladder,
for instance where a box leaves nothing to see. Heads have one hidden layer that starts at the classifier's classes.

The idea of this start and its first settings were seen on both halves of the photographs; the final ones (threshold,
dropout, learning rate, margin) were settled by the AUROC on the first half, for heads trained on the second, and the
augmented epochs also by the ladder itself. `halves` gives both halves: the second is the cleaner one, not untouched.

    targets   AUROC of u for ReaL-ambiguous photographs and Spearman with the votes, for heads trained on the losses of
              given labels, on the losses that the model expects by itself, and on both; beside max-probability and
              entropy, which need the classifier, and the paper's 0.701. People were asked about half of the
              photographs, the hard ones; a second correlation counts the others as unambiguous
    without   the same with all photographs among those learned from, but no label: how far a head gets that knows the
    labels    pictures that it scores
    curve     the same AUROC over the number of photographs that were learned from
    at_1000   other corpora and heads that start at random, learned from 1,000 photographs
    ladder    median u of photographs made worse step by step

Figures are medians over seeds with the distance to the farther extreme; intervals are bootstrap intervals of the first
seed. The last line is one JSON object; --write puts it into expected/human_ambiguity.json, too.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _expected import write_expected
from rich.progress import track

import dubito
from dubito.data import Subset
from dubito.data.corruptions import Corrupted
from dubito.data.labels import read_label_sets, read_votes
from dubito.metrics import auroc, median_spread
from dubito.protocols.human_ambiguity import HumanAmbiguity, ambiguous_images, vote_degree
from dubito.table.views import chosen_rows
from dubito.types import Classifier, Images

EXPECTED = Path(__file__).parent / "expected" / "human_ambiguity.json"
PUBLISHED = 0.701
PHOTOS = "imagenet_val_dev2000"
MILD = (0.5, 1.0)
AUGMENTS = {
    "mild": (8, dubito.Augment(scale=MILD)),
    "blur": (2, dubito.Augment(scale=MILD, strong="blur", seed=1)),
    "noise": (2, dubito.Augment(scale=MILD, strong="noise", seed=1)),
    "covered": (1, dubito.Augment(scale=MILD, seed=2)),
}
"""By cache: how many epochs, and how. Those of `covered` are of photographs with the largest grey box."""
RECIPE = {"init": "classes", "dropout": 0.6, "lr": 4e-4, "margin": 0.5, "batch": 1024, "rows": 400_000}
SIZE = {"width": 740, "depth": 1}
"""As wide as fits into two megabytes."""
RANDOM = {"dropout": 0.5, "batch": 2048, "rows": 150_000}
"""For the paper's two layers of 512. Few rows, because a thousand photographs are learned by heart otherwise."""
TARGETS = ("observed", "expected", "mixed")
BEST = "mixed"
TINY = "tiny_imagenet_train_25k"
CURVE = (125, 250, 500, 1000, 1800)


def main() -> None:
    """Extract, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--figure", type=Path, help="draw the learning curve (needs matplotlib)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = study(args.data, args.cache or Path(place), args.seeds)
    if args.figure:
        draw(result["curve"], args.figure)
    if args.write:
        write_expected(EXPECTED, "--data DIR", result)
    print(json.dumps(result))


def study(data: Path, cache: Path, seeds: list[int]) -> dict:
    """All three parts."""
    photos = data / PHOTOS
    model = dubito.load("pypi:efficientnet_lite0")
    images = dubito.open_images(photos / "images256.zip", labels=photos / "labels.csv")
    clean = dubito.extract(model, images, cache / "clean")
    augmented = several_epochs(model, images, cache)
    sets = read_label_sets(photos / "labels.csv")
    tiny = dubito.extract(model, data / TINY / "images.zip", cache / "tiny", labels=data / TINY / "labels.csv")
    order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(0))
    halves = order.chunk(2)
    result = {"photographs": len(clean), "published": {"auroc": PUBLISHED}}

    jobs = [(target, seed) for target in TARGETS for seed in seeds]
    uncertainties = {}
    for target, seed in track(jobs, description="targets"):
        uncertainties[f"{target} {seed}"] = cross_fitted(
            clean, augmented, halves, dubito.heads.Recipe(target=target, **RECIPE), seed
        )
    for seed in seeds:
        head = trained(dubito.concat([clean, augmented]), dubito.heads.Recipe(target="expected", **RECIPE), seed)
        uncertainties[f"without labels {seed}"] = head.score(clean)
    result |= compared(uncertainties, clean, photos, seeds)
    result["halves"] = {
        name: one_half(uncertainties, clean, half, photos, seeds)
        for name, half in zip(("chosen_on", "reported"), halves, strict=True)
    }

    ambiguous = torch.tensor([len(sets[str(int(Path(name).stem))]) != 1 for name in clean.id])
    best = dubito.heads.Recipe(target=BEST, **RECIPE)
    result["curve"] = [
        {"photographs": size, **point(clean, augmented, order, size, best, seeds, ambiguous)}
        for size in track(CURVE, description="curve")
    ]
    random = dubito.heads.Recipe(target=BEST, **RANDOM)
    result["at_1000"] = {
        "random start": point(clean, augmented, order, 1000, random, seeds, ambiguous),
        "the paper's recipe": point(clean, augmented, order, 1000, dubito.heads.Recipe(), seeds[:1], ambiguous),
        "clean photographs only": point(clean, None, order, 1000, best, seeds, ambiguous),
        "with Tiny-ImageNet": point(clean, augmented, order, 1000, best, seeds, ambiguous, tiny),
    }
    head = trained(corpus(clean, augmented, halves[0]), best, 1)
    some = Subset(images, halves[1].tolist())
    curves = dubito.protocols.corruption_curve(
        model, some, {"head": head, "entropy": dubito.Entropy()}, cache / "corruption_curve"
    )
    print(curves)
    result["corruption_curve"] = {**curves.to_dict(), "name": PHOTOS}
    return result


def several_epochs(model: Classifier, images: Images, cache: Path) -> dubito.Table:
    """All augmented epochs of all photographs."""
    covered = Corrupted(images, "box", 5, seed=1)
    return dubito.concat(
        [
            dubito.extract(
                model, covered if name == "covered" else images, cache / name, epochs=epochs, augment=augment
            )
            for name, (epochs, augment) in AUGMENTS.items()
        ]
    )


def compared(uncertainties: dict[str, torch.Tensor], clean: dubito.Table, photos: Path, seeds: list[int]) -> dict:
    """All heads and the classifier's own scores against what people said."""
    flags = ambiguous_images(read_label_sets(photos / "labels.csv"))
    degree = vote_degree(read_votes(photos / "rater_votes.csv"))
    result = dubito.protocols.human_ambiguity(uncertainties, clean, ambiguous=flags, degree=degree)
    everyone = dubito.protocols.human_ambiguity(
        uncertainties, clean, degree={name: degree.get(name, 0.0) for name in flags}
    )
    print(result)
    print("photographs that nobody was asked about count as unambiguous:")
    print(everyone)
    kinds = (*TARGETS, "without labels")
    return {
        "scores": {**result.to_dict(), "name": PHOTOS},
        "scores_all_photographs": {**everyone.to_dict(), "name": PHOTOS},
        "baselines": {name: result.auroc[name].value for name in ("max_probability", "entropy")},
        "targets": {kind: over_seeds(result, everyone, kind, seeds) for kind in kinds},
    }


def one_half(
    uncertainties: dict[str, torch.Tensor], clean: dubito.Table, half: torch.Tensor, photos: Path, seeds: list[int]
) -> dict[str, float | list[float]]:
    """The same AUROC among the photographs of one half, with an interval of the first seed."""
    flags = ambiguous_images(read_label_sets(photos / "labels.csv"))
    mine = {f"{BEST} {seed}": uncertainties[f"{BEST} {seed}"][half] for seed in seeds}
    result = dubito.protocols.human_ambiguity(mine, chosen_rows(clean, half), ambiguous=flags)
    median, distance = median_spread([result.auroc[name].value for name in mine])
    first = result.auroc[f"{BEST} {seeds[0]}"]
    own = {name: result.auroc[name].value for name in ("max_probability", "entropy")}
    return {"auroc": median, "distance": distance, "interval": [first.low, first.high], **own}


def trained(table: dubito.Table, recipe: dubito.heads.Recipe, seed: int) -> dubito.UncertaintyHead:
    """A head, and the temperature with it, from these rows alone."""
    if recipe.target != "observed":
        recipe = replace(recipe, temperature=dubito.Temperature().fit(table).temperature_)
    size = SIZE if recipe.init == "classes" else {}
    return dubito.UncertaintyHead(seed=seed, recipe=recipe, **size).fit(table)


def corpus(clean: dubito.Table, augmented: dubito.Table | None, photos: torch.Tensor) -> dubito.Table:
    """The rows of some photographs, clean and augmented."""
    if augmented is None:
        return chosen_rows(clean, photos)
    rows = torch.isin(augmented.whole("image_index"), photos).nonzero()[:, 0]
    return dubito.concat([chosen_rows(clean, photos), chosen_rows(augmented, rows)])


def cross_fitted(
    clean: dubito.Table,
    augmented: dubito.Table,
    parts: tuple[torch.Tensor, ...],
    recipe: dubito.heads.Recipe,
    seed: int,
) -> torch.Tensor:
    """Every part scored by a head trained on the others; as ranks within the part, as each head has its own scale."""
    u = torch.empty(len(clean), dtype=torch.float64)
    for part in parts:
        others = torch.cat([other for other in parts if other is not part])
        head = trained(corpus(clean, augmented, others), recipe, seed)
        u[part] = head.score(chosen_rows(clean, part)).argsort().argsort().double() / len(part)
    return u


def point(
    clean: dubito.Table,
    augmented: dubito.Table | None,
    order: torch.Tensor,
    size: int,
    recipe: dubito.heads.Recipe,
    seeds: list[int],
    ambiguous: torch.Tensor,
    more: dubito.Table | None = None,
) -> dict[str, float]:
    """One point of the curve: photographs of one half learned, the other scored; 1,800 by ten folds."""
    values = []
    for seed in seeds:
        if size > len(order) // 2:
            u = cross_fitted(clean, augmented, order.chunk(len(order) // (len(order) - size)), recipe, seed)
            values.append(auroc(u, ambiguous))
            continue
        for learned, scored in (order.chunk(2), order.chunk(2)[::-1]):
            table = corpus(clean, augmented, learned[:size])
            head = trained(table if more is None else dubito.concat([table, more]), recipe, seed)
            values.append(auroc(head.score(chosen_rows(clean, scored)), ambiguous[scored]))
    median, distance = median_spread(values)
    return {"auroc": median, "distance": distance}


def over_seeds(actual: HumanAmbiguity, everyone: HumanAmbiguity, target: str, seeds: list[int]) -> dict[str, float]:
    """Median and distance of a target's AUROC and correlations."""
    result = {}
    figures = {"auroc": actual.auroc, "spearman": actual.spearman, "spearman_all": everyone.spearman}
    for name, values in figures.items():
        median, distance = median_spread([values[f"{target} {seed}"].value for seed in seeds])
        result |= {name: median, f"{name}_distance": distance}
    return result


def draw(curve: list[dict[str, float]], to: Path) -> None:
    """AUROC over the number of photographs."""
    from matplotlib import pyplot  # noqa: PLC0415 (only for the figure)

    sizes = [point["photographs"] for point in curve]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.errorbar(sizes, [p["auroc"] for p in curve], [p["distance"] for p in curve], marker="o", capsize=3)
    axes.axhline(PUBLISHED, linestyle="--", color="grey", label="published, 13 million photographs")
    axes.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="photographs learned from")
    axes.minorticks_off()
    axes.set(ylabel="AUROC, ReaL-ambiguous photographs")
    axes.legend(loc="lower right")
    figure.savefig(to, dpi=150)


if __name__ == "__main__":
    main()
