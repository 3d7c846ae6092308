"""How much do whole guards accept of photographs that they have never seen? Against a plain test of max-probability.

    python experiments/guard_unseen.py --data DIR [--cache DIR] [--draws 12] [--write]

DIR holds imagenetv2_10k/ (images224.zip, labels.csv); columns of EfficientNet-Lite0 are kept in CACHE/imagenetv2. Every
draw fits a guard with all defaults on 2,000 photographs at random, and runs it on the other 8,000. "plain" tests
max-probability on all 2,000, with the same sequence of tests.

    coverage   of the other photographs, on average over draws; draws without a threshold count as 0
    errors     the highest error rate of accepted photographs in any draw; it scatters around that of the population

The last line is one JSON object; --write puts it into expected/guard_unseen.json, too.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _expected import write_expected
from guarantee import CONFIDENCE, table_of, tested
from rich.progress import track

import dubito
from dubito.errors import GuardError
from dubito.table import Table

EXPECTED = Path(__file__).parent / "expected" / "guard_unseen.json"
RISKS, FITTED = (0.05, 0.1), 2_000


def main() -> None:
    """Fit, run, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        table = table_of("imagenetv2", args.data, args.data, args.cache or Path(place))
        drawn = [one(table, seed) for seed in track(range(args.draws), "guards")]
    result: dict[str, Any] = {"draws": args.draws, "confidence": CONFIDENCE, "fitted_on": FITTED, "risks": {}}
    for risk in RISKS:
        rows = np.array([draw[risk] for draw in drawn])
        guard, plain, errors = rows.T
        result["risks"][str(risk)] = {
            "coverage": round(float(guard.mean()), 4),
            "plain_coverage": round(float(plain.mean()), 4),
            "errors": round(float(errors.max()), 4),
        }
    if args.write:
        write_expected(EXPECTED, "--data DIR", result)
    print(json.dumps(result))


def one(table: Table, seed: int) -> dict[float, tuple[float, float, float]]:
    """By risk: the coverage of the guard and of the plain test, and the guard's error rate, on unseen photographs."""
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    rows, others = order[:FITTED].sort().values, order[FITTED:].sort().values
    wrong, u = table.logit.argmax(1) != table.label, dubito.MaxProbability().score(table)
    fitted, unseen = dubito.Guard.fit(None, table.rows(rows), risk=0.3, seed=seed), table.rows(others)
    result = {}
    for risk in RISKS:
        plain = tested(u.numpy(), wrong.numpy(), rows.numpy(), risk)
        try:
            accept = fitted.with_risk(risk).decide(unseen).accept
        except GuardError:
            accept = torch.zeros(len(others), dtype=torch.bool)
        errors = wrong[others][accept].double().mean() if accept.any() else 0.0
        result[risk] = float(accept.double().mean()), float((u[others] <= plain).double().mean()), float(errors)
    return result


if __name__ == "__main__":
    main()
