"""The papers' evaluations: selective prediction, transfer, human ambiguity, corruption, OOD by data set, data sets."""

from dubito.evaluate.rejection import rejection_study
from dubito.protocols.benchmarks import BENCHMARKS, class_split, open_benchmark
from dubito.protocols.corruption_curve import CorruptionCurves, corruption_curve
from dubito.protocols.human_ambiguity import (
    HumanAmbiguity,
    ambiguous_images,
    human_ambiguity,
    vote_degree,
    vote_entropy,
)
from dubito.protocols.imagenet_variants import ImagenetVariants, imagenet_variants, open_variant, restrict_classes
from dubito.protocols.ood import OodAurocByDataset, ood_auroc_by_dataset
from dubito.protocols.openood import OPENOOD, OpenOod, openood
from dubito.protocols.transfer import Transfer, transfer

__all__ = [
    "BENCHMARKS",
    "OPENOOD",
    "CorruptionCurves",
    "HumanAmbiguity",
    "ImagenetVariants",
    "OodAurocByDataset",
    "OpenOod",
    "Transfer",
    "ambiguous_images",
    "class_split",
    "corruption_curve",
    "human_ambiguity",
    "imagenet_variants",
    "ood_auroc_by_dataset",
    "open_benchmark",
    "open_variant",
    "openood",
    "rejection_study",
    "restrict_classes",
    "transfer",
    "vote_degree",
    "vote_entropy",
]
