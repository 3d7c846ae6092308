"""The figure of a rejection study, laid out as Figure 5 of Kirsch (2024). It requires matplotlib."""

from typing import Any

from dubito.evaluate.rejection_result import METRICS, ORIGINAL, UNCERTAINTIES, RejectionStudy
from dubito.explain.pictures import new_figure
from dubito.page.svg import palette


def rejection_figure(study: RejectionStudy, uncertainty: str, *, kind: str = "acceptance") -> Any:
    """The study as a matplotlib figure, one row per temperature: `rejection_figure(...).savefig("rejection.png")`.

    Args:
        study: The result of `rejection_study`.
        uncertainty: Uncertainty of the ensembles.
        kind: "acceptance" or "bucket".
    """
    figure, axes = new_figure(len(study.temperatures), len(METRICS), width=3.6, height=2.9)
    sizes = dict.fromkeys(one.order.size for one in study.results if one.order.ensemble != ORIGINAL)
    for row, temperature in zip(axes, study.temperatures, strict=True):
        for panel, (metric, title) in zip(row, METRICS.items(), strict=True):
            if sizes:
                panel.set_prop_cycle(color=list(palette(list(sizes)).values()))
            study.plot(panel, uncertainty=uncertainty, metric=metric, kind=kind, temperature=temperature)
            panel.set(title=f"{title}, T = {temperature:.3g}", ylabel="")
            panel.get_legend().remove()
            panel.spines[["right", "top"]].set_visible(False)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize="small")
    figure.suptitle(f"{study.model}, {study.images} images: {kind} by {UNCERTAINTIES[uncertainty]}", fontsize="medium")
    return figure
