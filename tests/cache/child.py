"""Run by test_kill in a process of its own: an extraction that takes long enough to be killed in the middle."""

import multiprocessing
import time

import torch

import dubito
from dubito.data import Augment
from tests.cache.conftest import small_network


class SlowPreprocess:
    def __init__(self):
        self.inner = dubito.Preprocess((16, 16), 16)

    def prepare(self, image):
        time.sleep(0.002)
        return self.inner.prepare(image)

    def finish(self, batch):
        return self.inner.finish(batch)

    def describe(self):
        return self.inner.describe()


multiprocessing.set_start_method("fork", force=True)  # the workers of this process start as they do for users
torch.set_num_threads(1)
model = dubito.wrap(small_network(), transform=SlowPreprocess(), name="small")
settings = globals()  # set by test_kill
augmented = {"epochs": settings["epochs"], "augment": Augment(strong="mixup")} if settings["epochs"] > 1 else {}
dubito.extract(
    model, settings["photos"], settings["cache"], batch_size=4, shard_size=8, workers=1, progress=False, **augmented
)
