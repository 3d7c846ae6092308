"""`dubito score`: the uncertainty of every image of a cache, and the most uncertain ones."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, grid, short

if TYPE_CHECKING:
    from torch import Tensor

    from dubito.table import Table
    from dubito.types import Score

_ENDINGS = (".csv", ".npz")


def score(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    score: options.Scores = [],  # noqa: B006 (typer copies it)
    fit: options.Fit = None,
    settings: options.Settings = [],  # noqa: B006
    head: options.Heads = [],  # noqa: B006
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="All images' scores as .csv or .npz.")] = None,
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Show the N most uncertain images.")] = 10,
    save: Annotated[Path | None, typer.Option("--save", metavar="DIR", help="Keep the fitted scores there.")] = None,
    load: options.Load = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Score every image of a CACHE: higher = more uncertain, always.

    The most uncertain ones are shown, by the first score.
    """
    screen = Screen.current(json=json, debug=debug)
    wanted = options.parse_settings(settings)
    if to is not None and to.suffix.lower() not in _ENDINGS:
        raise typer.BadParameter(f"--to takes a file that ends in {' or '.join(_ENDINGS)}; got '{to}'.")
    with screen.waiting("opening the cache"):
        from dubito.cli._scores import ready_scores

        table = dubito.open(cache)
    with screen.waiting("scoring"):
        chosen = ready_scores(cache, table, screen, names=score, settings=wanted, fit=fit, heads=head, load=load)
        found = _scored(table, chosen)
    if save is not None:
        _save(chosen, save)
    if to is not None:
        _write(to, found)
    result = {
        "cache": str(cache),
        "rows": len(table),
        "scores": {name: {"kind": one.kind, "needs": list(one.needs)} for name, one in chosen.items()},
        "order_by": next(iter(chosen)),
        "top": _top(found, top),
        "to": str(to) if to else None,
        "saved": str(save) if save else None,
    }
    screen.result(result, *_shown(result))


@dataclass(frozen=True)
class _Scored:
    """All rows of a table: the predicted class, its probability, and by name the uncertainties."""

    table: "Table"
    prediction: "Tensor"
    probability: "Tensor"
    scores: dict[str, "Tensor"]


def _scored(table: "Table", scores: dict[str, "Score"]) -> _Scored:
    import torch

    found = {name: score.score(table) for name, score in scores.items()}
    best = [batch.logit.double().softmax(-1).max(-1) for batch in table.batches("logit")]
    return _Scored(table, torch.cat([one.indices for one in best]), torch.cat([one.values for one in best]), found)


def _save(scores: dict[str, "Score"], to: Path) -> None:
    from dubito.cli._scores import folder_name

    for name, score in scores.items():
        dubito.save_score(score, to / folder_name(name))


def _top(found: _Scored, top: int) -> list[Any]:
    """The most uncertain rows by the first score; equal ones in the table's order."""
    classes = found.table.classes
    order = next(iter(found.scores.values())).argsort(descending=True, stable=True)[:top]
    ids: Any = found.table.select("id").rows(order).id if len(order) else []
    return [
        {
            "id": str(name),
            "prediction": int(found.prediction[row]),
            "class": classes[int(found.prediction[row])] if classes else None,
            "probability": float(found.probability[row]),
            "scores": {key: float(values[row]) for key, values in found.scores.items()},
        }
        for name, row in zip(ids, order.tolist(), strict=True)
    ]


def _write(to: Path, found: _Scored) -> None:
    table, is_csv = found.table, to.suffix.lower() == ".csv"
    columns: dict[str, Any] = {"id": table.id, "prediction": found.prediction.numpy()}
    if table.classes and is_csv:
        columns["class"] = [table.classes[index] for index in found.prediction.tolist()]
    columns["probability"] = found.probability.numpy()
    if "label" in table:
        columns["label"] = table.label.numpy()
    columns |= {name: values.numpy() for name, values in found.scores.items()}
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        (_write_csv if is_csv else _write_npz)(to, columns)
    except OSError as error:
        raise dubito.DubitoError(f"--to: '{to}' cannot be written ({error.strerror}). Give another place.") from error


def _write_csv(to: Path, columns: dict[str, Any]) -> None:
    with to.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_npz(to: Path, columns: dict[str, Any]) -> None:
    import numpy as np

    with to.open("wb") as file:
        np.savez_compressed(file, **columns)


def _shown(result: dict[str, Any]) -> list[Any]:
    # Minus the probability is not shown beside the probability.
    names = [name for name in result["scores"] if name != "max_probability"]
    rows = [
        [
            entry["id"],
            short(entry["class"] or str(entry["prediction"])),
            f"{entry['probability']:.3f}",
            *(f"{entry['scores'][name]:.3f}" for name in names),
        ]
        for entry in result["top"]
    ]
    title = f"{result['cache']}: the {len(rows)} most uncertain of {result['rows']} images, by {result['order_by']}"
    header = ["image", "prediction", "probability", *(name.replace("_", "\n") for name in names)]
    shown: list[Any] = [grid(title, header, rows, numbers=len(names) + 1)] if rows else []
    shown += [f"scores of all {result['rows']} images: {result['to']}"] if result["to"] else []
    return shown + ([f"fitted scores: {result['saved']}"] if result["saved"] else [])
