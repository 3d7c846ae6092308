"""What does it cost a guard to choose its score on few images? Three rules, real scores, tables of several sizes.

    python experiments/guard_choice.py --data DIR --more-data DIR [--cache DIR] [--draws 100] [--write]

Data and caches are those of `guarantee.py`. Scores that learn do so from a fifth of the images, at most 1,000; every
draw takes a table from the others, without replacement, cuts it into reference images (10 %) and calibration images,
chooses by a rule on the first, and finds a threshold for the risk on the second, as `Guard.fit` does without its gate.

    plain          max-probability, whatever the images say
    first          max-probability at the best temperature, whatever the images say
    clearly_better ours: the latter, unless another is better beyond noise; sums of ranks likewise
    best_looking   the score with the lowest AURC on the reference images, as many do

`coverage` is that of the calibration images, on average over draws, 0 where no threshold keeps the guarantee (`none`,
the share of such draws); `left` is the share of draws in which another score, or a sum, took the place of the first.

The last line is one JSON object; --write puts it into expected/guard_choice.json, too.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _expected import write_expected
from guarantee import CONFIDENCE, REFERENCE, table_of
from rich.progress import track

from dubito.errors import GuardError
from dubito.guard.combination import Combination, Values, choose, quantiles
from dubito.guard.selection import fitted_scores
from dubito.guard.thresholds import risk_threshold
from dubito.metrics import aurc
from dubito.table import Table

EXPECTED = Path(__file__).parent / "expected" / "guard_choice.json"
SIZES = (500, 1000, 1600, 4000)
RISKS = {"cifar10": (0.02, 0.05), "imagenet": (0.05, 0.1)}
LEARN, MOST_LEARNED = 0.2, 1000
FIRST = "temperature"

Rule = Callable[[Values, np.ndarray, int], Combination]
RULES: dict[str, Rule] = {
    "plain": lambda *_: Combination({"max_probability": 1.0}, {}),
    "first": lambda *_: Combination({FIRST: 1.0}, {}),
    "clearly_better": choose,
    "best_looking": lambda values, wrong, _: Combination({best_looking(values, wrong): 1.0}, {}),
}


def main() -> None:
    """Choose, test, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    result: dict[str, Any] = {"draws": args.draws, "confidence": CONFIDENCE, "sets": {}}
    with tempfile.TemporaryDirectory() as place:
        for name, risks in RISKS.items():
            values, wrong = scored(table_of(name, args.data, args.more_data, args.cache or Path(place)))
            result["sets"][name] = {
                str(n): {str(risk): study(values, wrong, n, risk, args.draws) for risk in risks}
                for n in SIZES
                if n <= len(wrong)
            }
    print(tell(result))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def scored(table: Table) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All scores that may compete, and which answers are wrong, of the images that nothing has learned from."""
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    cut = min(MOST_LEARNED, int(LEARN * len(table)))
    learn, rest = table.rows(order[:cut].sort().values), table.rows(order[cut:].sort().values)
    scores, competing = fitted_scores(None, learn)
    values = {name: scores[name].score(rest).numpy() for name in competing}
    return values, (rest.logit.argmax(1) != rest.label).numpy()


def study(values: dict[str, np.ndarray], wrong: np.ndarray, n: int, risk: float, draws: int) -> dict[str, Any]:
    """All rules at one size and one risk."""
    result = {}
    for name, rule in RULES.items():
        drawn = [one(values, wrong, n, risk, rule, seed) for seed in track(range(draws), f"{n} images, {name}")]
        coverage, left = np.array(drawn).T
        result[name] = {
            "coverage": round(float(coverage.mean()), 4),
            "none": round(float((coverage == 0).mean()), 4),
            "left": round(float(left.mean()), 4),
        }
    return result


def one(
    values: dict[str, np.ndarray], wrong: np.ndarray, n: int, risk: float, rule: Rule, seed: int
) -> tuple[float, bool]:
    """The coverage of one guard, and whether it left the first score."""
    rows = np.random.default_rng(seed).permutation(len(wrong))[:n]
    reference, calibrate = rows[: round(REFERENCE * n)], rows[round(REFERENCE * n) :]
    known = {name: u[reference] for name, u in values.items()}
    chosen = rule(known, wrong[reference], seed)
    ranked = {name: quantiles(torch.from_numpy(known[name]), name) for name in chosen.weights}
    u = chosen.of({name: torch.from_numpy(values[name][calibrate]) for name in ranked}, ranked).numpy()
    left = list(chosen.weights) != [FIRST]
    try:
        result = risk_threshold(u, wrong[calibrate], risk=risk, confidence=CONFIDENCE)
    except GuardError:
        return 0.0, left
    return result.accepted / result.of, left


def best_looking(values: Values, wrong: np.ndarray) -> str:
    """The score with the lowest AURC on these images."""
    return min(values, key=lambda name: aurc(values[name], wrong))


def tell(result: dict[str, Any]) -> str:
    """A line for each size and risk."""
    lines = [f"{'set':10}{'images':>7}{'risk':>6}  " + "".join(f"{rule:>24}" for rule in RULES)]
    for name, sizes in result["sets"].items():
        for n, risks in sizes.items():
            for risk, rules in risks.items():
                cells = (f"{row['coverage']:.3f}, none {row['none']:.2f}" for row in rules.values())
                lines.append(f"{name:10}{n:>7}{risk:>6}  " + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
