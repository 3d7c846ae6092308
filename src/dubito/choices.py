"""Every choice by name, defined once: for the functions that act on it, and for the options of the command line.

Nothing heavy is imported here, so that help on the command line does not wait for torch.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

Kind = Literal["aleatoric", "epistemic", "total"]
"""What a score measures: ambiguity of the image, novelty to the model, or both."""
LabelSpace = Literal["model", "own"]
"""Whose classes labels are: the model's, or another set's."""
Strong = Literal["augmix", "cutmix", "mixup", "blur", "crop", "box", "noise"]
"""Strong augmentations."""
KnownLoss = Literal["cross_entropy", "bce"]
"""Task losses: of one label per image, or of several."""
Precision = Literal["float16", "float32"]
"""Of values on disk. float16 keeps three digits and values up to 65,504."""
EngineName = Literal["local", "ray"]
"""Where blocks of images are worked on: in this process, or on a Ray cluster."""

LossName = Literal["ranking", "l2", "l1", "log_l2", "variance_nll"]
"""What a head learns by: the order of losses, or the losses themselves."""
Target = Literal["observed", "expected", "mixed"]
"""Which losses a head learns: those of the labels, those that the model expects, or a mixture."""
Optimizer = Literal["adamw", "adam", "sgd", "lion"]
"""Of a head's training."""
Schedule = Literal["cosine", "step", "constant"]
"""How the learning rate falls after the warm-up."""
Init = Literal["default", "zero", "classes"]
"""A head's first weights."""

Covariance = Literal["full", "tied", "diagonal", "spherical"]
"""The shape of a density's Gaussians."""
Space = Literal["z", "log"]
"""In which a density is fitted: the features, or their logarithms."""
Nonlinearity = Literal["after", "before"]
"""Which features a density reads: those of the last layer, or what lies before their non-linearity."""
Start = Literal["class", "free"]
"""Where a density's Gaussians begin: at the classes, or at clusters without labels."""

LaplaceStructure = Literal["kron", "diagonal", "full"]
"""How much of the last layer's posterior precision is kept."""
DeupInput = Literal["feature", "density", "variance"]
"""What an error predictor reads: features, how rare they are, and what the last layer's posterior leaves open."""
Aleatoric = Literal["none", "entropy"]
"""What is subtracted from a predicted loss: nothing, or the entropy of the prediction."""

WeighedBy = Literal["logsumexp", "sum"]
"""What makes a member of an ensemble count more: the log-sum-exp of its logits, or their sum."""
WeighedOver = Literal["input", "pooled"]
"""Whether members have weights of their own for each input, or one for all."""
Keep = Literal["summary", "logits"]
"""What a probe of an ensemble writes: a few numbers per image, or also the logits of every member."""

ClassWeighting = Literal["fisher", "root", "expected_l1"]
"""How gradients of the classes become one number: the Fisher trace, norms weighed by roots, or expected 1-norms."""
LayerWeighting = Literal["exponential", "uniform", "kept"]
"""How layers are weighed: by depth, all of the model alike, or alike those that a truncated probe has kept."""
GradientMethod = Literal["exact", "top", "signs", "combined"]
"""Which classes gradients are taken of: all, the most likely, random mixtures of all, or both of the latter."""

Clean = Literal["both", "queries", "items", "none"]
"""What a safe search does about uncertainty: refuse queries, leave items out, both, or nothing."""

Strategy = Literal[
    "top", "random", "bald", "batch_bald", "softmax", "power", "softrank", "core_set", "weighted", "seeding"
]
"""How images are chosen for labelling."""
Layout = Literal["tsne", "umap"]
"""How a map is laid out."""
Colouring = Literal["label", "predicted", "uncertainty"]
"""What the circles of a map are coloured by."""

SetMethod = Literal["lac", "aps", "raps", "saps"]
"""How classes are scored for a prediction set."""


def nearest(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6, or_first: bool = True) -> list[str]:
    """The known names most like one that is not known; where none is alike, the first few, unless `or_first` is off.

    A name that contains it as a word is more alike than one that is only spelled alike.

    >>> nearest("entropi", ["margin", "entropy"]), nearest("auroc", ["aurc", "error_auroc"], most=1)
    (['entropy'], ['error_auroc'])
    """
    names = list(known)
    containing = [one for one in names if name and f"_{name}_" in f"_{one}_"]
    alike = containing + get_close_matches(name, names, n=most, cutoff=cutoff)
    return list(dict.fromkeys(alike))[:most] or names[: most if or_first else 0]


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is most like an unknown one, after a space; empty where none is alike.

    >>> suggestion("aurok", ["aurc", "auroc"]), suggestion("zebra", ["aurc", "auroc"])
    (' Did you mean auroc?', '')
    """
    return "".join(f" Did you mean {one}?" for one in nearest(name, known, most=1, or_first=False))
