"""Do gradients find OOD images? REGrad (Wang & Ji 2024) and its parts, beside softmax, density and neighbours.

    python experiments/gradients/ood.py --data DIR --more-data DIR [--cache DIR] [--models NAME ...] [--write]

DIR holds cifar10_resnets/ (resnet20.pt, resnet56.pt), svhn_test_dev5000/ (images.png), tiny_imagenet_val_dev2400/ and
dtd10_dev400/ (images.zip), notmnist_10k/ (gzipped idx files) and imagenet_val_dev2000/ (images256.zip, labels.csv); the
other DIR holds cifar10.npz. Which images are in-distribution, OOD, for training and for choosing: see _columns.py.

    scores         AUROC, average precision and FPR at 95% TPR with bootstrap intervals, OOD images being positive,
                   as many of either side; the AUROC's distance from that of max_probability and of entropy, by
                   paired resamples; cost an image, of columns and score, as a multiple of a forward pass (processor
                   seconds of this run)
    ablation       REGrad with all class weightings and layer weights: exponential with beta by tune_regrad, 4 and 16,
                   uniform (beta = 0), and the last layer alone, in closed form. Of 1,000 classes, "root" and
                   "expected_l1" are of the ten most likely, and so is a "fisher" beside them
    perturbation   gradients averaged over noisy copies, for the first images of every set: none, each sigma with the
                   beta of none, and what tune_regrad chooses among all

No setting is chosen on OOD images. The paper's numbers are not in its summary, which says "30-60% improvement"; its
models and sets are others. --limit N takes at most N images a set, to try the script out. The last line is one JSON
object; --write puts it into expected/gradients_ood.json, where models that are not asked for stay what they were.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _columns import MODELS, SIZES, WEIGHTINGS, Case, cases
from _figures import difference, short, sign, with_earlier, write
from rich.progress import track
from torch import Tensor

import dubito
from dubito.cache.runner import kept_memory
from dubito.explain.pictures import COLOURS, new_figure
from dubito.metrics import auroc, average_precision, fpr_at_tpr, interval
from dubito.scores.density import default_density
from dubito.scores.tune import Tuned
from dubito.types import Probe, Score

EXPECTED = Path(__file__).parents[1] / "expected" / "gradients_ood.json"
METRICS = {"auroc": auroc, "aupr": average_precision, "fpr95": fpr_at_tpr}
MAIN = "regrad fisher, chosen beta"
BASES = ("max_probability", "entropy")
BETAS = (4, 16)
"""Beside the one that is chosen, to show what weights do."""
COPIES, SIGMAS = 4, {"copies_little": 0.02, "copies_much": 0.1}
TIMED, REPEATS = {"exact": 16, "combined": 8}, 2
PUBLISHED = {"text": "30-60% improvement in out-of-distribution detection metrics (AUROC, AUPR); no table at hand"}
Tables = Mapping[str, dubito.Table]


def main() -> None:
    """Every model against its three sets; tables, a paragraph, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--limit", type=int, help="at most so many images a set")
    parser.add_argument("--perturbed", type=int, default=100, help="images a set with noisy copies")
    parser.add_argument("--figure", type=Path, help="draw AUROCs here (needs matplotlib)")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)  # costs are processor seconds of one core
    result: dict[str, Any] = {
        "published": PUBLISHED,
        "images, in-distribution and OOD": SIZES,
        "limit": args.limit,
        "models": {},
    }
    with tempfile.TemporaryDirectory() as place:
        cache = args.cache or Path(place)
        for case in cases(args.models, args.data, args.more_data, args.limit):
            result["models"][case.name] = figures = studied(case, cache)
            print(as_table(case, figures), flush=True)
            figures["perturbation"] = perturbed(case, cache / f"{case.name}_perturbed", args.perturbed)
            print(perturbed_table(figures["perturbation"]), flush=True)
    if args.write:
        result["models"] = with_earlier(EXPECTED, "models", result["models"])
    result["findings"] = findings(result["models"])
    print("\n" + result["findings"])
    if args.figure:
        draw(args.figure, result["models"])
    if args.write:
        write(EXPECTED, "python experiments/gradients/ood.py --data DIR --more-data DIR --write", result)
    print(json.dumps(result))


