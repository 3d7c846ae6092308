"""`dubito score`, and the scores that --score, --set, --learn-from, --head and --load name, for every command."""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Assignments, CommandResult, Screen, command, option, parse_setting, read_settings
from dubito.cli.calibrate import Saved, calibrated
from dubito.errors import ArtefactError, DubitoError, MissingColumnError, NotFittedError
from dubito.storage import Place, export, write_csv

if TYPE_CHECKING:
    from dubito.scores.available import AvailableScores
    from dubito.types import Score

_ENDINGS = (".csv", ".npz")
_SHOWN = 6
"""Scores that have a column of the list where none are named: thirty would repeat the images on several screens."""
_HEAD = "head"
_OTHERS = {"density": "--score density, with --set density.covariance=full or the like", _HEAD: "--head NAME"}
"""By the score of a remark: how to choose another one."""
_SELF = "Each of them is compared with itself, and its nearest neighbour is itself. Pass other images of the same kind."


_Train = Annotated[
    Place | None,
    Option(
        "--learn-from",
        metavar="CACHE",
        help="Images like those that the model was trained on, for scores that learn. Without --score, density takes "
        "the covariances that these images allow in seconds, and a note says which.",
    ),
]
_Settings = Annotated[
    list[Assignments],
    Option("--set", metavar="NAME.KEY=VALUE", parser=parse_setting, help="A setting: neighbours.k=5."),
]


@dataclass
class NamedScores:
    """The options of commands whose functions fit the scores themselves."""

    score: options.Scores = field(default_factory=list)
    settings: _Settings = field(default_factory=list)

    def made(self) -> dict[str, "Score"] | None:
        """The scores that `--score` names, with the settings of `--set`, not fitted; None where none is named."""
        from dubito.scores.registry import make_score

        if self.settings and not self.score:
            raise BadParameter("--set belongs to a score, and none is named. Pass --score NAME, too.")
        values = _values(self.settings, self.score)
        return {name: make_score(name, **values.get(name, {})) for name in self.score} or None


@dataclass
class ScoreOptions(NamedScores):
    """The options of commands that use several scores, ready to score."""

    train: _Train = None
    head: Annotated[
        list[str],
        option(
            "A trained uncertainty head of `dubito list heads`, a folder, a hub id, or auto for the one that fits.",
            "NAME|PATH|HUB",
        ),
    ] = field(default_factory=list)
    load: Annotated[Path | None, option("Use the scores that `dubito score --save DIR` kept.", "DIR")] = None

    def ready(
        self,
        screen: Screen,
        table: "dubito.Table",
        learned: "dubito.Table | None" = None,
        *,
        calibration: Place | None = None,
    ) -> dict[str, "Score"]:
        """The scores, ready for a table; without names all that can be made, and a note says what is left out.

        Args:
            screen: Where the notes go.
            table: What will be scored.
            learned: The cache of `--learn-from`, where the command has opened it itself.
            calibration: What the logits of the table were calibrated by: those to learn from are, too.
        """
        from dubito.scores.available import AvailableScores, available_scores
        from dubito.scores.registry import SCORES
        from dubito.validate import check_same_model, warn_shared

        if self.train is not None and learned is None:
            learned = calibrated(dubito.open(self.train), calibration)
            check_same_model(table, {"train": learned}, by="scores that learn")
            warn_shared(table, learned, by="scores that learn", what="train", harm=_SELF)
        loaded = _load_scores(self.load) if self.load else {}
        # A head is trained by `dubito train`, never implicitly; one that is named by --head stands for the name.
        chosen = AvailableScores(_open_heads(screen, self.head, table))
        wanted = [name for name in dict.fromkeys(self.score or loaded) if not (self.head and name == _HEAD)]
        values = _values(self.settings, [name for name in wanted or SCORES if name not in loaded])
        for name in wanted:
            try:
                if name in loaded:
                    loaded[name].check_columns(table)
                    chosen.scores[name] = loaded[name]
                else:
                    chosen.scores |= available_scores(table, learned, names=[name], settings=values).scores
            except NotFittedError as error:  # noqa: PERF203 (a handful of scores)
                raise NotFittedError(f"{error} Use --learn-from CACHE.") from error
            except DubitoError as error:
                if self.score:
                    raise
                chosen.left_out[name] = str(error)
        if not self.score and not loaded:
            every = available_scores(table, learned, settings=values, head=not self.head)
            chosen = replace(every, scores=chosen.scores | every.scores)
        _note(screen, chosen)
        if not chosen.scores:
            learn = "Pass images for scores to learn from: --learn-from CACHE." if chosen.unfitted else "See the notes."
            raise MissingColumnError(f"scores: nothing can be computed from {table.name}. {learn}")
        return chosen.scores


