"""Faults of an object store, and of processes that read images from it or write caches, guards and indexes into it.

The store is behind a proxy that fails at some request (`proxy`). At others, the client is killed, before or after the
store has done what it should. Objects are damaged, and so are their copies on the disk.
"""

import hashlib
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import s3fs

from dubito.storage import LOCK, RemotePath
from tests.faults import processes
from tests.faults.folders import compare, cut, flip
from tests.faults.outcome import HUNG, LOST, OK, SILENT, UNNAMED, Outcome, generator
from tests.faults.processes import Child, Ending, call, value_of
from tests.faults.proxy import (
    CUT_ANSWER,
    DELAY,
    LOST_ANSWER,
    OUTAGE,
    REFUSED,
    RESET,
    SIGNAL,
    Failure,
    running_store,
)
from tests.faults.victims import (
    Extraction,
    GuardSaving,
    HeadSaving,
    HeadTraining,
    IndexBuilding,
    Labelling,
    Victim,
    extract,
)

BUCKET = "s3://faults"
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
DAMAGE = ("flip", "cut", "flip of a copy")
KINDS = (
    *("kill", REFUSED, LOST_ANSWER, "flip", RESET, "kill", DELAY, CUT_ANSWER, "cut", OUTAGE, "interrupt"),
    "flip of a copy",
)
"""In turn."""


class StoredImages(Extraction):
    """An extraction of images that are in the store, into a folder on the disk."""

    name = "images"

    def work(self, to: Any) -> None:
        """Extract."""
        extract(f"{BUCKET}/photos", to, shard_size=20)


class StoredCache(Extraction):
    """An extraction into the store."""

    name = "cache"


class StoredLabels(Labelling):
    """Labels for a cache in the store."""

    name = "labels"

    def begin(self, to: Any) -> None:
        """The cache."""
        _files().put(str(self.inputs / "cache"), to.url, recursive=True)


class StoredGuard(GuardSaving):
    """A guard that takes the place of another one in the store."""


class StoredHead(HeadSaving):
    """A head that takes the place of another one in the store."""


class StoredTraining(HeadTraining):
    """Two heads, trained into the store."""


class StoredIndex(IndexBuilding):
    """An index that takes the place of another one in the store."""


VICTIMS = (StoredCache, StoredImages, StoredGuard, StoredLabels, StoredIndex, StoredHead, StoredTraining)


@dataclass(frozen=True)
class Job:
    """What a child does with one victim.

    Attributes:
        address: Of the store, or of the proxy before it.
        copies: A folder for copies of what is in the store.
        to: A folder, or an address in the store.
    """

    address: str
    copies: Path
    victim: Victim
    to: str

    def do(self, what: str) -> Any:
        """Call one of the victim's methods."""
        os.environ |= credentials(self.address) | {"DUBITO_COPIES": str(self.copies)}
        to: Any = RemotePath(self.to) if self.to.startswith(BUCKET) else Path(self.to)
        if what == "contents" and isinstance(to, RemotePath):
            names = [name for name in to.files_below() if LOCK not in name.split("/")]
            return {name: hashlib.sha256(self.victim.bytes_of(to / name)).hexdigest() for name in names}
        return getattr(self.victim, what)(to)


