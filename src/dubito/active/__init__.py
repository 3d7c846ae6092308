"""Active learning over a pool of images: which to label next, and a loop that labels, trains and goes on."""

from dubito.active.acquire import Acquire as Acquire
from dubito.active.labels import add_labels as add_labels
from dubito.active.linear import LinearHeads as LinearHeads
from dubito.active.linear import LinearTrainer as LinearTrainer
from dubito.active.result import Acquisition as Acquisition
from dubito.active.result import Picks as Picks

__all__ = ["Acquire", "Acquisition", "LinearHeads", "LinearTrainer", "Picks", "add_labels"]
