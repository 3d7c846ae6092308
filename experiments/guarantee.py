"""Is the guard's guarantee kept, and what does it cost? 500 draws of real scores, for three risks.

    python experiments/guarantee.py --data DIR --more-data DIR [--cache DIR] [--draws 500] [--write]

The first DIR holds cifar10_resnets/ (resnet20.pt) and imagenet_val_dev2000/ (images256.zip, labels.csv), the other
cifar10.npz. Columns are kept in CACHE/cifar10 (ResNet-20 on CIFAR-10's 10,000 test images) and CACHE/imagenet
(EfficientNet-Lite0 on 2,000 photographs of ImageNet's validation set); what is there already is taken as it is.

The guarantee is about the error rate R(t) of accepted images in the population, which real data never shows. Here the
images of the table *are* the population: every draw takes as many images from it, with replacement, splits them into
selection (a fifth) and calibration as `Guard.fit` does, finds a threshold, and looks up R(t) on the whole table, where
it is known exactly. `exceeded` is the share of draws with R(t) > risk: it must be at most 5 %, up to Monte Carlo error.

    coverage     of the population, on average over draws; draws without any threshold count as 0
    relative     beside the best threshold in hindsight: the largest coverage whose R(t) <= risk, known by nobody
    none         the share of draws in which no threshold could be guaranteed: `Guard.fit` raises then
    most         what the same exact test reaches at the best single fixed threshold, if an oracle named it beforehand,
                 and all images were used: coverage times the chance to pass
    possible     a bound on the coverage of every procedure that keeps the guarantee whatever the images are: `possible`

Procedures: fallback testing with exact binomial tails (ours), Bonferroni over the same candidates, fallback with
Hoeffding-Bentkus tails, and "naive": the largest threshold whose own error rate is at most `risk`, which guarantees
nothing. Of ImageNet's scores, larger draws (10 and 100 times as many images, with replacement) show what the number of
images costs.

`splits` are random halves without replacement instead: a guard fitted on one half, its accepted error counted on the
other. The error rate seen on a finite half scatters around R(t), so it lies above `risk` more often than R(t) does; the
figures of `exceeded` there are for completeness, and no test of the guarantee.

The last line is one JSON object; --write puts it into expected/guarantee.json, too.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _expected import write_expected
from _resnet_cifar import resnet
from rich.progress import track
from scipy.stats import binom

import dubito
from dubito.errors import GuardError
from dubito.guard.thresholds import risk_threshold
from dubito.table import Table

EXPECTED = Path(__file__).parent / "expected" / "guarantee.json"
RISKS = (0.01, 0.05, 0.1)
CONFIDENCE = 0.95
SELECTION = 0.2
PROCEDURES: dict[str, dict[str, Any]] = {
    "fallback": {},
    "bonferroni": {"testing": "bonferroni"},
    "hoeffding_bentkus": {"p_value": "hoeffding_bentkus"},
}
SCORES = {"cifar10": "max_probability", "imagenet": "max_probability"}


def main() -> None:
    """Draw, test, look up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        cache = args.cache or Path(place)
        tables = {name: table_of(name, args.data, args.more_data, cache) for name in SCORES}
        populations = {name: Population(table, SCORES[name]) for name, table in tables.items()}
    result: dict[str, Any] = {"draws": args.draws, "confidence": CONFIDENCE, "populations": {}}
    for name, population in populations.items():
        result["populations"][name] = {
            "images": len(population),
            "score": SCORES[name],
            "error": round(float(population.wrong.mean()), 4),
            "risks": {str(risk): study(population, risk, args.draws) for risk in RISKS},
        }
    print(tell(result))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