def studied(case: Case, cache: Path) -> dict:
    """One model: accuracy, what was chosen, cost, and every score against every set."""
    tables = {name: case.columns(name, cache) for name in case.sets}
    in_distribution = tables["in_distribution"]
    tuned = {
        weighting + (f", {probe.classes} likely classes" if probe is case.likely else ""): dubito.scores.tune_regrad(
            tables["validation"], (probe.name,), weighting=weighting
        )
        for probe in case.gradients
        for weighting in probe.weightings
    }
    price = costs(case)
    values: dict[str, dict[str, Tensor]] = {}
    cost = {}
    for name, score in track(all_scores(tables, tuned).items(), description=f"scores of {case.name}"):
        spent = time.process_time()
        values[name] = {"in_distribution": score.score(in_distribution)}
        own = (time.process_time() - spent) / len(in_distribution)
        cost[name] = {"cost": round((price[columns_of(score)] + own) / price["forward"], 2)}
        values[name] |= {ood: score.score(tables[ood]) for ood in case.ood}
    scores = {name: cost[name] | compared(name, values) for name in track(values, description="intervals")}
    return {
        "accuracy": round(float((in_distribution.logit.argmax(1) == in_distribution.label).double().mean()), 4),
        "rows": {name: len(table) for name, table in tables.items()},
        "forward pass, ms an image": round(1e3 * price["forward"], 2),
        "passes": {name: round(seconds / price["forward"], 1) for name, seconds in price.items()},
        "beta": {weighting: one.score.beta for weighting, one in tuned.items()},
        "tried": {weighting: in_short(one) for weighting, one in tuned.items()},
        "scores": scores,
    }


def all_scores(tables: Tables, tuned: Mapping[str, Tuned]) -> dict[str, Score]:
    """By name: rivals first, then the parts of REGrad."""
    train = tables["train"]
    scores: dict[str, Score] = {
        "max_probability": dubito.MaxProbability(),
        "entropy": dubito.Entropy(),
        "energy": dubito.Energy(),
        "density": default_density(train).fit(train),
        "neighbours": dubito.Neighbours().fit(train),
        "perturbation_variance": dubito.scores.PerturbationVariance(),
        "grad_norm, last layer": dubito.scores.GradNorm(),
        "grad_norm, all layers": dubito.scores.GradNorm(of="gradient"),
        "predicted_gradient": dubito.scores.PredictedGradient(beta=tuned["fisher"].score.beta),
    }
    for which, one in tuned.items():
        scores[f"regrad {which}, chosen beta"] = one.score
        scores[f"regrad {which}, uniform"] = replace(one.score, layers="uniform")
        scores |= {f"regrad {which}, beta {beta}": replace(one.score, beta=beta) for beta in BETAS}
    last = {f"regrad {weighting}, last layer": dubito.scores.LastLayerGradient(weighting) for weighting in WEIGHTINGS}
    return scores | last


def compared(name: str, values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict]:
    """One score by OOD set: every metric, and how far its AUROC is from those of BASES on the same images."""
    result = {}
    for ood in values[name]:
        if ood != "in_distribution":
            both, positive = balanced(values[name]["in_distribution"], values[name][ood])
            row = {metric: short(interval(function, both, positive)) for metric, function in METRICS.items()}
            for base in BASES:
                other, _ = balanced(values[base]["in_distribution"], values[base][ood])
                row[f"auroc - {base}"] = difference(auroc, both, other, positive)
            result[ood] = row
    return result


def balanced(in_distribution: Tensor, ood: Tensor) -> tuple[Tensor, Tensor]:
    """The first rows of both, and which of them are OOD."""
    count = min(len(in_distribution), len(ood))
    return torch.cat([in_distribution[:count], ood[:count]]), torch.arange(2 * count) >= count


def columns_of(score: Score) -> str:
    """Which of `costs` writes what a score reads."""
    by_column = {
        "gradient": "fisher",
        "gradient_root": "fisher",
        "gradient_l1": "expected_l1",
        "gradient_predicted": "predicted",
        "gradient_uniform": "uniform",
        "likely": "likely, fisher",
        "likely_root": "likely, fisher",
        "likely_l1": "likely, expected_l1",
        "noise_variance": "noise",
    }
    return next((by_column[column] for column in score.needs if column in by_column), "forward")


