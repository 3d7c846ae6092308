"""Does a watch lose anything when its process is killed? A service and a stream, killed at random instants.

    python experiments/kill_service.py [--kills 50] [--seed 0]

Two processes use the same guard, with a guaranteed risk, of a small network with random weights that is made on the
spot. `dubito serve GUARD --watch DIR` answers four clients, while this script feeds the same watch. Clients send labels
of images that they had a verdict for; every second time, this script requests labels instead, and sends these: a watch
drops labels of images that a request passes over. `guard.stream(watch=...)` goes on where the watch stopped, requests
labels and labels them. Each process is ended by SIGKILL --kills times: every fifth time while it starts, else while it
works. After some kills, images are of another kind, and their labels errors, so that alarms are raised between kills.
After every kill, the watch is compared with what was known before:

    lost               images that a client had a verdict for, that this script had fed, or that the stream had printed,
                       and that the watch does not have
    labels_lost        labels that were sent, and sent again if they were not acknowledged, and that the watch does not
                       have
    labels_doubled     labels that the watch has beyond those
    requests_lost      labels of the stream that the watch had requested, and takes for others
    broken_states      states that could not be read, or that another number of images was in than fits the stream
    alarms_lost        alarms that were reported, or that the images of the stream raise when nobody kills it, and that
                       are missing
    alarms_doubled     alarms of a kind beyond the first
    orphans            processes that outlived the killed one by ten seconds
    hangs              processes that a signal did not end within a minute
    images             images that must not be lost
    labels             labels that must not be lost
    alarms             alarms of both watches after the last kill
    guarantee_alarms   those among them that say that the guarantee is broken
    same_tests         whether the tests of images end in the stream's watch as in that of an undisturbed stream

The last line is one JSON object.
"""

import argparse
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from rich.progress import track

import dubito
from dubito.errors import DubitoError
from dubito.guard import Guard, Watch, WatchReport
from dubito.table import Table
from dubito.types import Classifier

MODEL = "timm:test_resnet"
RIGHT, WRONG = 0, 1
"""The class that the network predicts for every image, and another one."""
CLIENTS, BATCH, REQUESTED = 4, 4, 5
KEPT = 200
"""Latest images that are looked for: the watch names its latest 300."""
PER_KILL, USUAL = 120, 8
"""Images of the stream per kill, more than it gets through before it is killed; the first ones are usual images."""
MARK = "DUBITO_KILLED"
PATIENCE = 60
LOSSES = ("lost", "labels_lost", "labels_doubled", "requests_lost", "broken_states", "alarms_lost", "alarms_doubled")
COUNTS = ("kills", *LOSSES, "orphans", "hangs", "images", "labels", "alarms", "guarantee_alarms")
STREAM = """
import json
import sys
from pathlib import Path
import dubito
guard, cache = dubito.Guard.load(sys.argv[1]), dubito.open(sys.argv[2])
labels = json.loads(Path(sys.argv[3]).read_text())
watch, requested, batch = guard.watch(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
start = watch.report().images
verdicts = guard.stream(cache.rows(slice(start, None)), batch=batch, watch=watch)
for number, verdict in enumerate(verdicts, start + 1):
    print(json.dumps({"images": [verdict.id]}), flush=True)
    if number % (3 * requested) == 0:
        sent = {name: labels[name] for name in watch.request_labels(requested)}
        print(json.dumps({"sent": sent}), flush=True)
        report = watch.label(sent)
        print(json.dumps({"acknowledged": list(sent), "alarms": report.alarms}), flush=True)
"""


@dataclass
class Known:
    """What is known since the last kill.

    Attributes:
        images: Names of images that have a verdict.
        sent: Labels that were sent, by image.
        acknowledged: Names of images whose labels were acknowledged.
        lost: Labels that were acknowledged, and then requested again.
        alarms: By kind, the alarms that were reported.
    """

    images: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    lost: int = 0
    alarms: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        *,
        images: Iterable[str] = (),
        sent: Mapping[str, int] | None = None,
        acknowledged: Iterable[str] = (),
        alarms: Iterable[Any] = (),
    ) -> None:
        """Add what has become known."""
        self.images.extend(images)
        self.lost += len(self.acknowledged.intersection(sent or {}))
        self.sent.update(sent or {})
        self.acknowledged.update(acknowledged)
        self.alarms.update({alarm["kind"]: alarm for alarm in alarms})


