"""What faults strike: work whose result is a folder, with everything that it is made from, tiny and seeded.

The same call again resumes the work, or does it again. An undisturbed run gives the same bytes every time.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import dubito
from dubito.active import Acquire
from dubito.cache import label_cache
from dubito.guard import Guard
from dubito.heads import Recipe, UncertaintyHead, loop
from dubito.scores import Neighbours
from dubito.search import SafeIndex
from dubito.storage import LOCK
from dubito.table import Table
from tests.cache.conftest import image_folder, small_network

BATCH = 5
_CLASSES = 3


@dataclass(frozen=True)
class Victim:
    """Work into a folder.

    Attributes:
        inputs: A folder of what it is made from.
    """

    name: ClassVar[str]
    safe: ClassVar[bool] = False
    """Whether the folder can be read at any instant: as it was before, or as it is after."""
    editable: ClassVar[tuple[str, ...]] = ()
    """Files that people edit: whatever is in them is meant."""
    faults: ClassVar[tuple[str, ...]] = ()
    """Kinds of faults that strike this victim alone."""

    inputs: Path

    def prepare(self) -> None:
        """Make the inputs."""

    def begin(self, to: Path) -> None:
        """Put what is there before the work."""

    def work(self, to: Path) -> None:
        """Do the work, or what is left of it."""
        raise NotImplementedError

    def values(self, to: Path) -> str | None:
        """A hash of everything that a reader of the folder gets; None where only the work itself reads it."""

    def contents(self, to: Path) -> dict[str, str]:
        """Every file by its path, as a hash of its bytes."""
        files = [path for path in sorted(to.rglob("*")) if path.is_file() and path.name != LOCK]
        return {path.relative_to(to).as_posix(): hashlib.sha256(self.bytes_of(path)).hexdigest() for path in files}

    def bytes_of(self, path: Any) -> bytes:
        """The bytes of a file, but for what no run can repeat."""
        return path.read_bytes()


class Extraction(Victim):
    """A model over a folder of images, with a probe, and logits that are rebuilt from the last layer."""

    name, workers, labels = "extract", 0, None

    def prepare(self) -> None:
        """Small photographs of noise."""
        image_folder(self.inputs / "photos", count=40)

    def work(self, to: Path) -> None:
        """Extract."""
        extract(self.inputs / "photos", to, workers=self.workers)

    def values(self, to: Path) -> str:
        """Of all columns."""
        return digest(columns_of(dubito.open(to)))


class ExtractionWithWorkers(Extraction):
    """The same, with images that another process decodes."""

    name, workers, faults = "extract with workers", 1, ("worker killed",) * 3


class Labelling(Victim):
    """Labels for a finished cache, which has others."""

    name, safe = "label", True

    def prepare(self) -> None:
        """A cache with labels that are the folders of its images."""
        image_folder(self.inputs / "photos", count=40)
        extract(self.inputs / "photos", self.inputs / "cache", probes=())

    def begin(self, to: Path) -> None:
        """A copy of the cache."""
        shutil.copytree(self.inputs / "cache", to)

    def work(self, to: Path) -> None:
        """Store labels."""
        label_cache(to, np.arange(40) * 7 % _CLASSES)

    def values(self, to: Path) -> str:
        """Of all columns."""
        return digest(columns_of(dubito.open(to)))


class HeadTraining(Victim):
    """Two heads, with a state after every step."""

    name, processes = "train", None

    def work(self, to: Any) -> None:
        """Train."""
        loop._SECONDS_BETWEEN_STATES = -1.0
        recipe = Recipe(rows=480, batch=60, episodes=4, warmup=1)
        settings = {"width": 8, "held_out": table(1), "processes": self.processes, "progress": False}
        dubito.train(table(0), to, seeds=[1, 2], recipe=recipe, **settings)

    def values(self, to: Path) -> str:
        """Of weights, configs, and what the heads predict."""
        heads = {name: UncertaintyHead.from_pretrained(to / name) for name in ("seed-1", "seed-2")}
        about = json.dumps([[one.trained_, repr(one.provenance_)] for one in heads.values()], sort_keys=True)
        return digest({name: head.score(table(2)) for name, head in heads.items()} | {"about": about})

    def bytes_of(self, path: Any) -> bytes:
        """The report says when the training ended, and how many steps of it the last call made."""
        if path.name != "training.json":
            return path.read_bytes()
        report = json.loads(path.read_bytes())
        return json.dumps({key: value for key, value in report.items() if key not in ("finished", "updates")}).encode()


class TrainingWithWorkers(HeadTraining):
    """The same, with a second process that shares the steps."""

    name, processes, faults = "train with workers", 2, ("worker killed",) * 3


class HeadSaving(Victim):
    """A head that takes the place of another one."""

    name, safe = "head", True

    def begin(self, to: Path) -> None:
        """The old head."""
        self._head(seed=1).save_pretrained(to)

    def work(self, to: Path) -> None:
        """Save the new head."""
        self._head(seed=2).save_pretrained(to)

    def values(self, to: Path) -> str:
        """Of its config, and of what it predicts."""
        head = UncertaintyHead.from_pretrained(to)
        return digest({"u": head.score(table(2)), "about": json.dumps(head.trained_, sort_keys=True)})

    def _head(self, seed: int) -> UncertaintyHead:
        head = UncertaintyHead(width=8, seed=seed, recipe=Recipe(rows=60, batch=60, episodes=1, warmup=0))
        return head.fit(table(0, 60))


class GuardSaving(Victim):
    """A guard that takes the place of another one."""

    name, safe = "guard", True

    def prepare(self) -> None:
        """Two guards."""
        guard = Guard.fit(None, table(0, 600), risk=0.3)
        guard.save(self.inputs / "old")
        guard.refit(table(1, 400)).save(self.inputs / "new")

    def begin(self, to: Path) -> None:
        """The old guard."""
        Guard.load(self.inputs / "old").save(to)

    def work(self, to: Path) -> None:
        """Save the new guard."""
        Guard.load(self.inputs / "new").save(to)

    def values(self, to: Path) -> str:
        """Of its verdicts, and of all that they depend on."""
        guard = Guard.load(to)
        verdicts = guard.decide(table(2))
        return digest({"u": verdicts.uncertainty, "accept": verdicts.accept, "about": guard.fingerprint})


class IndexBuilding(Victim):
    """An index, with its approximation and its score, that takes the place of another one."""

    name, safe = "index", True

    def begin(self, to: Path) -> None:
        """An index of fewer items."""
        SafeIndex.build(table(0, 50), np.linspace(0, 1, 50)).save(to)

    def work(self, to: Path) -> None:
        """Build and save."""
        index = SafeIndex.build(table(0), Neighbours(k=3).fit(table(9)), per_class=True)
        index.approximate("IVF2,Flat")
        index.save(to)

    def values(self, to: Path) -> str:
        """Of what a search returns."""
        result = SafeIndex.load(to).search(table(1), np.zeros(len(table(1))), k=4)
        return digest({"similarities": result.similarities, "ids": json.dumps(result.ids.tolist())})


class AcquireLoop(Victim):
    """Rounds of active learning."""

    name, editable = "acquire", ("picks.csv",)

    def work(self, to: Path) -> None:
        """Train and choose, five times."""
        Acquire("power", seed=3).run(table(0), rounds=5, count=8, start=12, test=table(1), to=to)


class Watching(Victim):
    """A stream of verdicts, which a watch takes note of."""

    name, safe = "watch", True

    def prepare(self) -> None:
        """A guard."""
        Guard.fit(None, table(0, 600), risk=0.3).save(self.inputs / "guard")

    def work(self, to: Path) -> None:
        """Go on with the first image that the watch does not know."""
        guard = Guard.load(self.inputs / "guard")
        watch = guard.watch(to)
        for _ in guard.stream(table(2, 60).rows(slice(watch.report().images, None)), batch=BATCH, watch=watch):
            pass

    def values(self, to: Path) -> str:
        """Whether the watch can be read, and knows whole batches; the state grows while the work goes on."""
        report = Guard.load(self.inputs / "guard").watch(to).report()
        return "whole batches" if report.images % BATCH == 0 else f"{report.images} images"


VICTIMS = {
    one.name: one
    for one in (
        Extraction,
        ExtractionWithWorkers,
        Labelling,
        HeadTraining,
        TrainingWithWorkers,
        HeadSaving,
        GuardSaving,
        IndexBuilding,
        AcquireLoop,
        Watching,
    )
}


def model() -> Any:
    """A network of random weights."""
    return dubito.wrap(small_network(), transform=dubito.Preprocess((16, 16), 16), name="small")


def extract(images: Any, to: Any, *, workers: int = 0, probes: Any = None, **options: Any) -> Table:
    """An extraction in many small shards."""
    if probes is None:
        probes = [dubito.probes.Forward(store_logit=False), dubito.probes.Noise(copies=2)]
    settings = {"batch_size": 4, "shard_size": 8, "threads": 1, "progress": False, **options}
    return dubito.extract(model(), images, to, workers=workers, probes=probes, **settings)


def table(seed: int, n: int = 200) -> Table:
    """Features, logits, losses and labels of images that do not exist."""
    draw = np.random.default_rng(seed)
    label = torch.from_numpy(draw.integers(0, _CLASSES, n))
    feature = torch.from_numpy(draw.normal(size=(n, 8)) + 2 * np.eye(_CLASSES, 8)[label]).float()
    logit = feature[:, :_CLASSES].contiguous()
    loss = torch.nn.functional.cross_entropy(logit, label, reduction="none")
    ids = [f"{seed}/{row}.png" for row in range(n)]
    return Table(feature=feature, logit=logit, loss=loss, label=label, id=ids, name=f"table {seed}")


def columns_of(opened: Table) -> dict[str, Any]:
    """All columns of a table."""
    return {key: opened.whole(key) for key in opened.columns if key != "id"} | {"id": json.dumps(list(opened.id))}


def digest(values: Mapping[str, Any]) -> str:
    """One hash of arrays and texts by name."""
    state = hashlib.sha256()
    for key, value in sorted(values.items()):
        content = value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes()
        state.update(f"{key} {len(content)} ".encode() + content)
    return state.hexdigest()
