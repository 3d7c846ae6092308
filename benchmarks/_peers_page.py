"""The table of benchmarks/peers.py, and its page of the documentation."""

from typing import Any

from _peers_guarantees import ALLOWED, DRAWN, DRAWS, GRID

MEMORY = 50
"""Megabytes; rows in which ours needs less are not listed as larger."""

HEAD = (
    "what",
    "peer",
    "data",
    "scored",
    "ours: fit + score",
    "theirs: fit + score",
    "ratio",
    "MB: ours, theirs",
    "answers",
)


def line(row: dict[str, Any]) -> str:
    """One row while the race runs."""
    if row["failed"]:
        return f"{row['name']}: failed ({', '.join(row['failed'])})"
    times = " / ".join(f"{row[side]['seconds']:.3g} s, {row[side]['megabytes']:.0f} MB" for side in ("ours", "theirs"))
    return f"{row['name']}: {row['ratio']:.2f} ({times}; {answers(row)})"


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table and of the page."""
    both = ("ours", "theirs")
    sides = [duration(row[side]) if side in row else "failed" for side in both]
    memory = ", ".join(f"{row[side]['megabytes']:.0f}" if side in row else "-" for side in both)
    ratio = "-" if "ratio" not in row else f"{row['ratio']:.2f}" if row["same_work"] else f"({row['ratio']:.2f})"
    return [row["what"], row["peer"], row["data"], f"{row['scored']:,}", *sides, ratio, memory, answers(row)]


def duration(run: dict[str, Any]) -> str:
    """Of fitting, where anything is fitted, and of scoring."""
    fit = f"{run['fit']:.3g} + " if run["fit"] > 1e-4 else ""
    return f"{fit}{run['score']:.3g} s"


def answers(row: dict[str, Any]) -> str:
    """Whether answers are equal, and if not, by how much and why."""
    if "answers" not in row:
        return "-"
    gap = row["answers"]
    text = gap["verdict"]
    if text == "equal":
        largest = gap.get("max_relative")
        return text if largest is None else f"{text} (to {largest:.0e})" if largest else f"{text} (to the last digit)"
    if "rank_correlation" in gap:
        text += f" (rank correlation {gap['rank_correlation']:.5f}, largest difference {gap['max_absolute']:.2g})"
    else:
        pairs = [(key, row["ours"]["figures"][key], value) for key, value in row["theirs"]["figures"].items()]
        text = "; ".join(f"{key.replace('_', ' ')} {ours:.4g}, theirs {theirs:.4g}" for key, ours, theirs in pairs)
    figures = [row[side].get("figures", {}).get("auroc") for side in ("ours", "theirs")]
    if gap["verdict"] == "different" and None not in figures:
        text += f"; AUROC of OOD images {figures[0]:.4f}, theirs {figures[1]:.4f}"
    return text + (f": {row['why']}" if row["why"] else "")


def table(results: list[dict[str, Any]]) -> str:
    """In columns of one width."""
    lines = [[*HEAD], *(cells(row) for row in results)]
    widths = [max(len(one[place]) for one in lines) for place in range(len(HEAD) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(one, widths, strict=False)), one[-1]]) for one in lines
    )


def shown(row: dict[str, Any], name: str) -> str:
    """Both values of a figure."""
    both = [row[side]["figures"].get(name) for side in ("ours", "theirs")]
    return "" if None in both else f", {both[1]:.4g} against dubito's {both[0]:.4g}"


def in_markdown(rows: list[dict[str, Any]]) -> str:
    """The same as Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(one) + " |" for one in lines)


