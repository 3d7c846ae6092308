"""Do people and the head doubt the same photographs? Fig. 7 and 6 of Kirchhof et al. (2024), and learning curves.

    python experiments/human_ambiguity.py --data DIR [--cache DIR] [--seeds 1 2 3] [--figure FILE] [--write]

DIR holds imagenet_val_dev2000/ (images256.zip, labels.csv with ReaL label sets, rater_votes.csv) and, for the mixture
with small photographs, tiny_imagenet_train_25k/ (images.zip, labels.csv). Photographs are scored by heads that never
saw them nor their labels: those of one half by a head trained on the other half, clean and in eight augmented epochs. A
quarter of the augmented rows gets a grey box: without it, u falls again when a box covers nearly everything.

    targets   AUROC of u for ReaL-ambiguous photographs and Spearman with the votes, for heads trained on the losses of
              given labels, on the losses that the model expects by itself, and on both; beside max-probability and
              entropy, which need the classifier, and the paper's 0.701
    curve     the same AUROC over the number of photographs that were learned from
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
from rich.progress import track

import dubito
from dubito.apps.ambiguity import Ambiguity, ambiguous_images, vote_degree
from dubito.apps.transfer import median_and_spread
from dubito.data import Subset
from dubito.data.annotations import read_label_sets, read_votes
from dubito.metrics import auroc
from dubito.views import chosen_rows

PUBLISHED = 0.701
EPOCHS, AUGMENT = 8, dubito.Augment(strong="box", strong_share=0.25)
RECIPE = {"dropout": 0.8, "batch": 2048, "rows": 150_000}
"""Dropout and few rows, because a thousand photographs are learned by heart otherwise."""
TARGETS = ("given", "expected", "mixed")
TINY = "tiny_imagenet_train_25k"
CURVE = (125, 250, 500, 1000, 1800)
LADDER_PHOTOS = 200


def main() -> None:
    """Extract, train, compare."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--cache", type=Path, help="keep the extracted columns here")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--figure", type=Path, help="draw the learning curve (needs matplotlib)")
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = study(asked.data, asked.cache or Path(place), asked.seeds)
    if asked.figure:
        draw(found["curve"], asked.figure)
    if asked.write:
        target = Path(__file__).parent / "expected" / "human_ambiguity.json"
        command = "python experiments/human_ambiguity.py --data DIR --write"
        target.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")
    print(json.dumps(found))


def study(data: Path, cache: Path, seeds: list[int]) -> dict:
    """All three parts."""
    photos = data / "imagenet_val_dev2000"
    model = dubito.load("pypi:efficientnet_lite0")
    images = dubito.open_images(photos / "images256.zip", labels=photos / "labels.csv")
    clean = dubito.extract(model, images, cache / "clean")
    augmented = dubito.extract(model, images, cache / "augmented", epochs=EPOCHS, augment=AUGMENT)
    sets = read_label_sets(photos / "labels.csv")
    tiny = dubito.extract(model, data / TINY / "images.zip", cache / "tiny", labels=data / TINY / "labels.csv")
    order = torch.randperm(len(clean), generator=torch.Generator().manual_seed(0))
    halves = order.chunk(2)
    result = {"photographs": len(clean), "published": {"auroc": PUBLISHED}}

    jobs = [(target, seed) for target in TARGETS for seed in seeds]
    doubts = {}
    for target, seed in track(jobs, description="targets"):
        doubts[f"{target} {seed}"] = cross_fitted(
            clean, augmented, halves, dubito.Recipe(target=target, **RECIPE), seed
        )
    degree = vote_degree(read_votes(photos / "rater_votes.csv"))
    found = dubito.ambiguity(doubts, clean, ambiguous=ambiguous_images(sets), degree=degree)
    print(found)
    result["scores"] = found.to_json()
    result["baselines"] = {name: found.auroc[name].value for name in ("max_probability", "entropy")}
    result["targets"] = {target: over_seeds(found, target, seeds) for target in TARGETS}

    ambiguous = torch.tensor([len(sets[str(int(Path(name).stem))]) != 1 for name in clean.id])
    result["curve"] = [
        {"photographs": size, **point(clean, augmented, order, size, dubito.Recipe(**RECIPE), seeds, ambiguous)}
        for size in track(CURVE, description="curve")
    ]
    result["at_1000"] = {
        "the paper's recipe": point(clean, augmented, order, 1000, dubito.Recipe(), seeds[:1], ambiguous),
        "clean photographs only": point(clean, None, order, 1000, dubito.Recipe(**RECIPE), seeds, ambiguous),
        "with Tiny-ImageNet": point(clean, augmented, order, 1000, dubito.Recipe(**RECIPE), seeds, ambiguous, tiny),
    }
    head = trained(corpus(clean, augmented, halves[0]), dubito.Recipe(target="mixed", **RECIPE), 1)
    some = Subset(images, halves[1][:LADDER_PHOTOS].tolist())
    steps = dubito.ladder(model, some, {"head": head, "entropy": dubito.Entropy()}, cache / "ladder")
    print(steps)
    result["ladder"] = steps.to_json()
    return result


def trained(table: dubito.Table, recipe: dubito.Recipe, seed: int) -> dubito.UncertaintyHead:
    """A head, and the temperature with it, from these rows alone."""
    if recipe.target != "given":
        recipe = replace(recipe, temperature=dubito.Temperature().fit(table).temperature_)
    return dubito.UncertaintyHead(seed=seed, recipe=recipe).fit(table)


def corpus(clean: dubito.Table, augmented: dubito.Table | None, photos: torch.Tensor) -> dubito.Table:
    """The rows of some photographs, clean and augmented."""
    if augmented is None:
        return chosen_rows(clean, photos)
    rows = torch.isin(augmented.whole("photo"), photos).nonzero()[:, 0]
    return dubito.joined(chosen_rows(clean, photos), chosen_rows(augmented, rows))


def cross_fitted(
    clean: dubito.Table, augmented: dubito.Table, parts: tuple[torch.Tensor, ...], recipe: dubito.Recipe, seed: int
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
    recipe: dubito.Recipe,
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
            head = trained(table if more is None else dubito.joined(table, more), recipe, seed)
            values.append(auroc(head.score(chosen_rows(clean, scored)), ambiguous[scored]))
    median, distance = median_and_spread(values)
    return {"auroc": median, "distance": distance}


def over_seeds(found: Ambiguity, target: str, seeds: list[int]) -> dict[str, float]:
    """Median and distance of a target's AUROC and correlation."""
    result = {}
    for name, values in (("auroc", found.auroc), ("spearman", found.spearman)):
        median, distance = median_and_spread([values[f"{target} {seed}"].value for seed in seeds])
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
    axes.legend()
    figure.savefig(to, dpi=150)


if __name__ == "__main__":
    main()