@dataclass
class OneScore:
    """The options of commands that use one score."""

    score: Annotated[
        str | None, Option("--score", "-s", metavar="NAME", help="The uncertainty; by default the entropy.")
    ] = None
    settings: _Settings = field(default_factory=list)
    train: _Train = None
    head: Annotated[str | None, option("A trained uncertainty head as the score.", "NAME|PATH|HUB")] = None

    def ready(self, screen: Screen, table: "dubito.Table") -> "Score | None":
        """The one score that `--score` or `--head` names, ready; None for neither."""
        score, head = self.score, self.head
        if score and head and score != _HEAD:
            raise BadParameter(f"--score and --head both name the score. Pass --score {score} or --head {head}.")
        if not score and not head:
            if self.settings or self.train:
                raise BadParameter(
                    "--set and --learn-from belong to a score, and none is named. Pass --score NAME, too."
                )
            return None
        several = ScoreOptions([score or _HEAD], self.settings, self.train, [head] if head else [])
        scores = several.ready(screen, table)
        if len(scores) > 1:
            raise BadParameter(f"--score must name one score; got {', '.join(scores)}. Set {score}.of with --set.")
        return next(iter(scores.values()))


@command
def score(
    screen: Screen,
    cache: options.Cache,
    *,
    scores: ScoreOptions,
    to: Annotated[Path | None, option("Write the scores of all images as .csv or .npz.", "FILE")] = None,
    top: Annotated[int, option("Show the N most uncertain images.", "N", min=0)] = 10,
    save: Annotated[Path | None, option("Keep the fitted scores there.", "DIR")] = None,
    calibration: Saved = None,
) -> None:
    """Score every image of a CACHE: higher = more uncertain, always.

    The most uncertain ones are shown, by the first score.
    """
    if to is not None and to.suffix.lower() not in _ENDINGS:
        raise BadParameter(f"--to takes a file that ends in {' or '.join(_ENDINGS)}; got '{to}'.")
    with screen.waiting("opening the cache"):
        table = calibrated(dubito.open(cache), calibration)
    with screen.waiting("scoring"):
        chosen = scores.ready(screen, table, calibration=calibration)
        columns = _columns(table, chosen)
    if save is not None:
        for name, one in chosen.items():
            dubito.save_score(one, save / folder_name(name))
    if to is not None:
        _write(to, columns)
    shown = [name for name in chosen if name != "max_probability"]  # not beside the probability
    rest = [] if scores.score or scores.load else shown[_SHOWN:]
    also = f"also computed: {', '.join(rest)}. Choose with --score NAME, or write all of them with --to FILE."
    result = _summary(cache, columns, chosen, top, shown=[name for name in shown if name not in rest])
    screen.show(result, *([also] if rest else []), written={"to": to, "saved": save})


def _columns(table: "dubito.Table", scores: Mapping[str, "Score"]) -> dict[str, Any]:
    """Every image: its name, predicted class, probability and label, and its uncertainty by every score."""
    import torch

    columns: dict[str, Any] = {"id": table.id}
    if "logit" in table:
        best = [batch.logit.double().softmax(-1).max(-1) for batch in table.batches("logit")]
        predicted = torch.cat([one.indices for one in best])
        columns["predicted"] = predicted.numpy()
        if table.classes:
            columns["predicted_class"] = [table.classes[index] for index in predicted.tolist()]
        columns["probability"] = torch.cat([one.values for one in best]).numpy()
    if "label" in table:
        columns["label"] = table.label.numpy()
    return columns | {name: score.score(table).numpy() for name, score in scores.items()}


def _write(path: Path, columns: Mapping[str, Any]) -> None:
    """Write every row as .csv, or as the arrays of an .npz file, which has no class names."""
    import numpy as np

    if path.suffix.lower() == ".csv":
        write_csv(path, [list(columns), *zip(*columns.values(), strict=True)])
        return
    data = io.BytesIO()
    np.savez_compressed(data, **{name: values for name, values in columns.items() if name != "predicted_class"})
    export(path, data.getvalue())


