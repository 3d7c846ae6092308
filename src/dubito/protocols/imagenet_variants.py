"""ImageNet-A, -R, -V2 and -C: how accurate is the model there, and does its uncertainty find the errors?

ImageNet-A: Hendrycks et al., Natural Adversarial Examples (2021). ImageNet-R: Hendrycks et al., The Many Faces of
Robustness (2021). ImageNet-V2: Recht et al. (2019). ImageNet-C: Hendrycks & Dietterich (2019). Folders are theirs:

    imagenet-a, imagenet-r    one folder per class, n01498041 and so on: 200 of the 1,000 classes
    imagenet-v2               folders "0" to "999", the numbers of the classes; any of its three sets
    imagenet-c                gaussian_noise/1/n01440764 and so on: corruption, severity 1 to 5, class

The model has the 1,000 classes of ImageNet in their usual order, that of the sorted WordNet ids, as timm lists them. On
ImageNet-A and -R, as their authors do it, predictions are among the 200 classes alone: the other logits are left out,
for every score, too. On ImageNet-C,

    mCE = mean over 15 corruptions of (mean over severities of the error) / (that of AlexNet),

in per cent, with AlexNet's errors of the paper; None unless all 75 folders are there. Images go through the model's own
transform, also those of ImageNet-C, which are 224 pixels large already.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from dubito.cache import extract
from dubito.data.files import FileImages, open_folder
from dubito.data.image_set import some
from dubito.errors import ImagesError, TableError
from dubito.evaluate.evaluate import USUAL, check_fitted_scores, errors_at_coverage, has_both, uncertainties
from dubito.metrics import Interval, aurc, auroc, proportion, wrong_predictions
from dubito.models.load import as_classifier
from dubito.result import Result
from dubito.scores.registry import by_name
from dubito.storage import Place, to_place
from dubito.table import Table
from dubito.types import Classifier, Json, Score
from dubito.validate import check_choice

VARIANTS = ("imagenet-a", "imagenet-r", "imagenet-v2", "imagenet-c")
"""The variants by name."""
SEVERITIES = ("1", "2", "3", "4", "5")
ALEXNET: Mapping[str, float] = MappingProxyType(
    {
        "gaussian_noise": 0.886428,
        "shot_noise": 0.894468,
        "impulse_noise": 0.922640,
        "defocus_blur": 0.819880,
        "glass_blur": 0.826268,
        "motion_blur": 0.785948,
        "zoom_blur": 0.798360,
        "snow": 0.866816,
        "frost": 0.826572,
        "fog": 0.819324,
        "brightness": 0.564592,
        "contrast": 0.853204,
        "elastic_transform": 0.646056,
        "pixelate": 0.717840,
        "jpeg_compression": 0.606500,
    }
)
"""By corruption of ImageNet-C, the mean error of AlexNet over severities, by its authors."""
_CLASSES = 1000
_SUBSETS = {"imagenet-a": "imagenet_a_synsets.txt", "imagenet-r": "imagenet_r_synsets.txt"}
"""By variant, timm's list of its classes."""


def open_variant(name: str, root: str | Path) -> FileImages:
    """The images of a variant, labelled with the classes of ImageNet, 0 to 999.

    Args:
        name: One of VARIANTS.
        root: The folder of its class folders; of ImageNet-C, that of one severity: "imagenet-c/fog/3".

    Raises:
        ImagesError: There are no class folders, or others than those of the variant.
    """
    check_choice(name, VARIANTS, by="open_variant", what="name")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ImagesError(f"{name}: '{folder}' must be an existing folder. Unpack the authors' archive there.")
    images = open_folder(folder)
    names = [path.partition("/")[0] for path in images.ids]  # one class alone has a folder, too
    known = {str(number): number for number in range(_CLASSES)} if name == "imagenet-v2" else _wordnet_ids()
    classes = set(classes_of_variant(name))
    if others := sorted({one for one in names if known.get(one) not in classes}):
        example = "'0' to '999'" if name == "imagenet-v2" else "WordNet ids such as n01498041"
        raise ImagesError(
            f"{name}: '{folder}' must hold one folder for each of its classes, {example}; got {some(others)}. Pass "
            f"the folder that has them."
        )
    return FileImages(
        images.root, images.ids, torch.tensor([known[one] for one in names]), name=f"{name} in '{folder}'"
    )


