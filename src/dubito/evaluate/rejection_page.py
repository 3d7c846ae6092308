"""The page of a rejection study: three metrics over the quantile of uncertainty, one line per ensemble.

The layout is that of Figure 5 of Kirsch (2024): accuracy, NLL and calibration error side by side, solid lines for
ensembles, a dashed one for the original model.
"""

from typing import Any

from dubito.evaluate.rejection_result import METRICS, ORIGINAL, UNCERTAINTIES, RejectionStudy
from dubito.page.render import fill
from dubito.page.svg import Axis, Line, lines, palette

_KINDS = {
    "acceptance": "all images accepted up to a quantile of the uncertainty",
    "bucket": "images in the bucket that ends at a quantile of the uncertainty",
}


def rejection_page(study: RejectionStudy) -> str:
    """The page of a study."""
    header, *body = study.lines()
    return fill(
        "rejection.html.j2",
        title=f"Which images should {study.model} reject?",
        facts=[
            f"{study.name}, {study.images:,} images",
            f"{len(study.levels)} buckets",
            f"T = {', '.join(f'{at:.3g}' for at in study.temperatures)}",
            *([] if study.calibrated_on is None else [f"T fitted on {study.calibrated_on}"]),
            "each evaluated on its own predictions"
            if study.predictions == "own"
            else "all on the original's predictions",
        ],
        findings=[*(f"{name.capitalize()}: {text}." for name, text in study.facts().items()), *study.findings()],
        header=header,
        rows=body,
        better=[{2: result.better("auroc"), 0: result.better("aurc")} for result in study.results],
        sections=[
            _section(study, uncertainty, temperature)
            for uncertainty in study.uncertainties or ("entropy",)
            for temperature in study.temperatures
        ],
    )


def _section(study: RejectionStudy, uncertainty: str, temperature: float) -> dict[str, Any]:
    results = {
        result.order.size: result
        for result in study.results
        if result.order.temperature == temperature and result.order.uncertainty in (uncertainty, "entropy")
    }
    colours = palette([name for name in results if name != ORIGINAL])

    def panel(kind: str, metric: str) -> tuple[str, str]:
        curves = {name: result.curves[kind][metric] for name, result in results.items()}
        ends = "; ".join(f"{name} from {y[0]:.3f} to {y[-1]:.3f}" for name, y in curves.items())
        drawing = lines(
            [
                Line(study.levels, y, name=name, colour=colours.get(name), dashed=name == ORIGINAL)
                for name, y in curves.items()
            ],
            x=Axis(0.0, 1.0),
            # The same in all sections of the page, so that temperatures and uncertainties can be compared by eye.
            y=Axis.over([value for result in study.results for value in result.curves[kind][metric]]),
            x_ticks=(0.0, 0.5, 1.0),
            label=f"{METRICS[metric]}: {ends}",
        )
        return drawing, METRICS[metric]

    return {
        "title": f"{UNCERTAINTIES.get(uncertainty, uncertainty).capitalize()}, T = {temperature:.3g}",
        "key": {name if name in colours else "original, by its entropy": colours.get(name) for name in results},
        "panels": {title: [panel(kind, metric) for metric in METRICS] for kind, title in _KINDS.items()},
    }
