"""Is what a model keeps better when gradients decide what it refuses? Accuracy and NLL of the kept part, and AURC.

    python experiments/gradients/rejection.py --data DIR --more-data DIR [--cache DIR] [--models NAME ...] [--write]

Models, images and caches are those of ood.py: with the same --cache and --limit nothing is extracted anew. Known images
alone play a part. beta of REGrad is chosen on the validation split by tune_regrad; everything that is told is measured
on the others. At a coverage of 90, 80, 70 and 50%, the least doubtful images are kept:

    accuracy, NLL   of the kept part, with bootstrap intervals; in front stands all of it
    AURC            the mean error of the kept part over all coverages; the same of the NLL. Lower is better. With
                    their distances from those of max_probability and of entropy, by paired resamples

The paper's summary says "better negative log-likelihood scores" and no number. The CIFAR-10 networks were selected on
the test set by their authors; orders of scores suffer little from it, the NLL itself may. The last line is one JSON
object; --write puts it into expected/gradients_rejection.json, where models that are not asked for
stay what they were.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _columns import MODELS, Case, cases
from _figures import difference, short, sign, with_earlier, write
from rich.progress import track
from torch import Tensor

import dubito
from dubito.metrics import acceptance_curve, accuracy, aurc, correct, interval, nll, nll_per_row
from dubito.types import Score

EXPECTED = Path(__file__).parents[1] / "expected" / "gradients_rejection.json"
COVERAGES = (0.5, 0.7, 0.8, 0.9)
BASES = ("max_probability", "entropy")
PUBLISHED = {"text": "superior uncertainty calibration with better negative log-likelihood scores; no table at hand"}


def main() -> None:
    """Every model; tables, a paragraph, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="that of ood.py, or a new folder")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--limit", type=int, help="at most so many images a set")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"published": PUBLISHED, "limit": args.limit, "models": {}}
    with tempfile.TemporaryDirectory() as place:
        for case in cases(args.models, args.data, args.more_data, args.limit):
            result["models"][case.name] = figures = studied(case, args.cache or Path(place))
            print(as_table(case.name, figures), flush=True)
    if args.write:
        result["models"] = with_earlier(EXPECTED, "models", result["models"])
    result["findings"] = findings(result["models"])
    print("\n" + result["findings"])
    if args.write:
        write(EXPECTED, "python experiments/gradients/rejection.py --data DIR --more-data DIR --write", result)
    print(json.dumps(result))


def studied(case: Case, cache: Path) -> dict:
    """One model."""
    validation, in_distribution = (case.columns(name, cache) for name in ("validation", "in_distribution"))
    tuned = {
        weighting: dubito.scores.tune_regrad(validation, weighting=weighting) for weighting in case.gradient.weightings
    }
    scores: dict[str, Score] = {
        "max_probability": dubito.MaxProbability(),
        "entropy": dubito.Entropy(),
        "energy": dubito.Energy(),
        "grad_norm, last layer": dubito.scores.GradNorm(),
        "grad_norm, all layers": dubito.scores.GradNorm(of="gradient"),
        "perturbation_variance": dubito.scores.PerturbationVariance(),
        "predicted_gradient": dubito.scores.PredictedGradient(beta=tuned["fisher"].score.beta),
        "last_layer_gradient": dubito.scores.LastLayerGradient(),
        **{f"regrad {weighting}": one.score for weighting, one in tuned.items()},
        "regrad fisher, uniform": dubito.scores.REGrad(layers="uniform"),
    }
    wrong, loss = (
        ~correct(in_distribution.logit, in_distribution.label),
        nll_per_row(in_distribution.logit, in_distribution.label),
    )
    uncertainties = {name: score.score(in_distribution) for name, score in scores.items()}
    return {
        "images": len(in_distribution),
        "accuracy": round(accuracy(in_distribution.logit, in_distribution.label), 4),
        "nll": round(nll(in_distribution.logit, in_distribution.label), 4),
        "beta": {weighting: one.score.beta for weighting, one in tuned.items()},
        "scores": {
            name: compared(name, uncertainties, wrong, loss)
            for name in track(uncertainties, description=f"intervals, {case.name}")
        },
    }


