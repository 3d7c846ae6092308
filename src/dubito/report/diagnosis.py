"""The page of a diagnosis: a table, the causes as bars, and histograms of scores in and out of distribution.

One self-contained file: styles and drawings are inside, nothing is loaded, and there is no script.
"""

import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from torch import Tensor

from dubito.explain.causes import SCORES, Causes, Diagnosis, Estimate, points
from dubito.report._document import top, write_document
from dubito.report._drawings import bars, histogram

_HEAD = {
    "A": "max probability",
    "B": "entropy",
    "C": "scaled entropy",
    "D": "density",
    "cause 1": "saturation, C \N{MINUS SIGN} B",
    "cause 2": "extrapolation, D \N{MINUS SIGN} C",
    "cause 3": "feature overlap, 1 \N{MINUS SIGN} D",
}
_PICTURES = {
    "max_probability": ("A", "1 \N{MINUS SIGN} max p", True),
    "entropy": ("B", "entropy", True),
    "scaled_entropy": ("C", "scaled_entropy", False),
    "density": ("D", "density, \N{MINUS SIGN}log q(z)", False),
    "norm": ("", "length of the feature, \N{DOUBLE VERTICAL LINE}z\N{DOUBLE VERTICAL LINE}", False),
    "cosine": ("", "largest cosine with a class weight", False),
}
"""By score: its letter, what is drawn, and whether the axis is logarithmic."""
_ABOUT = {
    "A, max probability": "Minus the probability of the predicted class.",
    "B, entropy": "Of the predicted probabilities: what the causes explain is all that it misses, 1 \N{MINUS SIGN} B.",
    "C, scaled entropy": "The entropy of 0.1 x logits, where nothing is saturated.",
    "D, density": "How far the feature lies from those of training images, by a mixture of Gaussians.",
    "saturation": "Probabilities so close to 1 that their order is lost. Cured by C.",
    "extrapolation": "The softmax is sure away from the training features, or unsure of ambiguous in-distribution "
    "images. Cured by D.",
    "feature overlap": "OOD images have the features of in-distribution ones. No score on these features cures it; and "
    "where the density is poor, this part is overstated.",
    "AUROC": "The chance that an OOD image is more uncertain than an in-distribution one: 50 % is guessing. Sets are "
    "balanced, with as many OOD images as in-distribution ones.",
}

_CODE = re.compile(r"`([a-z_]+)`")


def write_diagnosis_page(found: Diagnosis, to: str | Path) -> Path:
    """Write the page of a diagnosis and return its path."""
    names = list(found.by_set)
    title = f"Why does confidence fail on {names[0] if len(names) == 1 else f'{len(names)} OOD sets'}?"
    words = found.findings_by_set()
    parts = [
        _header(found, title, next(reversed(words.values()))[0]),
        *(f'<p class="note">{escape(note)}</p>' for note in found.notes),
        _table(found),
        _causes(found),
        *(_set(found, name, words[name]) for name in names),
        _about(),
    ]
    return write_document(to, title, parts, styles=("page.css", "diagnosis.css"))


def _header(found: Diagnosis, title: str, verdict: str) -> str:
    facts = [
        f"in-distribution: {found.in_distribution}, {found.rows:,} images",
        *([] if found.accuracy is None else [f"accuracy {found.accuracy:.1%}"]),
        f"{found.classes:,} classes",
        f"density fitted on {found.fitted_on}",
        f"D: {found.density}",
    ]
    lead = (
        "A model should be less sure of images that show nothing it knows. What it fails to tell apart is split into "
        "three causes, each with its own cure."
    )
    return top(title, lead, facts, verdict=_minus(verdict))


def _table(found: Diagnosis) -> str:
    header = "".join(
        f"<th scope='col'{_first(place)}>{escape(name)}<small>{escape(what)}</small></th>"
        for place, (name, what) in enumerate(_HEAD.items())
    )
    return f"""<section class="part">
<h2>AUROC of OOD against in-distribution images, and what each cause costs, in per cent</h2>
<p class="fine">Means over {found.draws} balanced draws, the {found.confidence:.0%} bootstrap interval, and the standard
deviation over draws. The three causes add up to what the entropy misses. A cause is coloured where it is the largest,
beyond the interval.</p>
<div class="wide"><table class="results"><thead><tr><th scope="col">OOD images</th>{header}</tr></thead>
<tbody>{"".join(_rows(found))}</tbody></table></div>
</section>"""


