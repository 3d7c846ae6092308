"""Is the guard's guarantee kept, and what does it cost? 500 draws of real images, for three risks.

    python experiments/guarantee.py --data DIR --more-data DIR [--cache DIR] [--draws 500] [--write]

The first DIR holds cifar10_resnets/ (resnet20.pt), imagenet_val_dev2000/ (images256.zip, labels.csv) and
imagenetv2_10k/ (images224.zip, labels.csv), the other cifar10.npz. Columns are kept in CACHE/cifar10 (ResNet-20 on
CIFAR-10's 10,000 test images), CACHE/imagenet and CACHE/imagenetv2 (EfficientNet-Lite0 on 2,000 photographs of
ImageNet's validation set, and on the 10,000 of ImageNetV2); what is there already is taken as it is.

The guarantee is about the error rate R(t) of accepted images in the population, which real data never shows. Here the
images of the table *are* the population: every draw takes images from it, with replacement, finds a threshold, and
looks up R(t) on the whole table, where it is known exactly. `exceeded` is the share of draws with R(t) > risk: it must
be at most 5 %, up to Monte Carlo error.

    coverage     of the population, on average over draws; draws without any threshold count as 0
    relative     beside the best threshold of max-probability in hindsight, known by nobody
    none         the share of draws in which no threshold could be guaranteed: `Guard.fit` raises then
    possible     a bound on the coverage of every procedure that keeps the guarantee by max-probability: `possible`

Procedures: "guard" does what `Guard.fit` does with logits alone: a temperature from a tenth of the draw, then the
sequence of tests on the rest. "plain" tests max-probability in the same way on all of the draw. "naive" takes the
largest threshold whose own error rate is at most `risk`, and guarantees nothing. Draws of ten times as many images show
what the number of images costs.

The last line is one JSON object; --write puts it into expected/guarantee.json, too.
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
REFERENCE = 0.1
DRAWN = {"cifar10": 10_000, "imagenet": 2_000, "imagenetv2": 2_000}


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
        populations = {name: Population(table_of(name, args.data, args.more_data, cache)) for name in DRAWN}
    result: dict[str, Any] = {"draws": args.draws, "confidence": CONFIDENCE, "populations": {}}
    for name, population in populations.items():
        result["populations"][name] = {
            "images": len(population),
            "drawn": DRAWN[name],
            "error": round(float(population.wrong.mean()), 4),
            "risks": {str(risk): study(population, risk, DRAWN[name], args.draws) for risk in RISKS},
        }
    print(describe(result))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


class Population:
    """Logits and labels whose error rate at every threshold of every uncertainty is known."""

    def __init__(self, table: Table) -> None:
        self.logit, self.label = table.logit, table.label
        self.wrong = (self.logit.argmax(1) != self.label).numpy()
        self.plain = dubito.MaxProbability().score(table).numpy()
        self.errors = np.append(0, np.cumsum(self.wrong[np.argsort(self.plain, kind="stable")]))

    def __len__(self) -> int:
        return len(self.label)

    def rows(self, chosen: np.ndarray) -> Table:
        """Some of its images, as a table."""
        rows = torch.from_numpy(chosen)
        return Table(logit=self.logit[rows], label=self.label[rows])

    def best(self, risk: float) -> float:
        """The largest coverage of max-probability that keeps the risk, in hindsight."""
        k = np.arange(1, len(self) + 1)
        return float(k[self.errors[1:] / k <= risk].max(initial=0) / len(self))


Procedure = Callable[[Population, np.ndarray, float], tuple[np.ndarray, float]]
"""From the drawn rows and a risk to the uncertainty of the population and the threshold on it."""


def guard(population: Population, drawn: np.ndarray, risk: float) -> tuple[np.ndarray, float]:
    """A calibrated max-probability, whose temperature comes from a tenth of the draw."""
    reference = round(REFERENCE * len(drawn))
    score = dubito.Temperature().fit(population.rows(drawn[:reference]))
    u = score.score(Table(logit=population.logit)).numpy()
    return u, tested(u, population.wrong, drawn[reference:], risk)


def plain(population: Population, drawn: np.ndarray, risk: float) -> tuple[np.ndarray, float]:
    """Max-probability, tested on all of the draw."""
    return population.plain, tested(population.plain, population.wrong, drawn, risk)


def naive(population: Population, drawn: np.ndarray, risk: float) -> tuple[np.ndarray, float]:
    """The largest threshold that looks right on the draw itself."""
    order = drawn[np.argsort(population.plain[drawn], kind="stable")]
    rate = np.cumsum(population.wrong[order]) / np.arange(1, len(order) + 1)
    kept = np.nonzero(rate <= risk)[0]
    return population.plain, float(population.plain[order[kept[-1]]]) if len(kept) else -np.inf


def tested(u: np.ndarray, wrong: np.ndarray, rows: np.ndarray, risk: float) -> float:
    """The threshold that keeps the risk on these rows; minus infinity where there is none."""
    try:
        return risk_threshold(u[rows], wrong[rows], risk=risk, confidence=CONFIDENCE).value
    except GuardError:
        return -np.inf


def study(population: Population, risk: float, n: int, draws: int) -> dict[str, Any]:
    """All procedures at one risk."""
    procedures = {"guard": (guard, n), "plain": (plain, n), "naive": (naive, n), "ten_times": (plain, 10 * n)}
    result: dict[str, Any] = {
        "best": round(population.best(risk), 4),
        "possible": round(possible(population, risk, n), 4),
    }
    for name, (procedure, size) in procedures.items():
        result[name] = repeated(population, procedure, risk, size, draws, f"{name}, risk {risk}")
    return result


def repeated(
    population: Population, procedure: Procedure, risk: float, n: int, draws: int, title: str
) -> dict[str, float | None]:
    """How often the guarantee was broken, and how much was accepted."""
    coverage, rate = np.zeros(draws), np.zeros(draws)
    for seed in track(range(draws), title):
        rows = np.random.default_rng(seed).integers(0, len(population), n)
        u, threshold = procedure(population, rows, risk)
        accepted = u <= threshold
        coverage[seed] = accepted.mean()
        rate[seed] = population.wrong[accepted].mean() if accepted.any() else 0.0
    best = population.best(risk)
    return {
        "exceeded": round(float((rate > risk).mean()), 4),
        "coverage": round(float(coverage.mean()), 4),
        "relative": round(float(coverage.mean() / best), 4) if best else None,
        "none": round(float((coverage == 0).mean()), 4),
    }


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


def table_of(name: str, data: Path | None, more_data: Path | None, cache: Path) -> Table:
    """The table of a population, extracted if it is not there yet."""
    if (cache / name / "manifest.json").is_file():
        return dubito.open(cache / name)
    if data is None or more_data is None:
        raise SystemExit(f"'{cache / name}' is not there: give --data DIR and --more-data DIR to extract it.")
    if name == "cifar10":
        small = dubito.Preprocess(size=(32, 32), resize=(32, 32))
        model = dubito.wrap(resnet(20, data / "cifar10_resnets"), transform=small, classes=10, name="resnet20")
        return dubito.extract(model, f"{more_data / 'cifar10.npz'}#test", cache / name, label_space="model")
    photos, size = {"imagenet": ("imagenet_val_dev2000", 256), "imagenetv2": ("imagenetv2_10k", 224)}[name]
    folder, model = data / photos, dubito.load("pypi:efficientnet_lite0")
    return dubito.extract(model, folder / f"images{size}.zip", cache / name, labels=folder / "labels.csv")


def describe(result: dict[str, Any]) -> str:
    """A line for each procedure."""
    lines = ["population  risk  best   procedure  exceeded  coverage  relative  none"]
    for name, population in result["populations"].items():
        for risk, row in population["risks"].items():
            for key, one in row.items():
                if isinstance(one, dict):
                    relative = "-" if one["relative"] is None else f"{one['relative']:.3f}"
                    lines.append(
                        f"{name:<10}  {risk:<4}  {row['best']:.3f}  {key:<9}  {one['exceeded']:<8.3f}  "
                        f"{one['coverage']:<8.3f}  {relative:<8}  {one['none']:.3f}"
                    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