@dataclass
class StorePart:
    """Faults on everything that uses an object store.

    Attributes:
        place: A folder of its own.
        faults: How many there are by default.
    """

    place: Path
    faults: int = 32
    name: str = "store"

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Case after case, until there are as many faults."""
        with running_store() as (self.store, self.proxy):
            victims = [victim(self.place / victim.__name__) for victim in VICTIMS]
            value_of(upload, self._job(victims[1], ""))
            self.expected: dict[str, dict[str, Any]] = {one.name: self._measure(one) for one in victims}
            count = case = 0
            while count < faults:
                outcomes = self.strike(KINDS[case % len(KINDS)], victims[case % len(victims)], case, seed)
                count, case = count + len(outcomes), case + 1
                yield from outcomes

    def _job(self, victim: Victim, to: str, *, proxy: bool = False) -> Job:
        address = self.proxy.address if proxy else self.store
        return Job(address, self.place / "copies", victim, to)

    def _measure(self, victim: Victim) -> dict[str, Any]:
        """What an undisturbed run gives and does; the first one warms up."""
        value_of(victim.prepare)
        for number in range(2):
            to = self._address(victim, f"undisturbed-{number}")
            job = self._job(victim, to)
            value_of(job.do, "begin")
            before = value_of(job.do, "values") if victim.safe else None
            self.proxy.arm()
            value_of(self._job(victim, to, proxy=True).do, "work")
        requests = self.proxy.requests
        values = (before, value_of(job.do, "values"))
        return {"values": values, "contents": value_of(job.do, "contents"), "requests": requests}

    def _address(self, victim: Victim, name: str) -> str:
        """A new folder on the disk or in the store."""
        return str(self.place / name) if isinstance(victim, StoredImages) else f"{BUCKET}/{victim.name}-{name}"

    def strike(self, kind: str, victim: Victim, case: int, seed: int) -> list[Outcome]:
        """One case; without an outcome where the work had ended before."""
        draw, to = generator(seed, self.name, case), self._address(victim, f"case-{case}")
        job = self._job(victim, to)
        value_of(job.do, "begin")
        if kind in DAMAGE:
            result = self._damage(kind, job, draw)
        else:
            ending = self._struck(kind, self._job(victim, to, proxy=True), draw)
            result = self._judge(ending, job) if self.proxy.failed else None
        self.proxy.arm()
        return [] if result is None else [Outcome(self.name, f"{kind}, {victim.name}", case, *result)]

    def _struck(self, kind: str, job: Job, draw: np.random.Generator) -> Ending:
        """The end of work that was disturbed at some request."""
        first = int(draw.integers(self.expected[job.victim.name]["requests"]))
        child: list[Child] = []
        number = SIGNALS.get(kind)
        self.proxy.arm(
            Failure(
                SIGNAL if number else kind,
                first,
                1 if number else int(draw.integers(1, 5)),
                seconds=draw.uniform(0.1, 1.0),
                strike=(lambda: child[0].send(number)) if number else lambda: None,
                after=draw.random() < 0.5,
            )
        )
        child.append(Child(job.do, "work"))
        return child[0].end()

    def _judge(self, ending: Ending, job: Job) -> tuple[str, str]:
        """What a reader gets after a fault, and what the work gives when it is resumed."""
        self.proxy.arm()
        if ending.how == processes.HUNG:
            return HUNG, "the work hangs"
        look, expected = call(job.do, "values"), self.expected[job.victim.name]
        if look.how == processes.FINISHED and look.value not in expected["values"]:
            return SILENT, "other values are read"
        if look.how != processes.FINISHED and job.victim.safe:
            return LOST, f"what was there before cannot be read: {look.value}"
        if ending.how == processes.FINISHED and look.value != expected["values"][1]:
            return SILENT, f"the work has finished, and its result cannot be read: {look.value}"
        result = compare(expected["contents"], value_of(job.do, "contents"))
        if ending.how != processes.FINISHED or result[0] != OK:  # parts that could not be removed stay until then
            resumed = call(job.do, "work")
            if resumed.how != processes.FINISHED:
                return (HUNG if resumed.how == processes.HUNG else LOST), f"it cannot be resumed: {resumed.value}"
            result = compare(expected["contents"], value_of(job.do, "contents"))
        unnamed = next((one for one in (ending, look) if one.how == processes.RAISED), None)
        return (UNNAMED, str(unnamed.value)) if unnamed and result[0] == OK else result

    def _damage(self, kind: str, job: Job, draw: np.random.Generator) -> tuple[str, str] | None:
        """An object, or a copy of one, is not what it was."""
        expected = self.expected[job.victim.name]
        value_of(job.do, "work")
        value_of(job.do, "values")  # makes copies
        what = value_of(damage, kind, job, int(draw.integers(2**32)))
        if what is None:
            return None
        look = call(job.do, "values")
        if look.how == processes.FINISHED and look.value not in expected["values"]:
            return SILENT, f"{what}: other values are read"
        if look.how in (processes.HUNG, processes.RAISED):
            return (HUNG if look.how == processes.HUNG else UNNAMED), f"{what}: {look.value}"
        if kind != "flip of a copy":
            value_of(remove, job, what)  # as the error says
        resumed = call(job.do, "work")
        if resumed.how == processes.REFUSED:
            value_of(remove, job, "")
            value_of(job.do, "begin")
            resumed = call(job.do, "work")
        if resumed.how != processes.FINISHED:
            return (HUNG if resumed.how == processes.HUNG else LOST), f"{what}: {resumed.value}"
        return compare(expected["contents"], value_of(job.do, "contents"))


def credentials(address: str) -> dict[str, str]:
    """What a process needs in its environment to find a store."""
    return {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def make_bucket(job: Job) -> None:
    """Make the bucket."""
    os.environ |= credentials(job.address)
    _files().makedirs(BUCKET, exist_ok=True)  # servers of one process share their buckets


def upload(job: Job) -> None:
    """Put the images into the store."""
    job.victim.prepare()
    make_bucket(job)
    _files().put(str(job.victim.inputs / "photos"), f"{BUCKET}/photos", recursive=True)


def damage(kind: str, job: Job, seed: int) -> str | None:
    """Damage some object of a folder in the store, or some copy; returns its name, or None where there is none."""
    draw = np.random.default_rng(seed)
    if kind == "flip of a copy":
        paths = sorted(path for path in job.copies.rglob("*") if path.is_file() and path.stat().st_size)
        if not paths or not job.to.startswith(BUCKET):
            return None
        path = paths[draw.integers(len(paths))]
        flip(path, draw)
        return path.name
    if not job.to.startswith(BUCKET):
        return None
    names = sorted(job.do("contents"))
    name = names[draw.integers(len(names))]
    file = RemotePath(job.to) / name
    with tempfile.NamedTemporaryFile() as local:
        path = Path(local.name)
        path.write_bytes(file.read_bytes())
        (flip if kind == "flip" else cut)(path, draw)
        file.write_bytes(path.read_bytes())
    return name


def remove(job: Job, name: str) -> None:
    """Remove an object of a folder in the store, or all of them."""
    os.environ |= credentials(job.address)
    place = RemotePath(job.to)
    if name:
        (place / name).unlink(missing_ok=True)
    else:
        place.remove()


def _files() -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem()
