"""`dubito score`: the uncertainty of every image of a cache, and the most uncertain ones."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, grid, short

if TYPE_CHECKING:
    from torch import Tensor

    from dubito.table import Table

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
    if to is not None and to.suffix.lower() not in _ENDINGS:
        raise typer.BadParameter(f"--to takes a file that ends in {' or '.join(_ENDINGS)}; '{to}' came.")
    with screen.waiting("opening the cache"):
        from dubito.cache import open_cache
        from dubito.cli._scores import choose_scores, folder_name, open_fit, open_heads, parse_settings

        wanted = parse_settings(settings)
        table = open_cache(cache)
        learn_from = open_fit(fit, cache)
    with screen.waiting("scoring"):
        heads = open_heads(head, table)
        chosen = choose_scores(score, wanted, table, learn_from, load, screen, heads=heads)
        found = {name: one.score(table) for name, one in chosen.items()}
        prediction, probability = _predictions(table)
    for name, one in chosen.items() if save else ():
        dubito.save_score(one, Path(save or "") / folder_name(name))
    if to is not None:
        _write(to, table, prediction, probability, found)
    rows = _top(table, prediction, probability, found, top)
    result = {
        "cache": str(cache),
        "rows": len(table),
        "scores": {name: {"kind": one.kind, "needs": list(one.needs)} for name, one in chosen.items()},
        "order_by": next(iter(found)),
        "top": rows,
        "to": str(to) if to else None,
        "saved": str(save) if save else None,
    }
    screen.result(result, *_shown(result))


def _predictions(table: "Table") -> tuple["Tensor", "Tensor"]:
    """The predicted class of every row and its probability."""
    import torch

    best = [batch.logit.double().softmax(-1).max(-1) for batch in table.batches("logit")]
    return torch.cat([one.indices for one in best]), torch.cat([one.values for one in best])


def _top(
    table: "Table", prediction: "Tensor", probability: "Tensor", found: dict[str, "Tensor"], top: int
) -> list[Any]:
    """The most uncertain rows by the first score; equal ones in the table's order."""
    order = next(iter(found.values())).argsort(descending=True, stable=True)[:top]
    ids: Any = table.select("id").rows(order).id if len(order) else []
    return [
        {
            "id": str(name),
            "prediction": int(prediction[row]),
            "class": table.classes[int(prediction[row])] if table.classes else None,
            "probability": float(probability[row]),
            "scores": {key: float(values[row]) for key, values in found.items()},
        }
        for name, row in zip(ids, order.tolist(), strict=True)
    ]


def _write(to: Path, table: "Table", prediction: "Tensor", probability: "Tensor", found: dict[str, "Tensor"]) -> None:
    columns: dict[str, Any] = {"id": table.id, "prediction": prediction.numpy()}
    if table.classes and to.suffix.lower() == ".csv":
        columns["class"] = [table.classes[index] for index in prediction.tolist()]
    columns["probability"] = probability.numpy()
    if "label" in table:
        columns["label"] = table.label.numpy()
    columns |= {name: values.numpy() for name, values in found.items()}
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix.lower() == ".npz":
            _write_npz(to, columns)
        else:
            _write_csv(to, columns)
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
