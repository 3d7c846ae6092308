"""Does a watch lose anything when its process is killed? A service and a stream, killed at random instants.

    python experiments/kill_service.py [--kills 50] [--seed 0]

Two processes use the same guard, of a small network with random weights that is made on the spot. `dubito serve GUARD
--watch DIR` answers four clients; `guard.stream(watch=...)` goes on where the watch stopped. Each is ended by SIGKILL
--kills times: every fifth time while it starts, else while it works. After some kills, images are of another kind, so
that alarms are raised between kills. After every kill, the watch is read, and compared with what was known before:

    lost             images that a client had a verdict for, or that the stream had printed, and the watch does not have
    broken_states    states that could not be read, or that another number of images was in than fits the stream
    alarms_lost      alarms that were reported, or that the stream raises when nobody kills it, and that are missing
    alarms_doubled   alarms of a kind beyond the first
    orphans          processes that outlived the killed one by ten seconds
    answered         images that clients had a verdict for
    alarms           alarms of both watches after the last kill
    same_state       whether the stream's watch ends in the same bytes as that of an undisturbed stream

The last line is one JSON object.
"""

import argparse
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from rich.progress import track

import dubito
from dubito.errors import DubitoError
from dubito.guard import Guard

MODEL = "timm:test_resnet"
CLIENTS, BATCH = 4, 4
KEPT = 250
"""Images of one life of the service: the watch names its latest 300."""
PER_KILL, USUAL = 120, 8
"""Images of the stream per kill, more than it gets through before it is killed; the first ones are usual images."""
MARK = "DUBITO_KILLED"
STREAM = """
import sys
import dubito
guard, cache = dubito.Guard.load(sys.argv[1]), dubito.open(sys.argv[2])
watch = guard.watch(sys.argv[3])
start = watch.report().images
verdicts = guard.stream(cache.rows(slice(start, None)), batch=int(sys.argv[4]), watch=watch)
for number, _ in enumerate(verdicts, start + 1):
    print(number, flush=True)
"""