def main() -> None:
    """Kill, restart, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts = Counter(dict.fromkeys(COUNTS, 0))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_guard(place)
        for kill, seed in ((kill_service, args.seed), (kill_stream, args.seed + 1)):
            kills = kill(place, args.kills, np.random.default_rng(seed), counts)
            for _ in track(kills, kill.__name__.replace("_", " "), total=args.kills):
                pass
    print(json.dumps({**counts, "same_tests": bool(counts["same_tests"])}))


def make_guard(place: Path) -> None:
    """A guard in `guard`, with its model in a file of weights."""
    torch.manual_seed(0)
    weights = dubito.load(MODEL, weights=None).module.state_dict()
    weights["fc.bias"][RIGHT] += 2
    torch.save(weights, place / "net.pt")
    names = make_cache(place / "cache", 300, 0, seed=0).id
    table = dubito.open(place / "cache", labels=labels_of(names, changed=False))
    Guard.fit(load_model(place), table, risk=0.2).save(place / "guard")


def load_model(place: Path) -> Classifier:
    """The network with random weights."""
    return dubito.load(MODEL, weights=str(place / "net.pt"))


def make_cache(folder: Path, usual: int, changed: int, *, seed: int) -> Table:
    """A cache of usual images, followed by changed ones."""
    images = np.concatenate([pixels(usual, seed), pixels(changed, seed + 1, changed=True)])
    return dubito.extract(load_model(folder.parent), images, to=folder, progress=False)


def pixels(n: int, seed: int, *, changed: bool = False) -> np.ndarray:
    """Images of coarse squares; of changed ones, every second is dark, and the others may be accepted."""
    coarse = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    if changed:
        coarse[::2] //= 6
    return coarse.repeat(10, axis=1).repeat(10, axis=2)


def labels_of(names: Iterable[str], *, changed: bool) -> dict[str, int]:
    """Labels by name: one in 20 is an error, and every one of changed images."""
    return {name: WRONG if changed or zlib.crc32(name.encode()) % 20 == 0 else RIGHT for name in names}


def files(changed: bool) -> list[bytes]:
    """Images as a client sends them."""
    contents = []
    for array in pixels(KEPT, 10, changed=changed):
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        contents.append(buffer.getvalue())
    return contents


def kill_service(
    place: Path,
    kills: int,
    rng: np.random.Generator,
    counts: Counter[str],
    signals: Sequence[int] = (signal.SIGKILL,),
) -> Iterator[None]:
    """Clients send to a service that is ended again and again, by these signals in turn; yields after each."""
    guard, folder, usual = Guard.load(place / "guard"), place / "service.watch", (kills + 1) // 2
    cache = make_cache(place / "fed", PER_KILL * usual, PER_KILL * (kills - usual), seed=2)
    command = [sys.executable, "-m", "dubito", "serve", str(place / "guard"), "--port", "0", "--workers", "1", "--json"]
    watch = guard.watch(folder)
    for number in range(kills):
        known, changed, requesting = Known(), number >= usual, number % 2 == 1
        for _ in range(5):  # all images, as the watch forgets some; few at a time, as it gives up what many wait for
            report = watch.label(labels_of(watch.request_labels(50), changed=changed))
        ended_by = signals[number % len(signals)]
        with killed([*command, "--watch", str(folder)], counts, ended_by) as (process, strike):
            if number % 5 == 4:
                time.sleep(rng.uniform(0, 5))
            else:
                address, contents = address_of(process), files(changed)
                rows = cache.rows(slice(PER_KILL * number, PER_KILL * (number + 1)))
                clients = [Client(address, known, changed) for _ in range(CLIENTS + 1)]
                work = [partial(clients[0].feed, watch, rows, request=requesting)]
                for first, client in enumerate(clients[1:]):
                    work.append(partial(client.ask, contents[first::CLIENTS], label=not requesting))
                work_until_killed(strike, work, known, rng)
                for client in clients:
                    client.connection.close()
        report = compare(watch, report, known, counts)
        if number == kills - 1:
            count_alarms(report, counts)
        yield


def address_of(process: "subprocess.Popen[str]") -> str:
    """Host and port of a service, once it says that it listens."""
    assert process.stdout is not None  # noqa: S101 (a pipe)
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the service did not start")
        text += line
    return str(json.loads(text)["address"]).removeprefix("http://")


class Client:
    """Sends to a service until that is killed."""

    def __init__(self, address: str, known: Known, changed: bool) -> None:
        self.connection, self.known, self.changed = http.client.HTTPConnection(address, timeout=30), known, changed

    def ask(self, contents: list[bytes], *, label: bool) -> None:
        """Send images, one after the other, and labels of those that are accepted."""
        with suppress(ConnectionError, http.client.HTTPException):
            for content in contents:
                verdicts = self.post("/guard", content).get("verdicts", [])
                self.known.add(images=[one["id"] for one in verdicts])
                if label:
                    self.label([one["id"] for one in verdicts if one["accept"]])

    def feed(self, watch: Watch, rows: Table, *, request: bool) -> None:
        """Feed the watch of the service from this process, and send labels that it requests."""
        with suppress(ConnectionError, http.client.HTTPException):
            for number, verdict in enumerate(watch.guard.stream(rows, batch=BATCH, watch=watch), 1):
                self.known.add(images=[verdict.id])
                if number % BATCH == 0:  # sending no labels shows whether the service is still there
                    self.label(watch.request_labels(REQUESTED) if request else [])

    def label(self, names: list[str]) -> None:
        """Send labels."""
        labels = labels_of(names, changed=self.changed)
        self.known.add(sent=labels)
        if report := self.post("/labels", json.dumps(labels).encode()):
            self.known.add(acknowledged=labels, alarms=report["alarms"])

    def post(self, path: str, body: bytes) -> Any:
        """What the service answers; nothing if it refuses."""
        self.connection.request("POST", path, body)
        answer = self.connection.getresponse()
        text = answer.read()
        return json.loads(text) if answer.status == 200 else {}


def work_until_killed(
    strike: Callable[[], None], work: "list[partial[None]]", known: Known, rng: np.random.Generator
) -> None:
    """Kill a service while clients are at work."""
    with ThreadPoolExecutor(len(work)) as threads:
        running = [threads.submit(one) for one in work]
        enough = rng.integers(KEPT // 2)
        while len(known.images) < enough and not any(one.done() for one in running):
            time.sleep(rng.uniform(0, 0.02))
        strike()
        for one in running:
            one.result()


def kill_stream(
    place: Path,
    kills: int,
    rng: np.random.Generator,
    counts: Counter[str],
    signals: Sequence[int] = (signal.SIGKILL,),
) -> Iterator[None]:
    """A stream that is ended again and again, by these signals in turn; yields after each.

    In the end, `same_tests` counts whether its tests of images end as those of a stream that nobody kills.
    """
    guard, folder, usual = Guard.load(place / "guard"), place / "stream.watch", USUAL * kills
    cache = make_cache(place / "stream", usual, PER_KILL * max(kills, 40) - usual, seed=4)
    names = cache.id
    labels = labels_of(names[:usual], changed=False) | labels_of(names[usual:], changed=True)
    (place / "labels.json").write_text(json.dumps(labels))
    undisturbed = guard.watch()
    for _ in guard.stream(cache, watch=undisturbed):
        pass
    expected = undisturbed.report()
    command = [sys.executable, "-c", STREAM, *(str(place / one) for one in ("guard", "stream", "labels.json"))]
    command += [str(folder), str(REQUESTED)]
    watch = guard.watch(folder)
    report = watch.report()
    for number in range(kills):
        known, wanted = Known(), 0 if number % 5 == 4 else rng.integers(1, PER_KILL // 2)
        with killed([*command, str(BATCH)], counts, signals[number % len(signals)]) as (process, strike):
            assert process.stdout is not None  # noqa: S101 (a pipe)
            lines = [process.stdout.readline() for _ in range(wanted)]
            time.sleep(rng.uniform(0, 0.1 if lines else 3))
            if process.poll() is not None:
                raise SystemExit("the stream ended before it was killed: raise PER_KILL")
            strike()
            lines += process.stdout.readlines()
        for line in lines:
            if line.endswith("\n"):
                known.add(**json.loads(line))
        report = compare(watch, report, known, counts)
        counts["requests_lost"] += report.volunteered
        counts["broken_states"] += report.images % BATCH != 0
        counts["alarms_lost"] += sum(
            alarm["images"] <= report.images and alarm not in report.alarms for alarm in expected.alarms
        )
        if number == kills - 1:
            count_alarms(report, counts)
            subprocess.run([*command, "64"], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 (our own)
            counts["same_tests"] += tests_of_images(watch.report()) == tests_of_images(expected)
        yield


def compare(watch: Watch, before: WatchReport, known: Known, counts: Counter[str]) -> WatchReport:
    """What the watch reports after a kill: all that it reported before, and what is known since.

    Labels that were not acknowledged are sent again, as a client would do: each must be there once.
    """
    assert watch.folder is not None  # noqa: S101 (its state outlives the process)
    try:
        again = {name: label for name, label in known.sent.items() if name not in known.acknowledged}
        report = Watch.open(watch.guard, watch.folder).label(again)
        recent = {entry[0] for entry in json.loads((watch.folder / "watch.json").read_bytes())["recent"]}
    except (DubitoError, OSError, ValueError):
        counts["broken_states"] += 1
        return before
    known.add(alarms=before.alarms)
    absent = len(set(known.images[-KEPT:]) - recent)
    counts["lost"] += max(absent, before.images + len(known.images) - report.images, 0)
    surplus = labels_in(report) - labels_in(before) - len(known.sent)
    counts["labels_lost"] += max(-surplus, 0) + known.lost
    counts["labels_doubled"] += max(surplus, 0)
    counts["alarms_lost"] += sum(alarm not in report.alarms for alarm in known.alarms.values())
    counts["alarms_doubled"] += len(report.alarms) - len({alarm["kind"] for alarm in report.alarms})
    counts["images"] += len(known.images)
    counts["labels"] += len(known.sent)
    return report


def labels_in(report: WatchReport) -> int:
    """Labels that a watch has: tested ones, those that wait for others, and those of images that were not drawn."""
    return report.outcomes + report.waiting + report.volunteered


def tests_of_images(report: WatchReport) -> list[Any]:
    """What a watch reports of images, whatever labels it has."""
    evidence, since = ({**one, "guarantee": None} for one in (report.evidence, report.since))
    return [report.images, evidence, since, report.examples, [point[:2] for point in report.history]]


def count_alarms(report: WatchReport, counts: Counter[str]) -> None:
    """Count the alarms of a watch."""
    counts["alarms"] += len(report.alarms)
    counts["guarantee_alarms"] += sum(alarm["kind"] == "guarantee" for alarm in report.alarms)


@contextmanager
def killed(
    command: list[str], counts: Counter[str], number: int
) -> "Iterator[tuple[subprocess.Popen[str], Callable[[], None]]]":
    """A process, and what sends it a signal, at the latest at the end; counts how many of its children outlive it."""
    mark = f"{os.getpid()}-{counts['kills']}"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, MARK: mark}) as process:  # noqa: S603 (our own)
        struck: list[int] = []

        def strike() -> None:
            if not struck:
                struck.append(number)
                process.send_signal(number)

        try:
            yield process, strike
        finally:
            strike()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                counts["hangs"] += 1
                process.kill()
            counts["kills"] += 1
            end = time.monotonic() + 10
            while (left := marked(mark)) and time.monotonic() < end:
                time.sleep(0.05)
            counts["orphans"] += len(left)


def marked(mark: str) -> list[int]:
    """Processes that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


if __name__ == "__main__":
    main()