def costs(case: Case) -> dict[str, float]:
    """Processor seconds an image: the least of several runs, taken in turn, as others use the machine, too."""
    model, images, method = case.model, case.sets["in_distribution"], case.gradient.method
    x = model.transform.finish(torch.stack([model.transform.prepare(images.read(row)) for row in range(TIMED[method])]))
    probes: dict[str, Probe] = {"fisher": dubito.probes.Gradient(method)}
    probes["fisher, noisy copies"] = dubito.probes.Gradient(method, copies=COPIES)
    if method == "exact":
        probes["expected_l1"] = dubito.probes.Gradient(method, weightings=("expected_l1",))
    if case.likely is not None:
        probes["likely, fisher"] = replace(case.likely, weightings=("fisher",))
        probes["likely, expected_l1"] = replace(case.likely, weightings=("expected_l1",))
    probes["predicted"] = dubito.probes.Gradient("top", 1, 0)
    probes["uniform"] = dubito.probes.Gradient(
        "top", 1, 0, uniform=True
    )  # with the predicted class, which always comes along
    probes["noise"] = dubito.probes.Noise()
    runs: dict[str, Callable[[], Any]] = {"forward": lambda: model.logits(model.features(x))}
    runs |= {name: lambda probe=probe: probe.run(model, x, None) for name, probe in probes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with kept_memory():
        for _ in track(range(1 + REPEATS), description=f"cost on {case.name}"):
            for name, run in runs.items():
                spent = time.process_time()
                run()
                seconds[name].append((time.process_time() - spent) / len(x))
    return {name: min(some[1:]) for name, some in seconds.items()}


def perturbed(case: Case, cache: Path, count: int) -> dict:
    """Gradients averaged over noisy copies, for the first images of every set."""
    method = case.gradient.method
    probes = [dubito.probes.Gradient(method)]
    probes += [dubito.probes.Gradient(method, copies=COPIES, sigma=sigma, name=name) for name, sigma in SIGMAS.items()]
    wanted = ("validation", "in_distribution", *case.ood)
    tables = {name: case.extract(name, cache, probes, count) for name in wanted}
    plain = dubito.scores.tune_regrad(tables["validation"])
    chosen = dubito.scores.tune_regrad(tables["validation"], columns=("gradient", *SIGMAS))
    scores = {"none": plain.score}
    scores |= {f"sigma {sigma}": dubito.scores.REGrad(beta=plain.score.beta, of=name) for name, sigma in SIGMAS.items()}
    scores["chosen"] = chosen.score
    rows: dict[str, dict] = {name: {} for name in scores}
    for ood in case.ood:
        lined_up = {
            name: balanced(score.score(tables["in_distribution"]), score.score(tables[ood]))
            for name, score in scores.items()
        }
        for name, (both, positive) in lined_up.items():
            rows[name][ood] = {
                "auroc": short(interval(auroc, both, positive)),
                "auroc - none": difference(auroc, both, lined_up["none"][0], positive),
            }
    picked = {"column": chosen.score.of, "sigma": SIGMAS.get(chosen.score.of, 0.0), "beta": chosen.score.beta}
    return {"images": count, "copies": COPIES, "chosen": picked, "tried": in_short(chosen), "auroc": rows}


def in_short(tuned: Tuned) -> list[dict]:
    """What was tried: AURC on the validation split."""
    names = ("column", "sigma", "beta", "aurc", "standard_error", "chosen")
    return [{name: round(row[name], 5) if name in names[3:5] else row[name] for name in names} for row in tuned.tried]


def mean_over_sets(row: dict, metric: str) -> float:
    """Of one score."""
    return statistics.mean(result[metric][0] for result in row.values() if isinstance(result, dict))


def findings(models: dict[str, dict]) -> str:
    """Where gradients help and where not, in words, from the numbers."""
    sentences = []
    for name, figures in models.items():
        rows = figures["scores"]
        mean = {score: 100 * mean_over_sets(row, "auroc") for score, row in rows.items()}
        sets = [key for key in rows[MAIN] if key != "cost"]
        parts = [f"{ood} {', '.join(gained(rows[MAIN][ood], base) for base in BASES)}" for ood in sets]
        gradients = [score for score in mean if score.startswith(("regrad", "grad_norm", "predicted"))]
        rivals = [score for score in mean if score not in gradients]
        best, rival = max(gradients, key=mean.__getitem__), max(rivals, key=mean.__getitem__)
        sentences.append(
            f"{name}: REGrad (fisher, beta {figures['beta']['fisher']:g} by its rule) has a mean AUROC of "
            f"{mean[MAIN]:.1f} at {rows[MAIN]['cost']:.0f} forward passes, max_probability "
            f"{mean['max_probability']:.1f}, entropy {mean['entropy']:.1f}, the last layer's gradient "
            f"{mean['regrad fisher, last layer']:.1f} at {rows['regrad fisher, last layer']['cost']:.0f}. "
            f"Its AUROC in points against the two baselines, by set: {'; '.join(parts)}. Best of all "
            f"scores with gradients is '{best}' ({mean[best]:.1f}), of all others '{rival}' ({mean[rival]:.1f})."
        )
        if "perturbation" in figures:
            noisy = figures["perturbation"]
            signs = [
                sign(result["auroc - none"])
                for sigma, row in noisy["auroc"].items()
                for result in row.values()
                if sigma.startswith("sigma")
            ]
            sentences.append(
                f"Noisy copies, {noisy['images']} images a set: of {len(signs)} pairs of sigma and set, "
                f"{signs.count(1)} clearly better and {signs.count(-1)} clearly worse than none; the rule chose "
                f"sigma {noisy['chosen']['sigma']:g} and beta {noisy['chosen']['beta']:g}."
            )
    return " ".join(sentences)


def gained(result: dict, base: str) -> str:
    """A difference of AUROCs in words."""
    value, low, high = (100 * number for number in result[f"auroc - {base}"])
    word = {1: "better", -1: "worse", 0: "not clear"}[sign(result[f"auroc - {base}"])]
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}] to {base} ({word})"