def main() -> None:
    """Kill, restart, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = ("kills", "lost", "broken_states", "alarms_lost", "alarms_doubled", "orphans", "answered", "alarms")
    counts = Counter(dict.fromkeys(names, 0))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_guard(place)
        kill_service(place, args.kills, np.random.default_rng(args.seed), counts)
        same = kill_stream(place, args.kills, np.random.default_rng(args.seed + 1), counts)
    print(json.dumps({**counts, "same_state": same}))


def make_guard(place: Path) -> None:
    """A guard in `guard`, with its model in a file of weights."""
    torch.manual_seed(0)
    torch.save(dubito.load(MODEL, weights=None).module.state_dict(), place / "net.pt")
    model = dubito.load(MODEL, weights=str(place / "net.pt"))
    table = dubito.extract(model, pixels(300, 0), to=place / "cache", progress=False)
    Guard.fit(model, table, coverage=0.8).save(place / "guard")


def pixels(n: int, seed: int, *, shifted: bool = False) -> np.ndarray:
    """Images of coarse squares; shifted ones are dark."""
    coarse = np.random.default_rng(seed).integers(0, 40 if shifted else 256, (n, 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(10, axis=1).repeat(10, axis=2)


def files(shifted: bool) -> list[bytes]:
    """Images as a client sends them."""
    contents = []
    for array in pixels(50, 1, shifted=shifted):
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        contents.append(buffer.getvalue())
    return contents


def kill_service(place: Path, kills: int, rng: np.random.Generator, counts: Counter[str]) -> None:
    """Clients send to a service that is killed again and again."""
    guard, folder = Guard.load(place / "guard"), place / "service.watch"
    command = [sys.executable, "-m", "dubito", "serve", str(place / "guard"), "--port", "0", "--workers", "1", "--json"]
    images, reported = 0, list[Any]()
    for number in track(range(kills), "service"):
        verdicts = list[str]()
        with killed([*command, "--watch", str(folder)], counts) as process:
            if number % 5 == 4:
                time.sleep(rng.uniform(0, 5))
            else:
                address = address_of(process)
                verdicts, seen = send_until_killed(process, address, files(number >= kills / 2), rng.uniform(0, 1))
                reported = seen or reported
        state = state_of(guard, folder, counts)
        if state is None:
            continue
        recent = {entry[0] for entry in state["recent"]}
        absent = len(set(verdicts) - recent)
        counts["lost"] += max(absent, images + len(verdicts) - state["images"], 0)
        counts["alarms_lost"] += sum(alarm not in state["alarms"] for alarm in reported)
        counts["answered"] += len(verdicts)
        images, reported = state["images"], state["alarms"]
    counts["alarms"] += len(reported)


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


def send_until_killed(
    process: "subprocess.Popen[str]", address: str, contents: list[bytes], seconds: float
) -> tuple[list[str], list[Any]]:
    """Ids of the verdicts that clients got until the service was killed, and the alarms it reported last."""
    verdicts, alarms = list[str](), list[Any]()

    def send(first: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=30)
        with suppress(OSError, http.client.HTTPException):
            for turn in range(KEPT // CLIENTS):
                if first == turn % CLIENTS == 0:
                    connection.request("GET", "/watch")
                    alarms[:] = json.loads(connection.getresponse().read())["alarms"]
                connection.request("POST", "/guard", contents[(first + CLIENTS * turn) % len(contents)])
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200:
                    verdicts.extend(one["id"] for one in json.loads(text)["verdicts"])

    with ThreadPoolExecutor(CLIENTS) as clients:
        work = [clients.submit(send, first) for first in range(CLIENTS)]
        time.sleep(seconds)
        process.kill()
        for one in work:
            one.result()
    return verdicts, alarms


def kill_stream(place: Path, kills: int, rng: np.random.Generator, counts: Counter[str]) -> bool:
    """A stream that is killed again and again; whether it ends as the one that nobody kills."""
    guard, folder, n = Guard.load(place / "guard"), place / "stream.watch", PER_KILL * max(kills, 10)
    usual = USUAL * kills
    both = np.concatenate([pixels(usual, 2), pixels(n - usual, 3, shifted=True)])
    model = dubito.load(MODEL, weights=str(place / "net.pt"))
    cache = dubito.extract(model, both, to=place / "stream", progress=False)
    for _ in guard.stream(cache, watch=guard.watch(place / "whole.watch")):
        pass
    whole = (place / "whole.watch" / "watch.json").read_bytes()
    expected = json.loads(whole)["alarms"]
    command = [sys.executable, "-c", STREAM, *(str(place / one) for one in ("guard", "stream")), str(folder)]
    alarms = 0
    for number in track(range(kills), "stream"):
        with killed([*command, str(BATCH)], counts) as process:
            assert process.stdout is not None  # noqa: S101 (a pipe)
            first = "" if number % 5 == 4 else process.stdout.readline()
            time.sleep(rng.uniform(0, 0.3 if first else 3))
            if process.poll() is not None:
                raise SystemExit("the stream ended before it was killed: raise PER_KILL")
            process.kill()
            printed = [int(line) for line in [first, *process.stdout.read().split("\n")[:-1]] if line]
        state = state_of(guard, folder, counts)
        if state is None:
            continue
        counts["broken_states"] += state["images"] % BATCH != 0
        counts["lost"] += max(max(printed, default=0) - state["images"], 0)
        counts["alarms_lost"] += sum(
            alarm["images"] <= state["images"] and alarm not in state["alarms"] for alarm in expected
        )
        alarms = len(state["alarms"])
    subprocess.run([*command, "64"], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 (our own)
    counts["alarms"] += alarms
    return (folder / "watch.json").read_bytes() == whole


@contextmanager
def killed(command: list[str], counts: Counter[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process that is killed at the end of the context, and how many of its children outlive it."""
    mark = f"{os.getpid()}-{counts['kills']}"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, MARK: mark}) as process:  # noqa: S603 (our own)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
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


def state_of(guard: Guard, folder: Path, counts: Counter[str]) -> dict[str, Any] | None:
    """The state of a watch, which must be whole."""
    try:
        report = guard.watch(folder).report()
        state: dict[str, Any] = json.loads((folder / "watch.json").read_bytes())
    except (DubitoError, OSError, ValueError):
        counts["broken_states"] += 1
        return None
    counts["broken_states"] += report.images != state["images"]
    counts["alarms_doubled"] += len(state["alarms"]) - len({alarm["kind"] for alarm in state["alarms"]})
    return state


if __name__ == "__main__":
    main()