def page(summary: dict[str, Any]) -> str:
    """The page of the documentation."""
    rows = summary["rows"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    ratios = [row["ratio"] for row in rows if "ratio" in row and row["same_work"]]
    slower = [
        f"- **{row['name']}**: dubito takes {row['ratio']:.2f} times as long"
        + (f", but {row['why']}." if not row["same_work"] else ".")
        for row in rows
        if row.get("ratio", 0) > 1
    ]
    larger = [
        f"- **{row['name']}**: the peer needs {row['theirs']['megabytes']:.0f} MB, dubito "
        f"{row['ours']['megabytes']:.0f} MB."
        for row in rows
        if row.get("memory_ratio", 0) > 1 and row["ours"]["megabytes"] > MEMORY
    ]
    worse = [f"- **{row['name']}**: {name}{shown(row, name)}." for row in rows for name in row.get("worse", [])]
    failed = [f"- {row['name']}, {side}: {text}" for row in rows for side, text in row["failed"].items()]
    return PAGE.format(
        date=summary["date"],
        versions=", ".join(f"{name} {number}" for name, number in summary["versions"].items()),
        threads=summary["threads"],
        repeats=summary["repeats"],
        count=len(ratios),
        faster=sum(ratio <= 1 for ratio in ratios),
        tables="\n\n".join(
            f"## {kind}\n\n{in_markdown([row for row in rows if row['kind'] == kind])}" for kind in kinds
        ),
        better="\n".join(slower + larger + worse) or "In no row of this run.",
        draws=f"{DRAWS:,}",
        grid=len(GRID),
        drawn=f"{DRAWN:,}",
        allowed=f"{100 * ALLOWED:g} %",
        memory=MEMORY,
        failed="\n".join(failed) or "Nothing.",
    )


PAGE = """# Compared with other libraries

Several libraries compute some of what dubito computes. This page compares them: the same columns, the same number of
threads, every run in a process of its own. It is written by `benchmarks/peers.py`:

<!-- not run: installs the peers, and takes an hour -->
```bash
python benchmarks/peers.py --data DIR --images cifar10.npz --docs docs/peers.md
```

Measured on {date} with {threads} threads, the best of {repeats} runs that take turns (of one run, if it takes more than
a minute; of seven, if less than a second): {versions}.

dubito is as fast as the peer or faster in {faster} of {count} rows. A ratio is our seconds over the peer's: below 1,
dubito is faster. It stands in brackets, and is not counted, where the two do not do the same work. Memory is what the
process grows by, beyond the columns and the imported libraries. Columns are synthetic, of the size under *data*, with
as many images to learn from. Of the images to score, a tenth are out-of-distribution; fewer are scored where all of
them would take one of the two an hour or more. Answers are *equal* if they differ by a ten-thousandth of the largest at
most, and how far they do stands beside. dubito computes in float64 where the order of images depends on it; most peers
compute in float32.

{tables}

## Where the peer is better

By more than 0.001 in a figure, by any time, or in memory if dubito needs more than {memory} MB:

{better}

In the rows of label issues, read precision together with recall; in those of sets, coverage together with size: small
sets cannot cover the tenth of the images that is out-of-distribution, whose classes the model does not have. A
guarantee is violated in a draw if more of the accepted images are wrong than the risk allows, which may happen in
{allowed} of the {draws} draws of {drawn} calibration images each; *kept coverage* is the share of images that is
accepted, 0 in draws without a threshold. MAPIE tests fixed thresholds: by default 100, with a correction for many
tests; or in *sequence*, from the strictest on, here on a grid of {grid} that is finer near 1. *threshold* is the test
behind `Guard.fit` with the same probabilities; *guard* is `Guard.fit` itself, which sets a tenth of the images aside,
selects and scales a score on them, and compares the images that it decides on with those that it was calibrated on.

## What did not run

{failed}

## What is not compared

- Probes, gradients and extraction, which need images: the peers have no cache to start from.
- Matrix and Dirichlet scaling at 1,000 classes: a million parameters, and hours. `calibrate` leaves them out there.
- Weighted prediction sets: TorchCP's need the images, and a network of its own that tells two data sets apart.
- Conformal regression, Bayesian networks, and what trains a network: dubito takes it as it is.
- Detectors that dubito does not have: ODIN, DICE, OpenMax, SHE, VRA, RankFeat and others of pytorch-ood.
"""