def as_table(case: Case, figures: dict) -> str:
    """One line a score: AUROC, AUPR and FPR95 of every set, mean AUROC, cost."""
    head = f"\n{case.name}, accuracy {100 * figures['accuracy']:.1f} %, beta {figures['beta']}\n{'in per cent':52}"
    head += "".join(f"{name + ': AUROC AUPR FPR95':>38}" for name in case.ood) + f"{'mean':>7}{'cost':>7}"
    lines = [head]
    for name, row in figures["scores"].items():
        cells = ""
        for ood in case.ood:
            value, low, high = (100 * number for number in row[ood]["auroc"])
            others = "".join(f"{100 * row[ood][key][0]:7.1f}" for key in ("aupr", "fpr95"))
            cells += f"{f'{value:.1f} [{low:.1f}, {high:.1f}]':>24}{others}"
        lines.append(f"{name:52}{cells}{100 * mean_over_sets(row, 'auroc'):7.1f}{row['cost']:7.1f}")
    return "\n".join(lines)


def perturbed_table(figures: dict) -> str:
    """AUROC of every sigma, and its distance from none."""
    lines = [f"\n{figures['copies']} noisy copies, {figures['images']} images a set; chosen: {figures['chosen']}"]
    for name, row in figures["auroc"].items():
        cells = ""
        for ood, result in row.items():
            value, gain = (100 * result[key][0] for key in ("auroc", "auroc - none"))
            cells += f"{f'{ood} {value:.1f} ({gain:+.1f})':>30}"
        lines.append(f"{name:14}{cells}")
    return "\n".join(lines)


def draw(to: Path, models: dict[str, dict]) -> None:
    """AUROC by score, a panel a model, a colour a set."""
    figure, axes = new_figure(1, len(models), width=4.2, height=4.4)
    for axis, (name, figures) in zip(axes[0], models.items(), strict=True):
        rows = dict(reversed(figures["scores"].items()))
        for place, ood in enumerate(key for key in next(iter(rows.values())) if key != "cost"):
            value, low, high = zip(*(row[ood]["auroc"] for row in rows.values()), strict=True)
            around = [
                [v - a for v, a in zip(value, low, strict=True)],
                [b - v for v, b in zip(value, high, strict=True)],
            ]
            at = [line + 0.2 * (place - 1) for line in range(len(rows))]
            axis.errorbar(value, at, xerr=around, fmt="o", markersize=3, color=COLOURS[place], label=ood)
        axis.set_yticks(range(len(rows)), list(rows) if axis is axes[0][0] else [""] * len(rows), fontsize="x-small")
        axis.set(title=name, xlabel="AUROC")
        axis.legend(frameon=False, fontsize="x-small", loc="lower left")
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    main()
