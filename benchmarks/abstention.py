"""Abstention: thresholds of dubito and of MAPIE's Learn then Test, on the same images, risk and confidence.

The images of a table are the population: every draw takes a calibration set from it, with replacement, and the true
error rate of what is accepted is known. Both get max-probabilities of the same network and the same images.

    coverage   the share of the population that is accepted, on average over draws; 0 where nothing is
    violated   the share of draws whose accepted images are wrong more often than the risk

MAPIE 1.6 tests the precision of "the prediction is right" at 100 thresholds, with its default for many thresholds,
Bonferroni-Holm (`mapie`), and by fixed-sequence testing from the strictest threshold on (`mapie_sequence`). `dubito` is
`risk_threshold`; `dubito_guard` sets a tenth of the draw aside for a temperature, as `Guard.fit` does.

    python benchmarks/abstention.py                               # made-up logits: a minute
    python benchmarks/abstention.py --data cache/test --rows 2000

The last line is one JSON object. MAPIE is optional: pip install mapie.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import dubito
from dubito.errors import GuardError
from dubito.guard import risk_threshold

try:
    from mapie.risk_control import BinaryClassificationController, precision
except ImportError:
    BinaryClassificationController = None

RISKS = (0.01, 0.05, 0.1)


def main() -> None:
    """Parse the command line, draw, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a cache with labels of the model's classes")
    parser.add_argument("--rows", type=int, help="calibration images of a draw; by default as many as there are")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--confidence", type=float, default=0.95)
    options = parser.parse_args()
    if BinaryClassificationController is None:
        print("mapie is not installed, so only dubito is measured: pip install mapie")
    logit, label = made_up() if options.data is None else read(options.data)
    n = options.rows or len(label)
    result = {"images": len(label), "rows": n, "draws": options.draws, "confidence": options.confidence}
    result["risks"] = {str(risk): study(logit, label, n, risk, options.confidence, options.draws) for risk in RISKS}
    for risk, procedures in result["risks"].items():
        for name, one in procedures.items():
            print(f"risk {risk:5} {name:15} coverage {one['coverage']:.3f}  violated {one['violated']:.3f}")
    print(json.dumps(result))


def study(
    logit: np.ndarray, label: np.ndarray, n: int, risk: float, confidence: float, draws: int
) -> dict[str, dict[str, float]]:
    """All procedures at one risk, on the same draws."""
    wrong = logit.argmax(1) != label
    p = probabilities(logit)
    seen: dict[str, list[tuple[float, float]]] = {}
    for seed in range(draws):
        rows = np.random.default_rng(seed).integers(len(label), size=n)
        accepted = {"dubito": p >= -ours(-p[rows], wrong[rows], risk, confidence)}
        accepted["dubito_guard"] = guarded(logit, label, wrong, rows, risk, confidence)
        if BinaryClassificationController is not None:
            for name, method in (("mapie", "bonferroni_holm"), ("mapie_sequence", "fixed_sequence")):
                accepted[name] = p >= theirs(p[rows], ~wrong[rows], risk, confidence, method)
        for name, inside in accepted.items():
            error = float(wrong[inside].mean()) if inside.any() else 0.0
            seen.setdefault(name, []).append((float(inside.mean()), float(error > risk)))
    means = {name: np.mean(pairs, axis=0) for name, pairs in seen.items()}
    return {name: {"coverage": round(c, 4), "violated": round(v, 4)} for name, (c, v) in means.items()}


def probabilities(logit: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """The largest probability of every row."""
    return (torch.from_numpy(logit).double() / temperature).softmax(1).max(1).values.numpy()


def ours(u: np.ndarray, wrong: np.ndarray, risk: float, confidence: float) -> float:
    """The threshold on the uncertainty; minus infinity where there is none."""
    try:
        return risk_threshold(u, wrong, risk=risk, confidence=confidence).value
    except GuardError:
        return -np.inf


def guarded(
    logit: np.ndarray, label: np.ndarray, wrong: np.ndarray, rows: np.ndarray, risk: float, confidence: float
) -> np.ndarray:
    """Which images are accepted at a temperature that a tenth of the draw has fitted."""
    first, rest = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    score = dubito.Temperature().fit(dubito.Table(logit=logit[first], label=label[first]))
    u = score.score(dubito.Table(logit=logit)).numpy()
    return u <= ours(u[rest], wrong[rest], risk, confidence)


def theirs(p: np.ndarray, right: np.ndarray, risk: float, confidence: float, method: str) -> float:
    """The threshold on the probability; infinity where there is none."""
    levels = np.linspace(0, 0.99, 100)
    controller = BinaryClassificationController(
        lambda x: np.column_stack([1 - x[:, 0], x[:, 0]]),
        precision,
        target_level=1 - risk,
        confidence_level=confidence,
        list_predict_params=levels[::-1] if method == "fixed_sequence" else levels,
        best_predict_param_choice="auto",
        fwer_method=method,
    )
    controller.calibrate(p[:, None], right.astype(int))
    valid = np.asarray(controller.valid_predict_params)
    return float(valid.min()) if len(valid) else np.inf


def made_up(n: int = 5000, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Logits of which about 94 of 100 are right, and overconfident, as those of a network are."""
    rng = np.random.default_rng(0)
    logit = rng.normal(size=(n, classes))
    label = rng.integers(classes, size=n)
    logit[np.arange(n), label] += rng.normal(loc=5.0, scale=2.0, size=n)
    return (2 * logit).astype(np.float32), label


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels of a cache."""
    table = dubito.open(path)
    return table.whole("logit").float().numpy(), table.label.numpy()


if __name__ == "__main__":
    main()
