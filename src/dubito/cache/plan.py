"""How many workers, hours, bytes and how much money an extraction takes, and what limits it next.

A worker goes through a block of `shard_size` images in

    T = s / r + w,   r = min(model, decoding, fetching),   w = latency of the store + bytes of the block / bandwidth

seconds. If workers fail at random, on average once in M hours, and then need D seconds to start again, a block that is
lost whole at every failure takes

    E = (M + D) (exp(T / M) - 1)

seconds (the mean of a renewal process with exponential failures). B blocks on W workers take B E / W + E / 2: at the
end, some workers have nothing left to do. What all workers share, the store's requests and bandwidth and the process
that hands out blocks, bounds the rate of all of them together.

One process opens the images: it lists files, a thousand with one request, and of tar shards it reads every byte once.
When an extraction is resumed, it also reads the images of finished blocks. It and every worker hold names and labels of
all images.

`simulate` draws the same workers, failures and delays one event at a time, to check the closed form.
"""

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, final

from dubito.errors import ValueRangeError
from dubito.result import Result
from dubito.validate import check_number

MANIFEST_BYTES = 100
"""Bytes of the manifest per shard: its name, rows and size."""
IMAGE_MEMORY = 110
"""Bytes of a process's memory per image: its name and its label."""
_MOST_MANIFEST = 50e6
"""Bytes of a manifest that is still written and read in about a second."""
_MOST_IMAGES = 10_000_000
"""Images of one extraction that are opened, and held in memory, without trouble."""
_MOST = 1e18
"""Largest number of anything: products of several stay finite."""
_MOST_EVENTS = 10_000_000
"""Blocks, failures and workers that are simulated in a minute or so."""
_HOUR = 3600.0
_HOURS = 24.0
"""That an extraction may take, unless the user chooses."""
_LISTED = 1000
"""Files that a store lists with one request."""

Number = int | float


@final
@dataclass(frozen=True)
class Cluster:
    """What an extraction runs on, and what it costs.

    Attributes:
        rate: Images per second that one worker's model takes.
        decode_rate: Images per second that one worker decodes; infinite if other processes do it in time.
        image_bytes: Mean size of an image file.
        row_bytes: Bytes of the cache per row, of all probes together.
        shard_size: Images per shard.
        kinds: Shards per block: one of rows, and one per probe.
        latency: Seconds until the store answers a request.
        connections: Requests that a worker has open at a time: the processes that decode beside it, 4 on GPUs.
        images_per_request: Images that one request fetches: 1 for files, more for tar shards.
        bandwidth: Bytes per second between one worker and the store.
        store_requests: Requests per second that the store answers to all workers.
        store_bandwidth: Bytes per second that the store sends to all workers.
        driver_rate: Blocks per second that the driver hands out.
        mtbf: Hours between two failures of one worker.
        restart: Seconds until a worker that failed works again.
        price: Of one worker for an hour.
        request_price: Of a thousand requests that read.
        write_price: Of a thousand requests that write.
        storage_price: Of a gigabyte of the cache for a month.
    """

    rate: Number
    decode_rate: Number = math.inf
    image_bytes: Number = 110e3
    row_bytes: Number = 6600.0
    shard_size: int = 512
    kinds: int = 2
    latency: Number = 0.03
    connections: int = 4
    images_per_request: Number = 1.0
    bandwidth: Number = 100e6
    store_requests: Number = 5500.0
    store_bandwidth: Number = 10e9
    driver_rate: Number = 100.0
    mtbf: Number = 100.0
    restart: Number = 120.0
    price: Number = 0.0
    request_price: Number = 0.0004
    write_price: Number = 0.005
    storage_price: Number = 0.023

    def __post_init__(self) -> None:
        for one in fields(self):
            free = "price" in one.name or one.name in ("latency", "restart")
            value, whole = getattr(self, one.name), one.name in ("shard_size", "kinds", "connections")
            if not (one.name == "decode_rate" and value == math.inf):
                low = 0 if free else 1 if whole else 1e-9
                check_number(value, f"[{low}, {_MOST:g}]", by="plan", what=one.name, whole=whole)
        if self.expected_seconds() > _MOST:
            raise ValueRangeError(
                f"plan: no block is ever finished: one takes {self.block_seconds():,.0f} seconds, and a worker fails "
                f"every {self.mtbf * _HOUR:,.0f}. Take a smaller shard_size, or a larger mtbf."
            )

    def stages(self) -> dict[str, Number]:
        """Images per second of each thing that one worker does."""
        requests = self.connections * self.images_per_request
        transfer = self.image_bytes * self.images_per_request / self.bandwidth
        return {
            "model": self.rate,
            "decoding": self.decode_rate,
            "store latency": requests / (self.latency + transfer),
            "worker bandwidth": self.bandwidth / self.image_bytes,
        }

    def shared(self) -> dict[str, Number]:
        """Images per second of each thing that all workers share."""
        return {
            "store request rate": self.store_requests * self.images_per_request,
            "store bandwidth": self.store_bandwidth / self.image_bytes,
            "driver": self.driver_rate * self.shard_size,
        }

    def block_seconds(self) -> float:
        """T, the seconds of a block without failures."""
        write = self.kinds * self.latency + self.shard_size * self.row_bytes / self.bandwidth
        return self.shard_size / min(self.stages().values()) + write

    def expected_seconds(self) -> float:
        """E, the seconds of a block with failures."""
        between = self.mtbf * _HOUR
        try:
            return (between + self.restart) * math.expm1(self.block_seconds() / between)
        except OverflowError:
            return math.inf