def compared(name: str, uncertainties: dict[str, Tensor], wrong: Tensor, loss: Tensor) -> dict:
    """One score: the kept part at every coverage, both areas, and their distances from those of BASES."""
    u = uncertainties[name]
    result: dict[str, Any] = {
        f"{coverage:.0%}": {
            "accuracy": short(interval(partial(kept, coverage=coverage), u, (~wrong).double(), resamples=500)),
            "nll": short(interval(partial(kept, coverage=coverage), u, loss, resamples=500)),
        }
        for coverage in reversed(COVERAGES)
    }
    result["aurc"] = short(interval(aurc, u, wrong))
    result["aurc of nll"] = short(interval(aurc, u, loss))
    for base in BASES:
        result[f"aurc - {base}"] = difference(aurc, u, uncertainties[base], wrong)
        result[f"aurc of nll - {base}"] = difference(aurc, u, uncertainties[base], loss)
    return result


def kept(u: Tensor, values: Tensor, *, coverage: float) -> float:
    """The mean over the least doubtful share."""
    return float(acceptance_curve(u, values, (coverage,))[0])


def findings(models: dict[str, dict]) -> str:
    """What helps and what does not, in words, from the numbers."""
    sentences = []
    for name, figures in models.items():
        rows = figures["scores"]
        best = min(rows, key=lambda score: rows[score]["aurc"][0])
        parts = []
        for score in ("regrad fisher", "last_layer_gradient", "grad_norm, last layer"):
            gain = rows[score]["aurc - entropy"]
            word = {1: "worse", -1: "better", 0: "not clearly different"}[sign(gain)]
            parts.append(
                f"{score} {100 * rows[score]['aurc'][0]:.2f} ({word}; {100 * gain[0]:+.2f} [{100 * gain[1]:+.2f}, "
                f"{100 * gain[2]:+.2f}])"
            )
        sentences.append(
            f"{name}, {figures['images']} images: AURC in %, beside entropy's {100 * rows['entropy']['aurc'][0]:.2f}"
            f" and max_probability's {100 * rows['max_probability']['aurc'][0]:.2f}: {', '.join(parts)}; lowest is "
            f"'{best}' ({100 * rows[best]['aurc'][0]:.2f}). At 80% coverage REGrad keeps an accuracy of "
            f"{100 * rows['regrad fisher']['80%']['accuracy'][0]:.1f} % and an NLL of "
            f"{rows['regrad fisher']['80%']['nll'][0]:.3f}, entropy "
            f"{100 * rows['entropy']['80%']['accuracy'][0]:.1f} % and {rows['entropy']['80%']['nll'][0]:.3f}."
        )
    return " ".join(sentences)


def as_table(name: str, figures: dict) -> str:
    """One line a score: accuracy and NLL by coverage, AURC with its interval."""
    lines = [
        f"\n{name}, {figures['images']} images, accuracy {100 * figures['accuracy']:.1f} %, NLL {figures['nll']:.3f}, "
        f"beta {figures['beta']}\n{'kept: accuracy, NLL':26}"
        + "".join(f"{f'{coverage:.0%}':>15}" for coverage in reversed(COVERAGES))
        + f"{'AURC':>24}{'minus that of entropy':>26}{'AURC of NLL':>13}"
    ]
    for score, row in figures["scores"].items():
        cells = ""
        for coverage in reversed(COVERAGES):
            part = row[f"{coverage:.0%}"]
            cells += f"{100 * part['accuracy'][0]:8.1f}{part['nll'][0]:7.3f}"
        for key, width in (("aurc", 24), ("aurc - entropy", 26)):
            value, low, high = (100 * number for number in row[key])
            cells += f"{f'{value:.2f} [{low:.2f}, {high:.2f}]':>{width}}"
        lines.append(f"{score:26}{cells}{row['aurc of nll'][0]:13.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
