"""The page of an ensemble: mutual information against the size of sub-ensembles, as a table, a curve and histograms.

One self-contained file: styles and drawings are inside, nothing is loaded, and there is no script.
"""

from html import escape
from pathlib import Path

from dubito.explain.collapse import Collapse, EnsembleDiagnosis
from dubito.report._document import top, write_document
from dubito.report._drawings import histogram
from dubito.report._falls import fall

_ABOUT = {
    "MI": "Mutual information of class and member, in nats: how much members disagree about an image. It is the "
    "epistemic part of the uncertainty; what is left is the aleatoric one, on which members agree.",
    "24 x 1, 12 x 2 ...": "The same members as 24 single ones, as 12 pairs, and so on; members of a sub-ensemble speak "
    "with one voice, their mean. MI is then that between sub-ensembles.",
    "share": "MI divided by all uncertainty, the entropy of the mean over all members.",
    "by averaging": "What would be left of MI if members were alike and differed little: averaging alone makes "
    "sub-ensembles agree.",
    "AUROC": "The chance that MI of an OOD image is above that of an in-distribution one: 50 % is guessing.",
}


def write_ensemble_page(found: EnsembleDiagnosis, to: str | Path) -> Path:
    """Write the page of an ensemble and return its path."""
    title = "Do your members disagree?" if len(found.ensembles) == 1 else "Do larger models disagree less?"
    parts = [_header(found, title), _table(found), _falls(found), *map(_set, found.ensembles), _about()]
    return write_document(to, title, parts, styles=("page.css", "diagnosis.css", "ensemble.css"))


def _header(found: EnsembleDiagnosis, title: str) -> str:
    first = found.ensembles[0]
    sizes = "" if len(found.ensembles) == 1 else f", {len(found.ensembles)} sizes of models"
    facts = [f"{first.name}, {first.rows:,} images", f"{first.members} {found.of}{sizes}", first.order]
    if first.ood:
        facts.append(f"OOD: {first.ood}")
    lead = (
        "What members of an ensemble disagree about is what they do not know. Put together into sub-ensembles, they "
        "seem to agree: nothing has been learned by that."
    )
    return top(title, lead, facts, verdict=found.verdict, words=found.findings()[1:])


def _table(found: EnsembleDiagnosis) -> str:
    header, *lines = found.lines()
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in header)
    rows = "".join(
        f"<tr><th scope='row'>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in lines
    )
    return f"""<section class="part">
<h2>Mutual information of sub-ensembles</h2>
<div class="wide"><table class="results"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
</section>"""


def _falls(found: EnsembleDiagnosis) -> str:
    """MI against size, of sub-ensembles where there are several, and of models."""
    drawn = [_fall_of(one) for one in found.ensembles if len(one.levels) > 1 and one.kind != "same"]
    if found.decay is not None:
        points = [(one.key or 1.0, *one.epistemic[:3]) for one in found.ensembles]
        drawn.insert(0, _figure(fall(points), "all members, by size of models", "MI in nats"))
    if not drawn:
        return ""
    return f"""<section class="part">
<h2>How it falls</h2>
<p class="fine">Both axes are logarithmic. Vertical lines are {found.confidence:.0%} intervals; dashed is what averaging
alone leaves.</p>
<div class="pictures">{"".join(drawn)}</div>
</section>"""


def _fall_of(one: Collapse) -> str:
    points = [(float(level.size), *level.information[:3]) for level in one.levels]
    expected = [(float(level.size), level.expected) for level in one.levels]
    title = "by size of sub-ensembles" if one.key is None else f"models of {one.key:g}"
    exponent = "" if one.decay is None else f"s^\N{MINUS SIGN}{one.decay.exponent.value:.2f}"
    return _figure(fall(points, expected), title, exponent)


def _set(one: Collapse) -> str:
    """MI of in-distribution and OOD images, by size of sub-ensembles."""
    if one.ood is None:
        return ""
    drawn = "".join(
        _figure(
            histogram(one.scores[level.size].numpy(), one.ood_scores[level.size].numpy(), log=True),
            str(level),
            "" if level.auroc is None else f"AUROC {100 * level.auroc.value:.1f} %",
        )
        for level in one.levels
    )
    of = "" if one.key is None else f", models of {one.key:g}"
    return f"""<section class="part">
<h2>{escape(one.ood)} against {escape(one.name)}{escape(of)}</h2>
<p class="fine">Mutual information of every image, in nats, on a logarithmic axis. Further to the right, members
disagree more.</p>
<p class="key"><span class="known">{escape(one.name)}</span><span class="foreign">{escape(one.ood)}</span></p>
<div class="pictures">{drawn}</div>
</section>"""


def _figure(drawing: str, title: str, small: str) -> str:
    return (
        f"<figure><figcaption><span>{escape(title)}</span><small>{escape(small)}</small></figcaption>{drawing}</figure>"
    )


def _about() -> str:
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _ABOUT.items())
    return f"""<footer><h2>What the words mean</h2><dl class="about">{told}</dl>
<p class="fine">Kirsch, (Implicit) Ensembles of Ensembles (2024), section 3. What averaging alone leaves is
dubito's own.</p></footer>"""