@final
@dataclass
class ExtractionPlan(Result):
    """What an extraction takes: print it, or take it as a dict, JSON, CSV or pandas.

    Attributes:
        images: Number of images.
        rows: Rows of the cache: images times epochs.
        workers: Number of workers.
        hours: Hours from the first block to the last.
        opening_hours: Hours before the first block, in which one process lists all files, or reads all tar shards.
        resume_hours: Hours in which one process compares all images again if the extraction is resumed at its end.
        images_per_second: Of all workers together.
        efficiency: The share of a worker's time that failures leave.
        shards: Number of shards, of all kinds.
        cache_bytes: Size of the cache.
        manifest_bytes: Size of its manifest.
        memory_bytes: What every worker holds beside the model: names and labels of all images.
        cost: By part: workers, requests, and storage for a month.
        limits: Images per second that each part could do.
        cluster: What it runs on.
    """

    images: int
    rows: int
    workers: int
    hours: float
    opening_hours: float
    resume_hours: float
    images_per_second: float
    efficiency: float
    shards: int
    cache_bytes: float
    manifest_bytes: float
    memory_bytes: float
    cost: dict[str, float]
    limits: dict[str, Number]
    cluster: Cluster = field(repr=False)

    titles: ClassVar[Mapping[str, str]] = {"limit": "images/s at most", "used": "used"}

    def title(self) -> str:
        """What is planned."""
        return f"{self.rows:,} rows of {self.images:,} images on {self.workers:,} workers"

    def facts(self) -> dict[str, str]:
        """Time, size and cost."""
        parts = ", ".join(f"{name} {value:,.0f}" for name, value in self.cost.items())
        return {
            "time": f"{self.hours:,.1f} hours, {self.images_per_second:,.0f} images/s",
            "opening": f"{self.opening_hours:,.1f} hours before, at most {self.resume_hours:,.1f} if it is resumed",
            "cache": f"{self.cache_bytes / 1e9:,.1f} GB in {self.shards:,} shards",
            "manifest": f"{self.manifest_bytes / 1e6:,.1f} MB",
            "memory": f"{self.memory_bytes / 1e9:,.1f} GB per worker, beside the model",
            "cost": f"{sum(self.cost.values()):,.0f} ({parts} for a month)",
            "lost to failures": f"{100 * (1 - self.efficiency):.1f} %",
        }

    def records(self) -> list[dict[str, Any]]:
        """Every part that may limit the rate, the one that does first."""
        ordered = sorted(self.limits.items(), key=lambda one: one[1])
        return [
            {"part": name, "limit": limit, "used": self.images_per_second / limit}
            for name, limit in ordered
            if limit < math.inf
        ]

    def cell(self, key: str, value: Any) -> str:
        """Rates without decimals, shares in per cent."""
        return (
            f"{100 * value:.0f} %" if key == "used" else f"{value:,.0f}" if key == "limit" else super().cell(key, value)
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; a part without a limit is None."""
        finite = {name: limit if limit < math.inf else None for name, limit in self.limits.items()}
        settings = {key: value if value != math.inf else None for key, value in vars(self.cluster).items()}
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "limits": finite, "cluster": settings, "findings": self.findings()}

    def findings(self) -> list[str]:
        """What limits the extraction, what will next, and what to change."""
        first, second, *_ = self.records()
        sentences = [
            f"The {first['part']} limits the extraction. "
            f"The {second['part']} would be next, at {second['limit']:,.0f} images/s."
        ]
        if first["part"] in self.cluster.shared():
            sentences.append("More workers do not help: they share it.")
        if "request" in first["part"]:
            sentences.append(
                "Fetch several images with one request: keep them in tar shards, or spread them over prefixes."
            )
        if self.images > _MOST_IMAGES:
            sentences.append(
                f"One process opens all images, and every worker holds their names: extract in "
                f"{math.ceil(self.images / _MOST_IMAGES):,} parts, each into a cache of its own, and join the tables "
                f"with dubito.concat."
            )
        if self.manifest_bytes > _MOST_MANIFEST:
            size = 2 ** math.ceil(math.log2(self.cluster.shard_size * self.manifest_bytes / _MOST_MANIFEST))
            smaller = self.manifest_bytes * self.cluster.shard_size / size
            sentences.append(
                f"The manifest would have {self.manifest_bytes / 1e6:,.0f} MB, and the folder {self.shards:,} files. "
                f"With shard_size={size} it would have {smaller / 1e6:,.0f} MB."
            )
        if self.efficiency < 0.9:
            sentences.append("Failures cost more than a tenth of the time: use smaller shards, which lose less.")
        return sentences


def plan_extraction(
    images: Number, cluster: Cluster, *, workers: int | None = None, hours: Number | None = None, epochs: int = 1
) -> ExtractionPlan:
    """What an extraction of so many images takes, on some workers or within some hours.

    Args:
        images: Number of images.
        cluster: What it runs on: rates, sizes, failures and prices.
        workers: Number of workers; by default as few as finish within `hours`.
        hours: Hours that it may take, if the number of workers is not given; by default 24, or as many as it takes with
            any number of workers.
        epochs: How often every image is extracted.

    >>> plan_extraction(1e6, Cluster(rate=250), workers=10).workers
    10
    """
    check_number(images, f"[1, {_MOST:g}]", by="plan", what="images")
    check_number(epochs, f"[1, {_MOST:g}]", by="plan", what="epochs", whole=True)
    if workers is not None and hours is not None:
        raise ValueRangeError("plan: workers and hours determine each other; got both. Leave one of them out.")
    rows = round(images) * epochs
    if workers is None:
        hours = max(_HOURS, 1.01 * _least_hours(rows, cluster)) if hours is None else hours
        check_number(hours, f"[1e-9, {_MOST:g}]", by="plan", what="hours")
        workers = _enough_workers(rows, cluster, hours)
    check_number(workers, f"[1, {_MOST:g}]", by="plan", what="workers", whole=True)
    seconds = _seconds(rows, cluster, workers)
    blocks = math.ceil(rows / cluster.shard_size)
    per_worker = cluster.expected_seconds() / cluster.shard_size
    stages = {name: workers * limit for name, limit in cluster.stages().items()}
    reading = round(images) * cluster.image_bytes / cluster.bandwidth / _HOUR
    reads, writes = rows / cluster.images_per_request, blocks * cluster.kinds
    return ExtractionPlan(
        images=round(images),
        rows=rows,
        workers=workers,
        hours=seconds / _HOUR,
        opening_hours=reading if cluster.images_per_request > 1 else round(images) / _LISTED * cluster.latency / _HOUR,
        resume_hours=reading,
        images_per_second=min(workers / per_worker, *cluster.shared().values()),
        efficiency=cluster.block_seconds() / cluster.expected_seconds(),
        shards=writes,
        cache_bytes=rows * cluster.row_bytes,
        manifest_bytes=float(writes * MANIFEST_BYTES),
        memory_bytes=float(round(images) * IMAGE_MEMORY),
        cost={
            "workers": workers * seconds / _HOUR * cluster.price,
            "requests": (reads * cluster.request_price + writes * cluster.write_price) / 1000,
            "storage": rows * cluster.row_bytes / 1e9 * cluster.storage_price,
        },
        limits={**stages, **cluster.shared()},
        cluster=cluster,
    )


def simulate(rows: int, cluster: Cluster, workers: int, *, seed: int = 0) -> float:
    """Hours of an extraction, drawn event by event: delays, failures, and what all workers share.

    A worker takes the next block, waits for its turn at the store and at the driver, which serve one block after the
    other, fetches, computes, and writes; every request takes its own time. If it fails before, the block goes back to
    the others and the worker starts again.

    Args:
        rows: Rows to extract.
        cluster: What it runs on.
        workers: Number of workers.
        seed: Seed of the random numbers.
    """
    waiting = math.ceil(rows / cluster.shard_size)
    events = workers + waiting * math.exp(min(cluster.block_seconds() / (cluster.mtbf * _HOUR), 100))
    if events > _MOST_EVENTS:
        raise ValueRangeError(
            f"plan: a simulation of {workers:,} workers and {waiting:,} blocks has about {events:.1e} events; at most "
            f"{_MOST_EVENTS:,} are simulated. Take fewer images or a larger shard_size."
        )
    draw = random.Random(seed)  # noqa: S311 (a simulation)
    turn = cluster.shard_size / min(cluster.shared().values())
    free = [(0.0, draw.expovariate(1 / (cluster.mtbf * _HOUR))) for _ in range(workers)]
    heapq.heapify(free)
    served = end = 0.0
    while waiting:
        now, failure = heapq.heappop(free)
        served = max(served, now) + turn
        done = max(now + _drawn_seconds(cluster, draw), served)
        if failure < done:
            again = max(failure, now) + cluster.restart
            heapq.heappush(free, (again, again + draw.expovariate(1 / (cluster.mtbf * _HOUR))))
            continue
        waiting -= 1
        end = max(end, done)
        heapq.heappush(free, (done, failure))
    return end / _HOUR


def _drawn_seconds(cluster: Cluster, draw: random.Random) -> float:
    """Of one block without failures. Delays are exponential: a store answers most requests early and a few late."""
    size, requests = cluster.shard_size, math.ceil(cluster.shard_size / cluster.images_per_request)
    delays = [draw.gammavariate(n, cluster.latency) if cluster.latency else 0.0 for n in (requests, cluster.kinds)]
    sent = size * cluster.image_bytes / cluster.bandwidth
    fetching = max(sent, (delays[0] + sent) / cluster.connections)
    written = size * cluster.row_bytes / cluster.bandwidth
    return max(size / cluster.rate, size / cluster.decode_rate, fetching) + delays[1] + written


def _seconds(rows: int, cluster: Cluster, workers: int) -> float:
    """From the first block to the last."""
    blocks, each = math.ceil(rows / cluster.shard_size), cluster.expected_seconds()
    own = each if blocks <= workers else blocks * each / workers + each / 2
    return max(own, rows / min(cluster.shared().values()))


def _least_hours(rows: int, cluster: Cluster) -> float:
    """What it takes with any number of workers."""
    return max(rows / min(cluster.shared().values()), cluster.expected_seconds()) / _HOUR


def _enough_workers(rows: int, cluster: Cluster, hours: Number) -> int:
    """The fewest workers that finish in time; ValueRangeError where no number does."""
    seconds, blocks, each = hours * _HOUR, math.ceil(rows / cluster.shard_size), cluster.expected_seconds()
    name, shared = min(cluster.shared().items(), key=lambda one: one[1])
    if (least := _least_hours(rows, cluster)) > hours:
        why = f"the {name} allows {shared:,.0f} images/s" if rows / shared > seconds else "one block takes longer"
        also = ", or fetch several images with one request: images_per_request=9" if "request" in name else ""
        raise ValueRangeError(
            f"plan: no number of workers finishes in {hours:g} hours: {why}. Allow {least:,.1f} hours{also}."
        )
    return blocks if 1.5 * each >= seconds else min(blocks, math.ceil(blocks * each / (seconds - each / 2)))
