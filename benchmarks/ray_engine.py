"""How fast is extraction on Ray beside the local engine, and what do kills cost? EfficientNet-Lite0 on JPEG files.

    ratio         images/s on Ray with 2 workers of one thread each  /  images/s of the local engine with 2 workers;
                  from extractions of N and of 3 N images, so that what starting takes cancels out
    whole_ratio   the same with everything that starting takes, of 3 N images; the cluster is up already
    equal         both engines write the same bytes with the same number of threads
    worker_kills, node_kills, driver_kills   how many there were, at random instants, with --kills
    lost, doubled   rows that the caches lack or have twice after all kills; unequal counts caches with other bytes

    python benchmarks/ray_engine.py [--images 192] [--repeats 3] [--kills] [--seed 0]

The last line is one JSON object.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from _cluster import Killer, kill_node, kill_worker, running_cluster
from _measure import seconds_of
from extract import jpeg_folder
from ray.cluster_utils import Cluster
from rich.progress import track

import dubito
from dubito.data import Subset
from dubito.engines import LocalEngine, RayEngine
from dubito.types import Images

MODEL = "pypi:efficientnet_lite0"
WORKER_KILLS, NODE_KILLS, DRIVER_KILLS = 20, 5, 5
KILLED_IMAGES = 96
ON_RAY = RayEngine(replicas=2, retries=1000)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", action="store_true", help="also kill workers, nodes and drivers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", nargs=3, metavar=("IMAGES", "CACHE", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        images, cache, address = args.drive
        extract(dubito.open_images(images), Path(cache), RayEngine(address=address, retries=1000), shard_size=8)
        return
    with running_cluster() as cluster, tempfile.TemporaryDirectory() as place:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            photos = jpeg_folder(Path(place) / "jpegs", None, max(3 * args.images, KILLED_IMAGES))
            result = speed(Path(place), photos, args.images, args.repeats)
            if args.kills:
                result |= kills(Path(place), photos, cluster, random.Random(args.seed))  # noqa: S311 (not a secret)
        finally:
            ray.shutdown()
    print(json.dumps(result))


def extract(images: Images, to: Path, engine: Any, **options: Any) -> dubito.Table:
    """One extraction, by a model that is loaded anew: a killed driver loads its own, too."""
    settings = {"batch_size": 8, "shard_size": 32, "threads": 1, "progress": False, **options}
    return dubito.extract(dubito.load(MODEL), images, to, engine=engine, **settings)


def speed(place: Path, photos: Images, count: int, repeats: int) -> dict[str, Any]:
    """Both engines take turns, so that a slow minute slows both."""
    parts = {"few": Subset(photos, range(count)), "many": Subset(photos, range(3 * count))}
    local: dict[str, Any] = {"engine": LocalEngine(), "workers": 2, "threads": os.cpu_count()}
    engines = {"local": local, "ray": {"engine": ON_RAY}}
    seconds: dict[tuple[str, str], list[float]] = {(name, part): [] for name in engines for part in parts}
    for turn in track(range(repeats), description="measure"):
        for (name, part), values in seconds.items():
            to = place / f"{name}-{part}-{turn}"
            values.append(seconds_of(partial(extract, parts[part], to, **engines[name])))
    extract(parts["few"], place / "same", LocalEngine(), workers=2)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rates = {name: 2 * count / (median[name, "many"] - median[name, "few"]) for name in engines}
    return {
        "ratio": round(rates["ray"] / rates["local"], 4),
        "whole_ratio": round(median["local", "many"] / median["ray", "many"], 4),
        "equal": contents(place / "same") == contents(place / "ray-few-0"),
        **{f"{name}_images_per_second": round(rate, 2) for name, rate in rates.items()},
        "images": 3 * count,
        "cores": os.cpu_count(),
    }


def contents(cache: Path) -> dict[str, str]:
    """Every file of a cache by name, as a hash of its bytes."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(cache.iterdir())}


def kills(place: Path, photos: Images, cluster: Cluster, chance: random.Random) -> dict[str, int]:
    """Extractions are killed until there were as many kills as wanted; every cache is compared with a whole one."""
    images = Subset(photos, range(KILLED_IMAGES))
    table = extract(images, place / "whole", LocalEngine(), shard_size=8, workers=0)
    counts = {"worker_kills": 0, "node_kills": 0, "driver_kills": 0, "lost": 0, "doubled": 0, "unequal": 0}
    plan: dict[str, tuple[int, Callable[[], bool]]] = {
        "worker_kills": (WORKER_KILLS, lambda: kill_worker(chance)),
        "node_kills": (NODE_KILLS, lambda: kill_node(cluster, chance)),
    }
    for kind, (wanted, kill) in plan.items():
        while counts[kind] < wanted:
            to = place / f"{kind}-{counts[kind]}"
            killer = Killer(to, kill, wanted - counts[kind], chance)
            extract(images, to, ON_RAY, shard_size=8)
            counts[kind] += killer.stop()
            compare(to, place / "whole", table, counts)
            print(counts, flush=True)
    runs = 0
    while counts["driver_kills"] < DRIVER_KILLS:  # one that has ended before it is killed does not count
        to, runs = place / f"driver-{runs}", runs + 1
        counts["driver_kills"] += kill_driver(place / "jpegs", to, cluster.address, chance)
        extract(photos, to, ON_RAY, shard_size=8)
        whole = place / "whole-folder"
        compare(to, whole, extract(photos, whole, LocalEngine(), shard_size=8, workers=0), counts)
        print(counts, flush=True)
    return counts


def kill_driver(images: Path, to: Path, address: str, chance: random.Random) -> bool:
    """SIGKILL for a driver in a process of its own, some time after its first shards."""
    command = [sys.executable, __file__, "--drive", str(images), str(to), address]
    driver = subprocess.Popen(command)  # noqa: S603 (this file)
    while driver.poll() is None and len(list(to.glob("forward-*.safetensors"))) < 2:
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 3))
    alive = driver.poll() is None
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    return alive


def compare(cache: Path, whole: Path, table: dubito.Table, counts: dict[str, int]) -> None:
    """Count rows that are lost or doubled, and a cache that has other bytes than a whole one."""
    expected, ids = set(table.id), list(dubito.open(cache).id)
    counts["lost"] += len(expected - set(ids))
    counts["doubled"] += len(ids) - len(set(ids))
    counts["unequal"] += contents(cache) != contents(whole)


if __name__ == "__main__":
    main()
