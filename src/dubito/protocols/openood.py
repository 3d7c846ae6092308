"""OpenOOD v1.5 on your own model: its image lists, its near and far OOD sets, and its table, in its conventions.

Zhang et al., OpenOOD v1.5: Enhanced Benchmark for Out-of-Distribution Detection (2023). For every OOD set, against the
in-distribution test images (or these and the covariate-shifted ones: full spectrum), in per cent:

    FPR@95    share of in-distribution images at or above the threshold that finds 95 % of the OOD images
    AUROC     Pr(u(ood) > u(id)) + Pr(equal) / 2
    AUPR_IN   area under precision and recall where in-distribution images are the positives and low u finds them
    AUPR_OUT  the same where OOD images are the positives and high u finds them
    ACC       accuracy of the model on the in-distribution images, the same in every row

`nearood` and `farood` are means over the near and the far sets, each set counting the same. Where OpenOOD's conventions
differ from those of `metrics`, OpenOOD's are used here, so that figures compare with its leaderboard: points
of precision and recall at distinct scores, and (0, 1), are joined by straight lines (scikit-learn's `auc`), where
`metrics.average_precision` takes steps. FPR@95 is `metrics.fpr_at_tpr` with OOD images as positives, as in v1.5; the
first version had in-distribution images as positives there, so its figures are others. One difference is left: OpenOOD
drops thresholds that lie on a line with their neighbours, so where images of both kinds share scores, its FPR@95 may
be that of the next threshold.

Images are found as OpenOOD's download script lays them out: `benchmark_imglist/imagenet/test_ninco.txt` and so on, with
a path and a label in every line, and the images in `images_largescale` and `images_classic`. Nothing is downloaded.

Two deviations. Every set goes through the model's own transform; OpenOOD resizes the short side to 256 (CIFAR: 32) by
bilinear interpolation, crops 224 (32) and normalises, unless torchvision's weights bring a transform, and never resizes
ImageNet-C. And settings of scores are not searched on OpenOOD's OOD validation images: no OOD image is used for that.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dubito.cache import extract
from dubito.data.files import FileImages
from dubito.data.image_set import some
from dubito.errors import DubitoError, ImagesError, TableError
from dubito.evaluate.evaluate import check_any_scores
from dubito.metrics import auroc, fpr_at_tpr, join_ood, wrong_predictions
from dubito.models.load import as_classifier
from dubito.result import Axes, Result, axes
from dubito.scores.available import AvailableScores, available_scores, requested_scores
from dubito.storage import Place, to_place
from dubito.table import Table
from dubito.types import Classifier, Json, Score
from dubito.validate import check_choice, check_number, check_same_model, warn_shared

NEAR, FAR = "nearood", "farood"
"""The names of the means, as OpenOOD prints them."""
_LARGE, _CLASSIC = "images_largescale", "images_classic"


class ImageList(NamedTuple):
    """One data set of OpenOOD: the list in `benchmark_imglist`, and the folder that its paths are relative to."""

    file: str
    folder: str


class OpenOodBenchmark(NamedTuple):
    """One in-distribution data set of OpenOOD v1.5, with what belongs to it.

    Attributes:
        download: Its name for OpenOOD's download script.
        train: Its training images.
        test: Its test images.
        near: OOD sets like it, by name.
        far: OOD sets unlike it.
        shifted: Images of its classes that look different: ImageNet-V2, -C and -R.
    """

    download: str
    train: ImageList
    test: ImageList
    near: Mapping[str, ImageList]
    far: Mapping[str, ImageList]
    shifted: Mapping[str, ImageList]

    @property
    def ood(self) -> dict[str, ImageList]:
        """All OOD sets, near ones first."""
        return {**self.near, **self.far}


def _cifar(name: str, other: str, shifted: Sequence[str] = ()) -> OpenOodBenchmark:
    def lists(*names: str) -> dict[str, ImageList]:
        return {one: ImageList(f"{name}/test_{one}.txt", _CLASSIC) for one in names}

    return OpenOodBenchmark(
        name.replace("cifar", "cifar-"),
        ImageList(f"{name}/train_{name}.txt", _CLASSIC),
        lists(name)[name],
        lists(other, "tin"),
        lists("mnist", "svhn", "texture", "places365"),
        lists(*shifted),
    )


def _imagenet(name: str, download: str) -> OpenOodBenchmark:
    def lists(*names: str) -> dict[str, ImageList]:
        folders = {"textures": _CLASSIC}
        return {one: ImageList(f"{name}/test_{one}.txt", folders.get(one, _LARGE)) for one in names}

    return OpenOodBenchmark(
        download,
        ImageList(f"{name}/train_{name}.txt", _LARGE),
        lists(name)[name],
        lists("ssb_hard", "ninco"),
        lists("inaturalist", "textures", "openimage_o"),
        {f"imagenet_{one}": ImageList(f"{name}/test_{name}_{one}.txt", _LARGE) for one in ("v2", "c", "r")},
    )


OPENOOD: Mapping[str, OpenOodBenchmark] = MappingProxyType(
    {
        "imagenet": _imagenet("imagenet", "imagenet-1k"),
        "imagenet200": _imagenet("imagenet200", "imagenet-200"),
        "cifar10": _cifar("cifar10", "cifar100", ("cifar10c",)),
        "cifar100": _cifar("cifar100", "cifar10"),
    }
)
"""The benchmarks by name."""


def openood(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    model: Classifier | str,
    root: str | Path,
    to: str | Place | None = None,
    *,
    benchmark: str = "imagenet",
    scores: Mapping[str, Score | str] | Sequence[Score | str] | Score | str | None = None,
    sets: Sequence[str] | None = None,
    full_spectrum: bool = False,
    train: Table | int | None = None,
    seed: int = 0,
    progress: bool = True,
    **extraction: Any,
) -> "OpenOod":
    """Run OpenOOD v1.5 on a model and report its table, for one score or several.

    Args:
        model: A classifier of the benchmark's classes from dubito.load or dubito.wrap, or a name, which is loaded.
        root: The folder with benchmark_imglist, images_largescale and images_classic: `data` of OpenOOD's script.
        to: Folder for one cache per data set; an interrupted run resumes there. None: nothing is kept.
        benchmark: "imagenet", "imagenet200", "cifar10" or "cifar100".
        scores: Scores by name or in a list, fitted or names of registered ones. Default: every registered score that
            the columns allow.
        sets: Names of the OOD sets to run; by default all, and every one must be there.
        full_spectrum: Also count covariate-shifted images (ImageNet-V2, -C, -R; CIFAR-10-C) as in-distribution.
        train: What scores learn from that are not fitted yet: a table, or how many images to draw from OpenOOD's list
            of training images; all of them for a larger number. Default: scores that learn are left out.
        seed: Seed of this draw.
        progress: Whether to show progress bars on a terminal.
        extraction: Further settings for dubito.extract, such as batch_size or workers.

    Raises:
        ImagesError: Lists or images are missing; the message names the data sets and the line that downloads them.
    """
    check_choice(benchmark, OPENOOD, by="openood", what="benchmark")
    chosen = _chosen_sets(benchmark, sets)
    if isinstance(train, int):
        check_number(train, "[1, inf)", by="openood", what="train", whole=True, hint="Leave it out for no training.")
    images = _open_lists(benchmark, Path(root).expanduser(), chosen, full_spectrum, train, seed)
    model = as_classifier(model, by="openood")  # once for all sets

    def run(name: str) -> Table:
        cache = f"{name}-{len(images[name])}-{seed}" if name == "train" else name
        folder = None if to is None else to_place(to) / cache
        space: Any = {"label_space": "model"} if images[name].labels is not None else {}
        return extract(model, images[name], folder, progress=progress, **space, **extraction)

    tables = {name: run(name) for name in images}
    learned = train if isinstance(train, Table) else tables.pop("train", None)
    test = tables.pop("id")
    if learned is not None:
        check_same_model(test, {"train": learned}, by="openood")
        harm = "Scores that learn have already seen them and look better than they are. Fit on training images."
        warn_shared(test, learned, by="openood", what="train", harm=harm)
    ready = _ready_scores(scores, test, learned)
    shifted = {name: tables.pop(name) for name in OPENOOD[benchmark].shifted if name in tables}
    result = OpenOod(
        benchmark,
        model.name or "model",
        {"id": len(test)} | {name: len(table) for name, table in (*shifted.items(), *tables.items())},
        _accuracy([test, *shifted.values()]),
        tuple(shifted),
        sets_left_out=tuple(name for name in OPENOOD[benchmark].ood if name not in chosen),
        scores_left_out=ready.left_out,
        learned_from=None if learned is None or not ready.fit_seconds else (learned.name, len(learned)),
        remarks=ready.remarks,
    )
    for name, score in ready.scores.items():
        try:
            result.scores[name] = _rows(score, [test, *shifted.values()], tables)
        except DubitoError as error:  # noqa: PERF203 (a handful of scores)
            if scores is not None:
                raise
            result.scores_left_out[name] = str(error)
    return result


class OodMetrics(NamedTuple):
    """The four metrics of one score on one OOD set, in per cent."""

    fpr95: float
    auroc: float
    aupr_in: float
    aupr_out: float


def ood_metrics(in_distribution: Float[Tensor, "n"], ood: Float[Tensor, "m"]) -> OodMetrics:
    """OpenOOD's metrics of uncertainties, in per cent.

    >>> ood_metrics(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0]))
    OodMetrics(fpr95=50.0, auroc=75.0, aupr_in=79.16666666666666, aupr_out=79.16666666666666)
    """
    u, is_ood = join_ood(in_distribution, ood)
    values = (fpr_at_tpr(u, is_ood), auroc(u, is_ood), precision_area(-u, ~is_ood), precision_area(u, is_ood))
    return OodMetrics(*(100 * value for value in values))


def precision_area(scores: Float[Tensor, "n"], positives: Bool[Tensor, "n"]) -> float:
    """The area under precision over recall, points joined by straight lines; precision is 1 at recall 0.

    >>> precision_area(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, True]))  # 1/2 + (1/2 + 2/3) / 4
    0.7916666666666666
    """
    levels, level = np.unique(-scores.double().numpy(), return_inverse=True)
    hits = np.cumsum(np.bincount(level, weights=positives.numpy(), minlength=len(levels)))
    recall = np.append(0.0, hits / hits[-1])
    precision = np.append(1.0, hits / np.cumsum(np.bincount(level)))
    return float((np.diff(recall) * (precision[1:] + precision[:-1]) / 2).sum())


@final
@dataclass
class OpenOod(Result):
    """The table of OpenOOD for one model: a row for every OOD set, and the means over the near and the far ones.

    Attributes:
        benchmark: Name of the benchmark.
        model: Name of the model.
        images: Number of images by data set; "id" are the in-distribution test images.
        accuracy: Accuracy on the in-distribution images, in per cent, with the covariate-shifted ones if they count.
        shifted: Names of covariate-shifted sets that count as in-distribution: full spectrum; else empty.
        sets_left_out: OOD sets of the benchmark that were not run.
        scores_left_out: By score, why it could not be computed.
        learned_from: What scores that learn were fitted on here, and how many images these are; None without any.
        remarks: What was chosen for the user, in whole sentences.
        scores: By score and OOD set, the metrics.
    """

    benchmark: str
    model: str
    images: dict[str, int]
    accuracy: float
    shifted: tuple[str, ...] = ()
    sets_left_out: tuple[str, ...] = ()
    scores_left_out: dict[str, str] = field(default_factory=dict)
    learned_from: tuple[str, int] | None = None
    remarks: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, OodMetrics]] = field(default_factory=dict)

    titles: ClassVar[Mapping[str, str]] = {
        "data_set": "data set",
        "fpr95": "FPR@95",
        "auroc": "AUROC",
        "aupr_in": "AUPR_IN",
        "aupr_out": "AUPR_OUT",
        "acc": "ACC",
    }
    naming: ClassVar = 2

    def __getitem__(self, score: str) -> dict[str, OodMetrics]:
        """The rows of one score: its OOD sets, and the means "nearood" and "farood"."""
        check_choice(score, self.scores, by="OpenOod", what="score")
        rows: dict[str, OodMetrics] = {}
        for mean, group in ((NEAR, OPENOOD[self.benchmark].near), (FAR, OPENOOD[self.benchmark].far)):
            part = {name: self.scores[score][name] for name in group if name in self.scores[score]}
            if part:
                rows |= part | {mean: OodMetrics(*map(statistics.fmean, zip(*part.values(), strict=True)))}
        return rows

    def title(self) -> str:
        """The benchmark and the model."""
        spectrum = ", full spectrum" if self.shifted else ""
        return f"OpenOOD v1.5, {self.benchmark}{spectrum}: {self.model}, {self.images['id']} in-distribution images"

    def records(self) -> list[dict[str, Any]]:
        """One row for each score and OOD set, and for the means, in per cent."""
        return [
            {"score": score, "data_set": name, **row._asdict(), "acc": self.accuracy}
            for score in self.scores
            for name, row in self[score].items()
        ]

    def cell(self, key: str, value: Any) -> str:
        """Two decimals, as OpenOOD prints them."""
        return f"{value:,.2f}" if isinstance(value, float) else super().cell(key, value)

    def findings(self) -> list[str]:
        """Which score is the best on the near and on the far sets, and what cannot be compared with the leaderboard."""
        sentences = []
        for mean, words in ((NEAR, "near"), (FAR, "far")):
            values = {score: self[score][mean].auroc for score in self.scores if mean in self[score]}
            if len(values) > 1:
                best = max(values, key=values.__getitem__)
                sentences.append(f"Best mean AUROC on {words} OOD sets: {best}, {values[best]:.2f}.")
        if self.learned_from:
            name, rows = self.learned_from
            sentences.append(f"Scores that learn were fitted on {rows:,} images: {name}.")
        if self.sets_left_out:
            sentences.append(
                f"Left out: {', '.join(self.sets_left_out)}. Means over the remaining sets are no figures of OpenOOD."
            )
        for score, why in self.scores_left_out.items():
            sentences.append(f"Left out: {score} ({why.removesuffix('.')}).")
        return sentences + self.remarks

    def to_dict(self) -> Json:
        """Everything as plain values, with the means beside the sets."""
        rows = {score: {name: row._asdict() for name, row in self[score].items()} for score in self.scores}
        return {**super().to_dict(), "scores": rows}

    def plot(self, ax: Axes | None = None) -> Axes:
        """The AUROC of every set and of the means, one colour per score."""
        picture = axes(ax)
        for score in self.scores:
            rows = self[score]
            picture.plot([row.auroc for row in rows.values()], list(rows), marker="o", linestyle="", label=score)
        picture.set(xlabel="AUROC (%)", title=self.title())
        picture.invert_yaxis()
        picture.legend(frameon=False)
        return picture


def _chosen_sets(benchmark: str, sets: Sequence[str] | None) -> list[str]:
    known = OPENOOD[benchmark].ood
    if sets is None:
        return list(known)
    if isinstance(sets, str) or not sets:
        raise TableError(f"openood: sets must be a list of {', '.join(known)}; got {sets!r}. Leave it out for all.")
    for name in sets:
        check_choice(name, known, by="openood", what=f"set of {benchmark}")
    return [name for name in known if name in sets]


def _open_lists(
    benchmark: str, root: Path, sets: Sequence[str], full_spectrum: bool, train: Table | int | None, seed: int
) -> dict[str, FileImages]:
    """All images that a run needs, by the name of their cache; one error for everything that is missing."""
    about = OPENOOD[benchmark]
    lists = (
        {"id": about.test} | (dict(about.shifted) if full_spectrum else {}) | {name: about.ood[name] for name in sets}
    )
    lists |= {"train": about.train} if isinstance(train, int) else {}
    opened, missing = {}, {}
    for name, one in lists.items():
        count = train if name == "train" and isinstance(train, int) else None
        try:
            opened[name] = _open_list(root, one, labelled=name not in sets, count=count, seed=seed)
        except FileNotFoundError as error:
            missing[name] = str(error)
    if missing:
        can_leave_out = set(missing) <= set(sets) and set(missing) != set(sets)
        there = ", ".join(name for name in sets if name not in missing)
        repair = f", or pass sets= with what is there: {there}" if can_leave_out else ""
        raise ImagesError(
            f"openood: '{root}' must hold {benchmark} as OpenOOD's script lays it out; missing: "
            f"{'; '.join(f'{name} ({why})' for name, why in missing.items())}. Run OpenOOD's "
            f"scripts/download/download.py with contents=datasets, datasets={about.download}, dataset_mode=benchmark "
            f"and save_dir={root} (training images of ImageNet come from its own site){repair}."
        )
    return opened


def _open_list(root: Path, one: ImageList, *, labelled: bool, count: int | None, seed: int) -> FileImages:
    """The images of a list, or a seeded sample in the list's order; FileNotFoundError for what does not exist."""
    path, folder = root / "benchmark_imglist" / one.file, root / one.folder
    if not path.is_file():
        raise FileNotFoundError(f"there is no list 'benchmark_imglist/{one.file}'")
    rows = [line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or any(len(row) != 2 or not row[1].strip().removeprefix("-").isdecimal() for row in rows):
        raise ImagesError(
            f"openood: '{path}' must have 'path label' in every line. Use the file that OpenOOD publishes."
        )
    if count is not None and count < len(rows):
        drawn = np.random.default_rng(seed).choice(len(rows), count, replace=False)
        rows = [rows[index] for index in np.sort(drawn)]
    absent = [name for name, _ in rows if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{len(absent)} of {len(rows)} images below '{one.folder}': {some(absent)}")
    labels = torch.tensor([int(label) for _, label in rows]) if labelled else None
    name = f"benchmark_imglist/{one.file}" + (f", {count} images with seed {seed}" if count is not None else "")
    return FileImages(folder, [name for name, _ in rows], labels, name=name)


def _ready_scores(scores: Any, test: Table, train: Table | None) -> AvailableScores:
    """The scores, fitted: all that the columns allow, or those that were passed or named."""
    if scores is None:
        return available_scores(test, train)
    repair = "pass a table, or how many of OpenOOD's training images, such as train=50_000; or a fitted score"
    ready = requested_scores(scores, test, train, by="openood", repair=repair)
    check_any_scores(ready.scores, by="openood")
    return ready


def _rows(score: Score, known: Sequence[Table], ood: Mapping[str, Table]) -> dict[str, OodMetrics]:
    """The metrics of a score on every OOD set, against all in-distribution tables together."""
    u = torch.cat([score.score(table) for table in known])
    return {name: ood_metrics(u, score.score(table)) for name, table in ood.items()}


def _accuracy(tables: Sequence[Table]) -> float:
    """The share of right predictions over all images together, in per cent."""
    return 100 * float((~torch.cat([wrong_predictions(table, by="openood") for table in tables])).double().mean())
