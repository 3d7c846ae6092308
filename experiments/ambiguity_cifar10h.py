"""Does an aleatoric score flag the images that people disagree about? CIFAR-10H's first 5,000 test images.

    python experiments/ambiguity_cifar10h.py --data DIR --more-data DIR [--cache DIR] [--write]

The first DIR holds cifar10_resnets/ (resnet20.pt, resnet56.pt) and cifar10h/ (cifar10h-counts-first5000.npy: how many
of about fifty people chose each class), the other cifar10.npz. Columns are kept in CACHE/resnet20 and CACHE/resnet56.
Whatever learns does so from the other 5,000 test images, of which no votes are used.

    scores    head_given     an uncertainty head, trained on the losses of the labels
              head_expected  the same, on the losses that the model itself expects
              members        expected entropy of ResNet-20 and ResNet-56 together
              entropy, max_probability of ResNet-20 itself
    figures   Spearman with the entropy of people's votes; AUROC for images with more than 0.5 nat; and the mean entropy
              of people's votes on as many images as there are of those, the most ambiguous by each score
    guard     `Guard.fit` on the other 5,000: images refused as "ambiguous between A and B": how many, people's entropy
              on them and on the others; on how many of them people differ at all, and how often their two most
              frequent classes are A and B then

The last line is one JSON object; --write puts it into expected/ambiguity_cifar10h.json, too.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _expected import write_expected
from _resnet_cifar import resnet

import dubito
from dubito.guard import Guard
from dubito.protocols.human_ambiguity import human_ambiguity, vote_entropy
from dubito.table import Table
from dubito.table.views import chosen_rows, ensemble

EXPECTED = Path(__file__).parent / "expected" / "ambiguity_cifar10h.json"
DEPTHS = (20, 56)
VOTED = 5000
AMBIGUOUS = 0.5
RECIPE = {"rows": 100_000, "batch": 256}


def main() -> None:
    """Extract, learn, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    counts = np.load(args.data / "cifar10h" / "cifar10h-counts-first5000.npy").astype(np.float64)
    with tempfile.TemporaryDirectory() as place:
        tables = [extracted(depth, args.data, args.more_data, args.cache or Path(place)) for depth in DEPTHS]
        result = studied(tables, counts)
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def studied(tables: list[Table], counts: np.ndarray) -> dict[str, Any]:
    """All figures."""
    voted, rest = torch.arange(VOTED), torch.arange(VOTED, len(tables[0]))
    voted_table, other = chosen_rows(tables[0], voted).rows(slice(0, VOTED)), chosen_rows(tables[0], rest)
    both = ensemble([chosen_rows(table, voted) for table in tables])
    people = vote_entropy(counts)
    scores = {
        "head_given": dubito.UncertaintyHead(recipe=dubito.heads.Recipe(**RECIPE)).fit(other).score(voted_table),
        "head_expected": dubito.UncertaintyHead(recipe=dubito.heads.Recipe(target="expected", **RECIPE))
        .fit(other)
        .score(voted_table),
        "members": dubito.scores.ExpectedEntropy().score(both),
    }
    result = human_ambiguity(scores, voted_table, ambiguous=people > AMBIGUOUS, degree=people)
    print(result)
    several = int((people > AMBIGUOUS).sum())
    ordered = scores | {
        "entropy": dubito.Entropy().score(voted_table),
        "max_probability": dubito.MaxProbability().score(voted_table),
    }
    return {
        "images": VOTED,
        "ambiguous_to_people": several,
        "mean_entropy_of_votes": round(float(people.mean()), 4),
        "auroc": {name: rounded(value._asdict()) for name, value in result.auroc.items()},
        "spearman": {name: rounded(value._asdict()) for name, value in result.spearman.items()},
        "entropy_of_votes_on_flagged": {
            name: round(float(people[u.argsort(descending=True)[:several]].mean()), 4) for name, u in ordered.items()
        },
        "guard": guarded(other, voted_table, counts, people),
    }


def guarded(other: Table, voted_table: Table, counts: np.ndarray, people: torch.Tensor) -> dict[str, Any]:
    """What a guard calls ambiguous."""
    guard = Guard.fit(None, other, risk=0.02)
    print(guard)
    decisions = guard.decide(voted_table)
    called_ambiguous = torch.tensor([verdict.reason.startswith("ambiguous between") for verdict in decisions])
    pairs = np.sort(decisions.predicted.numpy(), axis=1)
    votes = np.sort(np.argsort(-counts, axis=1, kind="stable")[:, :2], axis=1)
    same = (pairs == votes).all(1)
    divided = called_ambiguous.numpy() & ((counts > 0).sum(1) > 1)  # where all people agree, there is no second class
    wrong = voted_table.logit.argmax(1) != voted_table.label
    return {
        "uncertainty": guard.selection.combination.weights,
        "accepted": round(decisions.coverage, 4),
        "error_of_accepted": round(float(wrong[decisions.accept].double().mean()), 4),
        "called_ambiguous": int(called_ambiguous.sum()),
        "entropy_of_votes_on_them": round(float(people[called_ambiguous].mean()), 4),
        "entropy_of_votes_on_others": round(float(people[~called_ambiguous].mean()), 4),
        "called_ambiguous_and_people_differ": int(divided.sum()),
        "same_two_classes_as_people": round(float(same[divided].mean()), 4),
    }


def extracted(depth: int, data: Path, more_data: Path | None, cache: Path) -> Table:
    """ResNet-N on the 10,000 test images, extracted if that is not there yet."""
    place = cache / f"resnet{depth}"
    if (place / "manifest.json").is_file():
        return dubito.open(place)
    if more_data is None:
        raise SystemExit(f"'{place}' is not there: give --more-data DIR to extract it.")
    small = dubito.Preprocess(size=(32, 32), resize=(32, 32))
    model = dubito.wrap(resnet(depth, data / "cifar10_resnets"), transform=small, classes=10, name=f"resnet{depth}")
    return dubito.extract(model, f"{more_data / 'cifar10.npz'}#test", place, label_space="model")


def rounded(values: dict[str, float]) -> dict[str, float]:
    """To four digits."""
    return {name: round(float(value), 4) for name, value in values.items()}


if __name__ == "__main__":
    main()
