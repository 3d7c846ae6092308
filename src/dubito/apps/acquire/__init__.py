"""Active learning over a pool of images: which to label next, and a loop that labels, trains and goes on."""

from dubito.apps.acquire.acquire import Acquire as Acquire
from dubito.apps.acquire.labels import add_labels as add_labels
from dubito.apps.acquire.linear import LinearHeads as LinearHeads
from dubito.apps.acquire.linear import LinearTrainer as LinearTrainer
from dubito.apps.acquire.result import Acquisition as Acquisition
from dubito.apps.acquire.result import Picks as Picks

__all__ = ["Acquire", "Acquisition", "LinearHeads", "LinearTrainer", "Picks", "add_labels"]
