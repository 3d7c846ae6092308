"""What a rejection study found: one result for every order of the images, as table, curves, words and files.

The table has the layout of Tables 3 to 6 of Kirsch (2024): uncertainty, size of the ensemble, and the negative
covariances of bucket calibration error, acceptance accuracy and acceptance NLL; then AUROC of errors and AURC, each
with its distance from that of the original model's entropy at the same temperature.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from dubito.evaluate._member_predictions import grid_of
from dubito.evaluate._rejection_words import RANKING, UNCERTAINTIES, finding
from dubito.evaluate._resampled_curves import CURVES, FIGURES
from dubito.metrics import Interval
from dubito.result import aligned
from dubito.types import Json

ORIGINAL = "original"
PAPER = {
    "neg_bucket_covariance_calibration_error": "-cov bucket calibration",
    "neg_acceptance_covariance_accuracy": "-cov acceptance accuracy",
    "neg_acceptance_covariance_nll": "-cov acceptance NLL",
}
"""The three figures of the paper's tables."""
_BETTER = {"auroc": 1, "aurc": -1}


@final
class Order(NamedTuple):
    """By what the images are sorted: the uncertainty of an ensemble (or of the original model) at a temperature."""

    ensemble: str
    members: int
    uncertainty: str
    temperature: float

    @property
    def size(self) -> str:
        """Of the ensemble, as it is shown."""
        grid = grid_of(self.ensemble)
        if self.ensemble == ORIGINAL:
            return ORIGINAL
        return f"{grid}x{grid}" if grid else f"{self.ensemble} ({self.members})"


@final
@dataclass(frozen=True)
class Rejected:
    """One order of the images.

    Attributes:
        order: By what they are sorted.
        accuracy: Of all images.
        nll: Of all images.
        calibration_error: |mean confidence - mean accuracy| of all images; not the binned ECE.
        curves: By "bucket" or "acceptance", and "accuracy", "nll" or "calibration_error": the value at every level.
        figures: AUROC of errors, AURC and the negative covariances, with intervals; None for what is undefined, as
            AUROC without errors.
        differences: Each figure minus that of the original's entropy at the same temperature, resampled together.
        constant: Whether the uncertainty is the same for every image, as where members are one and the same model.
    """

    order: Order
    accuracy: float
    nll: float
    calibration_error: float
    curves: Mapping[str, Mapping[str, tuple[float, ...]]]
    figures: Mapping[str, Interval | None]
    differences: Mapping[str, Interval | None] | None
    constant: bool = False

    def better(self, figure: str) -> int:
        """Whether AUROC or AURC is better (1) or worse (-1) than the original's, beyond the interval; else 0."""
        difference = (self.differences or {}).get(figure)
        if difference is None or difference.low <= 0 <= difference.high:
            return 0
        return _BETTER[figure] if difference.value > 0 else -_BETTER[figure]