def _summary(
    cache: Place, columns: Mapping[str, Any], scores: Mapping[str, "Score"], top: int, *, shown: Sequence[str]
) -> CommandResult:
    """The most uncertain images by the first score; equal ones in the table's order.

    Args:
        cache: Where the images are.
        columns: All that is known of every image.
        scores: The scores.
        top: How many images.
        shown: Names of scores that have a column for people; the JSON has all of them.
    """
    first, count = next(iter(scores)), len(columns["id"])
    order = (-columns[first]).argsort(kind="stable")[:top].tolist()
    predicts = "predicted" in columns  # a backbone without a classifying layer does not
    images: list[dict[str, Any]] = [
        {
            "id": str(columns["id"][row]),
            "predicted": int(columns["predicted"][row]) if predicts else None,
            "predicted_class": columns["predicted_class"][row] if "predicted_class" in columns else None,
            "probability": float(columns["probability"][row]) if predicts else None,
            "scores": {name: float(columns[name][row]) for name in scores},
        }
        for row in order
    ]
    return CommandResult(
        f"{cache}: the {f'{len(order)} ' if len(order) != 1 else ''}most uncertain of {count} images, by {first}",
        {
            "cache": str(cache),
            "rows": count,
            "scores": {name: {"kind": one.kind, "needs": list(one.needs)} for name, one in scores.items()},
            "order_by": first,
            "top": images,
        },
        rows=[
            {
                "image": one["id"],
                "predicted": (one["predicted_class"] or str(one["predicted"])).partition(",")[0],
                "probability": one["probability"],
                **{name: one["scores"][name] for name in shown},
            }
            if predicts
            else {"image": one["id"], **{name: one["scores"][name] for name in shown}}
            for one in images
        ],
    )


def folder_name(name: str) -> str:
    """Where `--save` keeps a score: its name, without what file systems do not take.

    >>> folder_name("head:org/mine")
    'head_org_mine'
    """
    return re.sub(r"[^\w.-]", "_", name)


def _values(settings: Sequence[Assignments], made: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By score, the settings as values of its own types."""
    from dubito.scores.registry import SCORES, make_score
    from dubito.types import Score

    def inner(text: str) -> Score:
        """A score within a score: NAME, or NAME:ENSEMBLE."""
        name, _, of = text.partition(":")
        return make_score(name, **({"of": of} if of else {}))

    texts: dict[str, dict[str, str]] = {}
    for place, text in (item for one in settings for item in one.items()):
        name, _, key = place.partition(".")
        if name not in made:
            raise BadParameter(f"--set names '{name}', which is not made here, only {', '.join(made) or 'none'}.")
        texts.setdefault(name, {})[key] = text
    return {
        name: read_settings(SCORES[name], texts[name], f"--set: {name}", parsers={Score: inner})
        for name in texts
        if name in SCORES
    }


def _note(screen: Screen, chosen: "AvailableScores") -> None:
    """What was left out, except for scores of probes that have not run, which nobody expects."""
    if chosen.unfitted:
        names = ", ".join(chosen.unfitted)
        screen.note(f"left out: {names}, which learn first. Pass in-distribution images: --learn-from CACHE.")
    by_reason: dict[str, list[str]] = {}
    for name, reason in chosen.left_out.items():
        if name not in chosen.unfitted and name not in chosen.not_extracted:
            by_reason.setdefault(reason, []).append(name)
    for reason, scores in by_reason.items():
        repair = ". Name it with --head" if scores == [_HEAD] else ""
        shown = reason if reason.startswith(scores[0].partition(":")[0]) else f"{', '.join(scores)}: {reason}"
        screen.note(f"left out: {shown}{repair}")
    for remark in chosen.remarks:
        screen.note(f"{remark} For another one: {_OTHERS[remark.partition(':')[0]]}.")


def _load_scores(folder: Path) -> dict[str, "Score"]:
    folders = sorted(path.parent for path in folder.glob("*/score.json"))
    if not folders:
        raise ArtefactError(f"--load: no saved scores in '{folder}'. Save some: dubito score CACHE --save {folder}.")
    scores = {path.name: dubito.load_score(path) for path in folders}
    times = Counter(score.name for score in scores.values())
    # Several heads have one name: their folders distinguish them.
    return {score.name if times[score.name] == 1 else name: score for name, score in scores.items()}


def _open_heads(screen: Screen, values: Sequence[str], table: "dubito.Table") -> dict[str, "Score"]:
    """The heads of `--head`: "head" if there is one, "head:NAME" if there are several."""
    from dubito.heads.shelf import entry_for

    heads: dict[str, Score] = {}
    for name, value in options.short_names(dict.fromkeys(values)).items():
        entry = entry_for(table.provenance) if value == "auto" else None
        if value == "auto" and entry is None:
            model = (table.provenance.model if table.provenance else None) or "its model"
            raise ArtefactError(
                f"--head auto: no head here was trained for {model} with these weights and this transform, which made "
                f"{table.name}. See `dubito list heads`, or train one with `dubito train`."
            )
        if entry is not None:
            screen.note(f"--head auto: {entry.name}, trained on: {entry.about}.")
        head = dubito.UncertaintyHead.from_pretrained(str(entry.path) if entry else value)
        head.check_columns(table)
        heads[f"{_HEAD}:{name}"] = head
    return {_HEAD: head} if len(heads) == 1 else heads