class Population:
    """Real scores, whose error rate at every threshold is known."""

    def __init__(self, table: Table, score: str) -> None:
        self.u = dubito.scores.make_score(score).score(table).numpy()
        self.wrong = (table.logit.argmax(1) != table.label).numpy()
        order = np.argsort(self.u, kind="stable")
        self.sorted = self.u[order]
        self.errors = np.append(0, np.cumsum(self.wrong[order]))

    def __len__(self) -> int:
        return len(self.u)

    def at(self, threshold: float) -> tuple[float, float]:
        """Coverage, and the error rate of what is accepted."""
        k = int(np.searchsorted(self.sorted, threshold, side="right"))
        return k / len(self), float(self.errors[k] / max(1, k))

    def best(self, risk: float) -> float:
        """The largest coverage that keeps the risk, in hindsight."""
        k = np.arange(1, len(self) + 1)
        return float(k[self.errors[1:] / k <= risk].max(initial=0) / len(self))

    def most(self, risk: float, n: int) -> float:
        """Coverage times chance to pass, of the best fixed threshold, with n calibration images."""
        share = np.arange(1, len(self) + 1) / len(self)
        k = np.rint(share * n).astype(int)
        delta = 1 - CONFIDENCE
        c = binom.ppf(delta, k, risk)
        c = np.where(binom.cdf(c, k, risk) <= delta, c, c - 1)
        return float((share * binom.cdf(c, k, self.errors[1:] / np.arange(1, len(self) + 1))).max())


def study(population: Population, risk: float, draws: int) -> dict[str, Any]:
    """All procedures at one risk."""
    n, best = len(population), population.best(risk)
    result: dict[str, Any] = {
        "best": round(best, 4),
        "most": round(population.most(risk, n), 4),
        "possible": round(possible(population, risk, n), 4),
    }
    for name, settings in PROCEDURES.items():
        result[name] = summed(population, risk, [drawn(population, risk, n, seed, settings) for seed in range(draws)])
    result["naive"] = summed(population, risk, [naive(population, risk, n, seed) for seed in range(draws)])
    for name, times in (("ten_times", 10), ("hundred_times", 100)) if n < 5000 else ():
        large = [drawn(population, risk, times * n, seed, {}) for seed in track(range(draws), f"{times} times as many")]
        result[name] = summed(population, risk, large)
    result["splits"] = halves(population, risk, draws)
    return result


def possible(population: Population, risk: float, n: int) -> float:
    """No procedure that keeps the guarantee for all images, on n of them, has a larger expected coverage here.

    Take a threshold t with k of N images and the rate R(t) < r below it, such that what any larger threshold adds is
    wrong at least at rate r. Weigh wrong images below t by r / R(t) and right ones by (1 - r) / (1 - R(t)): there, the
    rate is r at t and at least r above, so the procedure may answer t or more with probability delta at most. It then
    tests the one population against the other, and Neyman and Pearson bound how often it answers t or more here, by the
    most powerful test, q(t). Above the best threshold, q <= delta by the guarantee; below the first such t, q <= 1.
    The expected coverage is the sum of q over coverages.
    """
    k = np.arange(1, len(population) + 1)
    excess = population.errors[1:] - risk * k
    apt = k[(excess <= np.minimum.accumulate(excess[::-1])[::-1]) & (excess < 0)]
    if not len(apt):
        return 1.0
    apt = apt[np.unique(np.linspace(0, len(apt) - 1, 60).round().astype(int))]
    q = [most_powerful(n, one / len(population), population.errors[one] / one, risk) for one in track(apt, "possible")]
    edges = np.append(apt / len(population), population.best(risk))
    within = edges[0] + float(np.sum(np.minimum.accumulate(q) * np.diff(edges)))
    return within + (1 - CONFIDENCE) * (1 - population.best(risk))


def most_powerful(n: int, share: float, rate: float, risk: float) -> float:
    """How often the best test of level delta, with k ~ Bin(n, share) accepted, tells `rate` of errors from `risk`."""
    k = np.arange(binom.ppf(1e-9, n, share), binom.ppf(1 - 1e-9, n, share) + 1)[:, None]
    e = np.arange(binom.ppf(1e-9, k[0, 0], rate), binom.ppf(1 - 1e-9, k[-1, 0], risk) + 1)
    of_k = binom.pmf(k, n, share)
    here, there = (of_k * binom.pmf(e, k, one) for one in (rate, risk))
    order = np.argsort((there / np.maximum(here, 1e-300)).ravel())
    level, power = np.cumsum(there.ravel()[order]), np.cumsum(here.ravel()[order])
    return float(np.interp(1 - CONFIDENCE, np.append(0, level), np.append(0, power))) + 4e-9