def classes_of_variant(name: str) -> list[int]:
    """The classes of a variant among those of ImageNet: 200 for ImageNet-A and -R, else all.

    >>> len(classes_of_variant("imagenet-a")), classes_of_variant("imagenet-r")[:3]
    (200, [1, 2, 4])
    """
    check_choice(name, VARIANTS, by="classes_of_variant", what="name")
    if name not in _SUBSETS:
        return list(range(_CLASSES))
    numbers = _wordnet_ids()
    return sorted(numbers[one] for one in _timm_names(_SUBSETS[name]))


def restrict_classes(table: Table, classes: Sequence[int]) -> Table:
    """A table with the logits of some classes alone, numbered as in the list, and labels likewise.

    Args:
        table: A table with logits, and labels that are among these classes.
        classes: Different indices of classes.

    >>> part = restrict_classes(Table(logit=[[3.0, 2.0, 1.0], [0.0, 1.0, 5.0]], label=[1, 2]), [1, 2])
    >>> part.logit.tolist(), part.label.tolist()
    ([[2.0, 1.0], [1.0, 5.0]], [0, 1])
    """
    table.require("logit", "label", by="restrict_classes")
    count = table.shape("logit")[1]
    if len(set(classes)) < max(len(classes), 1) or not set(classes) <= set(range(count)):
        raise TableError(
            f"restrict_classes: classes must be different numbers from 0 to {count - 1}; got "
            f"{some([*map(str, classes)])}. Pass the table of a model that has these classes."
        )
    place: Int[Tensor, "c"] = torch.full((count,), -1)
    place[torch.tensor(classes)] = torch.arange(len(classes))
    label = place[table.label]
    if (label < 0).any():
        row = int((label < 0).nonzero()[0, 0])
        raise TableError(
            f"restrict_classes: labels must be among the {len(classes)} classes; row {row} of {table.name} has "
            f"{int(table.label[row])}. Pass all classes that occur."
        )
    logit = torch.cat([batch.logit[:, torch.tensor(classes)] for batch in table.batches("logit")])
    return Table(logit=logit, label=label, name=table.name, label_space=table.label_space)


def imagenet_variants(
    model: Classifier | str,
    roots: Mapping[str, str | Path],
    to: str | Place | None = None,
    *,
    scores: Mapping[str, Score | str] | Sequence[Score | str] | Score | str = ("max_probability",),
    progress: bool = True,
    **extraction: Any,
) -> "ImagenetVariants":
    """Accuracy and selective prediction on variants of ImageNet.

    Args:
        model: A classifier of ImageNet's 1,000 classes from dubito.load or dubito.wrap, or a name, which is loaded.
        roots: By name of a variant, its folder; of ImageNet-C, that of the corruptions: all that are there are run.
        to: Folder for one cache per variant, and per severity of ImageNet-C; an interrupted run resumes there.
        scores: Scores of logits, fitted or by name.
        progress: Whether to show progress bars on a terminal.
        extraction: Further settings for dubito.extract, such as batch_size or workers.

    Raises:
        ImagesError: A folder has another layout.
    """
    if not roots:
        raise TableError(f"imagenet_variants: roots must name variants of {', '.join(VARIANTS)}; got none.")
    images = {key: open_variant(key[0], folder) for key, folder in _folders(roots).items()}
    chosen = by_name(scores, by="imagenet_variants", arrays=False)
    check_fitted_scores(chosen, by="imagenet_variants")
    model = as_classifier(model, by="imagenet_variants")
    wrong: dict[str, list[Tensor]] = {}
    u: dict[str, dict[str, list[Tensor]]] = {}
    levels: dict[str, dict[str, float]] = {}
    for (name, *level), some_images in images.items():
        folder = None if to is None else to_place(to) / "-".join((name, *level))
        table = extract(model, some_images, folder, label_space="model", progress=progress, **extraction)
        part = restrict_classes(table, classes_of_variant(name)) if name in _SUBSETS else table
        mistakes = wrong_predictions(part, by="imagenet_variants")
        wrong.setdefault(name, []).append(mistakes)
        for score, values in uncertainties(chosen, part, by="imagenet_variants").items():
            u.setdefault(name, {}).setdefault(score, []).append(values)
        if level:
            levels.setdefault(level[0], {})[level[1]] = float(mistakes.double().mean())
    result = ImagenetVariants(model.name or "model", errors_by_corruption=levels)
    for name, parts in wrong.items():
        mistakes = torch.cat(parts)
        right = int((~mistakes).sum())
        result.images[name], result.accuracy[name] = len(mistakes), proportion(right, len(mistakes))
        result.scores[name] = {score: _selective(torch.cat(values), mistakes) for score, values in u[name].items()}
    return result


