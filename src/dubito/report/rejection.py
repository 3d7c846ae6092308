"""A rejection study as a page and as a figure: three metrics over the quantile of uncertainty, one line an ensemble.

The layout is that of Figure 5 of Kirsch (2024): accuracy, NLL and calibration error side by side, solid lines for
ensembles, a dashed one for the original model. The page is one self-contained file without a script; the figure needs
matplotlib.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from dubito.errors import ValueRangeError
from dubito.evaluate._rejection_words import UNCERTAINTIES
from dubito.evaluate.rejection_result import ORIGINAL, Rejected, RejectionStudy
from dubito.explain.pictures import new_figure
from dubito.report._document import top, write_document
from dubito.report._lines import curves, palette

_METRICS = {"accuracy": "accuracy", "nll": "NLL", "calibration_error": "calibration error"}
_KINDS = {
    "acceptance": "of all images accepted up to a quantile of the uncertainty",
    "bucket": "of the images in the bucket that ends at a quantile of the uncertainty",
}
_ABOUT = {
    "quantile": "0.3 stands for the 30 % of images with the lowest uncertainty.",
    "calibration error": "|mean confidence \N{MINUS SIGN} mean accuracy| of these images; not the binned ECE.",
    "mutual information": "What the members disagree about. Weighted: members count by the size of their logits, for "
    "every image anew; pooled: by that over other images.",
    "\N{MINUS SIGN}cov": "Minus the covariance of the quantile's level with the curve: how it is computed is our "
    "reading, the paper does not tell.",
    "AUROC and AURC": "The chance that a wrong answer is more uncertain than a right one; and the mean error of what "
    "is accepted. Coloured where the difference to the original's entropy is beyond its interval.",
}


def write_rejection_page(study: RejectionStudy, to: str | Path) -> Path:
    """Write the page of a study and return its path."""
    title = f"Which images should {study.model} refuse?"
    parts = [_header(study, title), _table(study), *_figures(study), _about()]
    return write_document(to, title, parts, styles=("page.css", "diagnosis.css", "rejection.css"))


def rejection_figure(study: RejectionStudy, uncertainty: str, *, kind: str = "acceptance") -> Any:
    """The study as a matplotlib figure, one row a temperature: `rejection_figure(...).savefig("rejection.png")`.

    Args:
        study: What `rejection_study` found.
        uncertainty: Of the ensembles.
        kind: "acceptance" or "bucket".
    """
    figure, axes = new_figure(len(study.temperatures), len(_METRICS), width=3.6, height=2.9)
    for row, temperature in zip(axes, study.temperatures, strict=True):
        drawn = _drawn(study, uncertainty, temperature)
        colours = palette([name for name in drawn if name != ORIGINAL])
        for panel, (metric, title) in zip(row, _METRICS.items(), strict=True):
            for name, found in drawn.items():
                style = {"color": "black", "linestyle": "--"} if name == ORIGINAL else {"color": colours[name]}
                panel.plot(study.levels, found.curves[_known(kind)][metric], label=name, linewidth=1.5, **style)
            panel.set(title=f"{title}, T = {temperature:.3g}", xlabel="quantile of uncertainty")
            panel.spines[["right", "top"]].set_visible(False)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize="small")
    figure.suptitle(f"{study.model}, {study.images} images: {kind} by {UNCERTAINTIES[uncertainty]}", fontsize="medium")
    return figure


def _drawn(study: RejectionStudy, uncertainty: str, temperature: float) -> dict[str, Rejected]:
    """By the ensemble's size: the original's result and those of one uncertainty."""
    found = {
        result.order.size: result
        for result in study.results
        if result.order.temperature == temperature and result.order.uncertainty in (uncertainty, "entropy")
    }
    if len(found) == 1 and len(study.results) > 1 and uncertainty not in _uncertainties(study):
        raise ValueRangeError(
            f"rejection_figure: uncertainty must be one of the study's, {', '.join(_uncertainties(study))}; "
            f"'{uncertainty}' came. Study it with uncertainties=[...]."
        )
    return found


def _uncertainties(study: RejectionStudy) -> list[str]:
    return list(dict.fromkeys(r.order.uncertainty for r in study.results if r.order.ensemble != ORIGINAL))


def _known(kind: str) -> str:
    if kind not in _KINDS:
        raise ValueRangeError(
            f"rejection_figure: kind must be 'acceptance' or 'bucket'; got '{kind}'. Choose one of the two."
        )
    return kind


def _header(study: RejectionStudy, title: str) -> str:
    facts = [f"{study.name}, {study.images:,} images", f"{len(study.levels)} buckets"]
    facts += [f"T = {', '.join(f'{at:.3g}' for at in study.temperatures)}"]
    facts += [] if study.calibrated_on is None else [f"T fitted on {study.calibrated_on}"]
    facts += ["ensembles by their own predictions" if study.predictions == "own" else "all by the original's"]
    lead = (
        "Images are sorted by an uncertainty, and the most uncertain ones are left to somebody else. A good order "
        "keeps the errors out of what is accepted."
    )
    return top(title, lead, facts, words=study.findings())


def _table(study: RejectionStudy) -> str:
    header, *lines = study.lines()
    words = ("", " class='word'")  # the second column holds names, as the first
    head = "".join(
        f"<th scope='col'{words[place == 1]}>{escape(_minus(name))}</th>" for place, name in enumerate(header)
    )
    body = "".join(_row(found, line) for found, line in zip(study.results, lines, strict=True))
    return f"""<section class="part">
