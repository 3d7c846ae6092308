"""Active learning: which images to label next, a loop that labels and trains, and which labels are likely wrong."""

from dubito.active.acquire import Acquire as Acquire
from dubito.active.label_issues import LabelIssues as LabelIssues
from dubito.active.label_issues import find_label_issues as find_label_issues
from dubito.active.labels import add_labels as add_labels
from dubito.active.linear import LinearHeads as LinearHeads
from dubito.active.linear import LinearTrainer as LinearTrainer
from dubito.active.picks import Acquisition as Acquisition
from dubito.active.picks import Picks as Picks

__all__ = [
    "Acquire",
    "Acquisition",
    "LabelIssues",
    "LinearHeads",
    "LinearTrainer",
    "Picks",
    "add_labels",
    "find_label_issues",
]