class SelectivePrediction(NamedTuple):
    """How well a score finds the errors; None where all predictions are right or all are wrong."""

    error_auroc: float | None
    aurc: float
    errors_at_80: float


@final
@dataclass
class ImagenetVariants(Result):
    """Accuracy and selective prediction by variant.

    Attributes:
        model: Name of the model.
        images: Number of images by variant.
        accuracy: Accuracy by variant, with its exact 95 % interval; of ImageNet-C over all its images.
        scores: By variant and score, how well it finds the errors.
        errors_by_corruption: Error rate by corruption and severity of ImageNet-C.
    """

    model: str
    images: dict[str, int] = field(default_factory=dict)
    accuracy: dict[str, Interval] = field(default_factory=dict)
    scores: dict[str, dict[str, SelectivePrediction]] = field(default_factory=dict)
    errors_by_corruption: dict[str, dict[str, float]] = field(default_factory=dict)

    titles: ClassVar[Mapping[str, str]] = {
        "error_auroc": "error AUROC",
        "aurc": "AURC",
        "errors_at_80": f"errors at {100 * USUAL:g} %",
    }
    naming: ClassVar = 2

    @property
    def mce(self) -> float | None:
        """The mean corruption error in per cent, relative to AlexNet; None unless all corruptions were run."""
        errors = self.errors_by_corruption
        if set(errors) != set(ALEXNET) or any(set(one) != set(SEVERITIES) for one in errors.values()):
            return None
        return 100 * statistics.fmean(statistics.fmean(errors[name].values()) / ALEXNET[name] for name in ALEXNET)

    def title(self) -> str:
        """Which model was evaluated."""
        return f"Variants of ImageNet: {self.model}"

    def facts(self) -> dict[str, str]:
        """The mean corruption error."""
        return {} if self.mce is None else {"mCE": f"{self.mce:.1f} %"}

    def records(self) -> list[dict[str, Any]]:
        """One row for each variant and score."""
        return [
            {"variant": name, "score": score, "images": self.images[name], "accuracy": self.accuracy[name]}
            | values._asdict()
            for name, row in self.scores.items()
            for score, values in row.items()
        ]

    def findings(self) -> list[str]:
        """Why there is no mean corruption error."""
        if not self.errors_by_corruption or self.mce is not None:
            return []
        run = sum(len(one) for one in self.errors_by_corruption.values())
        return [f"No mCE: it takes the {len(ALEXNET)} corruptions at 5 severities each, and {run} folders were run."]

    def to_dict(self) -> Json:
        """Everything as plain values, with the mean corruption error."""
        return {**super().to_dict(), "mce": self.mce}


def _selective(u: Tensor, wrong: Tensor) -> SelectivePrediction:
    area = auroc(u, wrong) if has_both(wrong) else None
    return SelectivePrediction(area, aurc(u, wrong), errors_at_coverage(u, wrong)[USUAL])


def _folders(roots: Mapping[str, str | Path]) -> dict[tuple[str, ...], Path]:
    """By variant, and corruption and severity of ImageNet-C, the folder of its classes."""
    folders: dict[tuple[str, ...], Path] = {}
    for name, root in roots.items():
        check_choice(name, VARIANTS, by="imagenet_variants", what="variant")
        if name != "imagenet-c":
            folders[name,] = Path(root)
            continue
        for level in ((kind, severity) for kind in ALEXNET for severity in SEVERITIES):
            if (folder := Path(root).expanduser().joinpath(*level)).is_dir():
                folders[(name, level[0], level[1])] = folder
        if not any(key[0] == name for key in folders):
            raise ImagesError(
                f"imagenet-c: '{root}' must hold folders such as gaussian_noise/1. Pass the one above them."
            )
    return folders


def _wordnet_ids() -> dict[str, int]:
    """The number of every class of ImageNet by its WordNet id."""
    return {name: number for number, name in enumerate(_timm_names("imagenet_synsets.txt"))}


def _timm_names(file: str) -> list[str]:
    """The WordNet ids of one of timm's lists, which come with it."""
    return (files("timm.data") / "_info" / file).read_text(encoding="utf-8").split()