<h2>Every order of the images</h2>
<div class="wide"><table class="results left"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
</section>"""


def _row(found: Rejected, line: list[str]) -> str:
    name, size, *cells = line
    marks = {len(cells) - 3: found.better("auroc"), len(cells) - 1: found.better("aurc")}
    shown = []
    for place, cell in enumerate(cells):
        value, bracket, bounds = cell.partition(" [")
        small = f"<small>{escape(_minus(bracket.strip() + bounds))}</small>" if bracket else ""
        mark = {1: " class='better'", -1: " class='worse'"}.get(marks.get(place, 0), "")
        shown.append(f"<td{mark}><b>{escape(_minus(value))}</b>{small}</td>")
    return f"<tr><th scope='row'>{escape(name)}</th><td class='word'>{escape(size)}</td>{''.join(shown)}</tr>"


def _figures(study: RejectionStudy) -> Iterator[str]:
    for uncertainty in _uncertainties(study):
        for temperature in study.temperatures:
            drawn = _drawn(study, uncertainty, temperature)
            colours = palette([name for name in drawn if name != ORIGINAL])
            key = "".join(
                f'<span class="line" style="--c: {colours[name]}">{escape(name)}</span>'
                if name != ORIGINAL
                else '<span class="line dashed">original, by its entropy</span>'
                for name in drawn
            )
            panels = "".join(
                f'<h3>{escape(what)}</h3><div class="pictures">{"".join(_panels(study, drawn, kind))}</div>'
                for kind, what in _KINDS.items()
            )
            yield f"""<section class="part">
<h2>{escape(UNCERTAINTIES[uncertainty])}, T = {temperature:.3g}</h2>
<p class="key">{key}</p>
{panels}
</section>"""


def _panels(study: RejectionStudy, drawn: dict[str, Rejected], kind: str) -> Iterator[str]:
    for metric, title in _METRICS.items():
        ys = {name: found.curves[kind][metric] for name, found in drawn.items()}
        # Alike in all sections of the page, so that temperatures and uncertainties can be compared by eye.
        everywhere = [value for found in study.results for value in found.curves[kind][metric]]
        ends = "; ".join(f"{name} from {y[0]:.3f} to {y[-1]:.3f}" for name, y in ys.items())
        drawing = curves(
            study.levels, ys, reference=ORIGINAL, span=(min(everywhere), max(everywhere)), told=f"{title}: {ends}"
        )
        yield f"<figure><figcaption><span>{escape(title)}</span></figcaption>{drawing}</figure>"


def _about() -> str:
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _ABOUT.items())
    return f"""<footer><h2>What the words mean</h2><dl class="about">{told}</dl>
<p class="fine">After Kirsch, (Implicit) Ensembles of Ensembles: Epistemic Uncertainty Collapse in Large Models (2024),
Figure 5 and Tables 3 to 6.</p></footer>"""


def _minus(text: str) -> str:
    """Real minus signs before numbers."""
    return text.replace("-", "\N{MINUS SIGN}") if text != "-" and "log-sum" not in text else text
