"""Active learning: which images to label next, a loop that labels and trains, and which labels are likely wrong."""

from dubito.active.acquire import Acquire
from dubito.active.label_issues import LabelIssues, find_label_issues
from dubito.active.labels import add_labels
from dubito.active.linear import LinearHeads, LinearTrainer
from dubito.active.loop import Acquisition, Picks

__all__ = ["Acquire", "Acquisition", "LabelIssues", "LinearHeads", "LinearTrainer", "Picks"]
__all__ += ["add_labels", "find_label_issues"]