def _rows(found: Diagnosis) -> Iterator[str]:
    for causes in found.all:
        cells = [
            f"<td{_first(place, key == causes.dominant)}>{_cell(value)}</td>"
            for place, (key, value) in enumerate({**causes.auroc, **causes.causes}.items())
        ]
        yield f"<tr><th scope='row'>{escape(causes.name)}</th>{''.join(cells)}</tr>"


def _cell(value: Estimate) -> str:
    small = (f"[{points(value.low)}, {points(value.high)}]", f"±{100 * value.spread:.2f}")
    lines = "".join(f"<small>{_minus(line)}</small>" for line in small)
    return f"<b>{_minus(points(value.value))}</b>{lines}"


def _first(place: int, largest: bool = False) -> str:
    """A line stands between AUROCs and causes."""
    classes = [*(["first"] if place == len(SCORES) else []), *(["largest"] if largest else [])]
    return f" class='{' '.join(classes)}'" if classes else ""


def _causes(found: Diagnosis) -> str:
    everywhere = [value for causes in found.all for value in causes.causes.values()]
    span = (
        min(0.0, *(100 * value.low for value in everywhere)),
        max(1.0, *(100 * value.high for value in everywhere)),
    )
    drawn = "".join(_bars(causes, span) for causes in found.all)
    return f"""<section class="part">
<h2>The three causes, in points of AUROC</h2>
<p class="fine">Lines are {found.confidence:.0%} intervals. A negative part means that a cure makes it worse: the words
below say why.</p>
<div class="pictures">{drawn}</div>
</section>"""


def _bars(causes: Causes, span: tuple[float, float]) -> str:
    parts = {name: (100 * v.value, 100 * v.low, 100 * v.high) for name, v in causes.causes.items()}
    missed = 100 * (1 - causes.auroc["entropy"].value)
    return _figure(bars(parts, span), causes.name, f"{missed:.1f} points missed")


def _set(found: Diagnosis, name: str, words: list[str]) -> str:
    causes = found.by_set[name]
    drawn = "".join(_histograms(found.scores, found.ood_scores[name], causes))
    told = words if len(found.by_set) > 1 else words[1:]  # of a single set, the verdict stands at the top
    listed = "".join(f"<li>{_marked(sentence)}</li>" for sentence in told)
    return f"""<section class="part">
<h2>{escape(name)} against {escape(found.in_distribution)}</h2>
<p class="fine">Further to the right is more uncertain in A to D. Where the two hills lie on each other, a score cannot
tell them apart. The outermost half per cent is in the last bars.</p>
<p class="key"><span class="known">{escape(found.in_distribution)}</span><span class="foreign">{escape(name)}</span></p>
<div class="pictures">{drawn}</div>
<ul class="words">{listed}</ul>
</section>"""


def _histograms(inside: Mapping[str, Tensor], outside: Mapping[str, Tensor], causes: Causes) -> Iterator[str]:
    for key, values in inside.items():
        letter, title, log = _PICTURES[key]
        shift = 1.0 if key == "max_probability" else 0.0
        drawing = histogram((values + shift).numpy(), (outside[key] + shift).numpy(), log=log)
        small = f"AUROC {100 * causes.auroc[key].value:.1f} %" if key in causes.auroc else ""
        yield _figure(drawing, f"{letter}: {title}" if letter else title, small)


def _figure(drawing: str, title: str, small: str) -> str:
    return (
        f"<figure><figcaption><span>{escape(title)}</span><small>{escape(small)}</small></figcaption>{drawing}</figure>"
    )


def _about() -> str:
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _ABOUT.items())
    return f"""<footer><h2>What the words mean</h2><dl class="about">{told}</dl>
<p class="fine">Scores and causes are those of Pearce, Brintrup and Zhu, Understanding Softmax Confidence and
Uncertainty (2021), section 6 and Table 1.</p></footer>"""


def _marked(sentence: str) -> str:
    """Names of scores as code."""
    return _CODE.sub(r"<code>\1</code>", escape(_minus(sentence)))


def _minus(text: str) -> str:
    """Real minus signs before numbers."""
    for before in (" ", "[", "\n"):
        text = text.replace(f"{before}-", f"{before}\N{MINUS SIGN}")
    return f"\N{MINUS SIGN}{text[1:]}" if text.startswith("-") else text