@final
@dataclass(frozen=True)
class RejectionStudy:
    """Every order of the images: print it, take it as rows or JSON, write it as CSV.

    Attributes:
        name: The studied table.
        model: The original model.
        images: How many.
        calibrated_on: The table that temperature and pooled weights were fitted on.
        predictions: Whether ensembles are judged by their own predictions or by the original's.
        against: What the covariances are with.
        levels: Of the curves.
        results: The original first, for every temperature.
    """

    name: str
    model: str
    images: int
    calibrated_on: str | None
    predictions: str
    against: str
    levels: tuple[float, ...]
    results: Sequence[Rejected]

    def of(self, ensemble: str, uncertainty: str = "entropy", temperature: float | None = None) -> Rejected:
        """One result, by default at the first temperature: `study.of("tiles_7", "mutual_information")`."""
        at = self.temperatures[0] if temperature is None else temperature
        for found in self.results:
            if found.order._replace(members=1) == Order(ensemble, 1, uncertainty, at):
                return found
        known = ", ".join(f"{found.order.ensemble}/{found.order.uncertainty}" for found in self.results)
        raise KeyError(f"no result {ensemble}/{uncertainty} at T = {at:g}; there are {known}")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """All of them, in the order asked for."""
        return tuple(dict.fromkeys(found.order.temperature for found in self.results))

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a result, for a data frame."""
        return [
            {
                "model": self.model,
                **found.order._asdict(),
                "accuracy": found.accuracy,
                "nll": found.nll,
                "calibration_error": found.calibration_error,
                **_flat("", found.figures),
                **_flat("_difference", found.differences or {}),
            }
            for found in self.results
        ]

    def curve_rows(self) -> list[dict[str, Any]]:
        """Every point of every curve, in long form."""
        return [
            {"model": self.model, **found.order._asdict(), "kind": kind, "metric": metric, "level": level, "value": y}
            for found in self.results
            for kind, curves in found.curves.items()
            for metric in CURVES
            for level, y in zip(self.levels, curves[metric], strict=True)
        ]

    def to_csv(self, folder: str | Path) -> tuple[Path, Path]:
        """Write table.csv and curves.csv into a folder, and return their paths."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        return _written(place / "table.csv", self.rows()), _written(place / "curves.csv", self.curve_rows())

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "table": self.name,
            "model": self.model,
            "images": self.images,
            "calibrated_on": self.calibrated_on,
            "predictions": self.predictions,
            "against": self.against,
            "levels": list(self.levels),
            "results": [
                {
                    **found.order._asdict(),
                    "accuracy": found.accuracy,
                    "nll": found.nll,
                    "calibration_error": found.calibration_error,
                    "constant": found.constant,
                    "curves": {
                        kind: {name: list(y) for name, y in curves.items()} for kind, curves in found.curves.items()
                    },
                    "figures": _plain(found.figures),
                    "differences": _plain(found.differences or {}),
                }
                for found in self.results
            ],
            "findings": self.findings(),
        }

    def lines(self) -> list[list[str]]:
        """A header and one line a result, as text cells."""
        header = ["uncertainty", "ensemble", "T", "accuracy", "NLL", *PAPER.values()]
        header += [title for name in RANKING.values() for title in (name, f"{name} - entropy's")]
        return [header, *(_line(found) for found in self.results)]

    def findings(self) -> list[str]:
        """In plain words, for each temperature: does anything order errors better than the model's own entropy?"""
        return [
            finding([found for found in self.results if found.order.temperature == at], at, self.predictions)
            for at in self.temperatures
        ]

    def title(self) -> str:
        """What was studied."""
        judged = "ensembles by their own predictions" if self.predictions == "own" else "all by the original's"
        fitted = f"; T fitted on {self.calibrated_on}" if self.calibrated_on else ""
        return f"{self.name}: {self.images} images, {judged}{fitted}"

    def __str__(self) -> str:
        return "\n".join([self.title(), *aligned(self.lines()), *self.findings()])


def _line(found: Rejected) -> list[str]:
    differences = found.differences or {}
    ranking = [cell for name in RANKING for cell in (_cell(found.figures[name]), _cell(differences.get(name)))]
    return [
        UNCERTAINTIES[found.order.uncertainty],
        found.order.size,
        f"{found.order.temperature:.3g}",
        f"{found.accuracy:.3f}",
        f"{found.nll:.3f}",
        *(_cell(found.figures[name], bounds=False) for name in PAPER),
        *ranking,
    ]


def _cell(value: Interval | None, *, bounds: bool = True) -> str:
    if value is None:
        return "-"
    text = f"{value.value + 0.0:.3f}"
    return f"{text} [{value.low + 0.0:.3f}, {value.high + 0.0:.3f}]" if bounds else text


def _flat(suffix: str, figures: Mapping[str, Interval | None]) -> dict[str, float | None]:
    flat: dict[str, float | None] = {}
    for name in FIGURES:
        value = figures.get(name)
        flat |= {
            f"{name}{suffix}": None if value is None else value.value,
            f"{name}{suffix}_low": None if value is None else value.low,
            f"{name}{suffix}_high": None if value is None else value.high,
        }
    return flat


def _plain(figures: Mapping[str, Interval | None]) -> Json:
    return {name: None if value is None else value._asdict() for name, value in figures.items()}


def _written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