def drawn(population: Population, risk: float, n: int, seed: int, settings: dict[str, Any]) -> float:
    """The threshold of one draw with replacement; minus infinity where there is none."""
    rows = np.random.default_rng(seed).integers(0, len(population), n)
    return fitted(population, rows, risk, settings)


def fitted(population: Population, rows: np.ndarray, risk: float, settings: dict[str, Any]) -> float:
    """Selection from the first fifth of the rows, calibration on the others."""
    cut = int(SELECTION * len(rows))
    parts = [(population.u[some], population.wrong[some]) for some in (rows[:cut], rows[cut:])]
    try:
        return risk_threshold(parts[0], parts[1], risk=risk, confidence=CONFIDENCE, **settings).value
    except GuardError:
        return -np.inf


def naive(population: Population, risk: float, n: int, seed: int) -> float:
    """The largest threshold that looks right on the draw itself."""
    rows = np.random.default_rng(seed).integers(0, len(population), n)
    order = rows[np.argsort(population.u[rows], kind="stable")]
    rate = np.cumsum(population.wrong[order]) / np.arange(1, n + 1)
    fine = np.nonzero(rate <= risk)[0]
    return float(population.u[order[fine[-1]]]) if len(fine) else -np.inf


def summed(population: Population, risk: float, thresholds: list[float]) -> dict[str, float]:
    """How often the guarantee was broken, and how much was accepted."""
    looked = np.array([population.at(t) for t in thresholds])
    best = population.best(risk)
    return {
        "exceeded": round(float((looked[:, 1] > risk).mean()), 4),
        "coverage": round(float(looked[:, 0].mean()), 4),
        "relative": round(float(looked[:, 0].mean() / best), 4) if best else None,
        "none": round(float((looked[:, 0] == 0).mean()), 4),
    }


def halves(population: Population, risk: float, draws: int) -> dict[str, float]:
    """Guards on random halves, their accepted error on the other half."""
    seen, n = [], len(population) // 2
    for seed in range(draws):
        order = np.random.default_rng(seed).permutation(len(population))
        t = fitted(population, order[:n], risk, {})
        accepted = order[n:][population.u[order[n:]] <= t]
        error = population.wrong[accepted].mean() if len(accepted) else 0.0
        seen.append((len(accepted) / len(order[n:]), error, population.at(t)[1]))
    cover, error, true = np.array(seen).T
    return {
        "coverage": round(float(cover.mean()), 4),
        "exceeded": round(float((error > risk).mean()), 4),
        "exceeded_in_population": round(float((true > risk).mean()), 4),
    }


def table_of(name: str, data: Path | None, more_data: Path | None, cache: Path) -> Table:
    """The table of a population, extracted if it is not there yet."""
    if (cache / name / "manifest.json").is_file():
        return dubito.open(cache / name)
    if data is None or more_data is None:
        raise SystemExit(f"'{cache / name}' is not there: give --data DIR and --more-data DIR to extract it.")
    if name == "imagenet":
        photos = data / "imagenet_val_dev2000"
        model = dubito.load("pypi:efficientnet_lite0")
        return dubito.extract(model, photos / "images256.zip", cache / name, labels=photos / "labels.csv")
    small = dubito.Preprocess(size=(32, 32), resize=(32, 32))
    model = dubito.wrap(resnet(20, data / "cifar10_resnets"), transform=small, classes=10, name="resnet20")
    return dubito.extract(model, f"{more_data / 'cifar10.npz'}#test", cache / name, label_space="model")


def tell(result: dict[str, Any]) -> str:
    """A line for each procedure."""
    lines = ["population  risk  best   procedure           exceeded  coverage  relative  none"]
    for name, population in result["populations"].items():
        for risk, row in population["risks"].items():
            for key, one in row.items():
                if isinstance(one, dict) and "none" in one:
                    relative = "-" if one["relative"] is None else f"{one['relative']:.3f}"
                    lines.append(
                        f"{name:10}  {risk:4}  {row['best']:.3f}  {key:18}  {one['exceeded']:8.3f}  "
                        f"{one['coverage']:8.3f}  {relative:>8}  {one['none']:.3f}"
                    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
