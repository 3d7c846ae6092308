"""Small valid artefacts of every kind, made by the library itself, and how each is sealed again after an edit."""

import hashlib
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load
from torch import nn

import dubito
from dubito.calibration.registry import METHODS, make_calibration, save_calibration
from dubito.ensembles.head_masks import HeadMasks
from dubito.guard import Decisions, PredictionSets
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, write_head
from dubito.heads.loop import Run
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe
from dubito.models.wrap import WrappedClassifier
from dubito.storage import tensors_digest
from dubito.table import Table
from tests.fuzz.edits import Script, edit_bytes, edit_file, pack_tensors
from tests.guard.world import blobs

_PART = re.compile(r"(?P<stem>[a-z]+)-[0-9a-f]+-[0-9a-f]{8}(?P<ending>\.[a-z]+)?")
_SHARD = re.compile(r"(?P<stem>[a-z_]+-\d{5})-[0-9a-f]{8}\.safetensors")


@dataclass(frozen=True)
class Artefact:
    """Files of something that the library wrote.

    Attributes:
        files: Their content by relative path.
        seal: What makes the hashes of an edited folder agree again.
    """

    files: dict[str, bytes]
    seal: Callable[[Path], None]

    @classmethod
    def of(cls, folder: Path, seal: Callable[[Path], None]) -> "Artefact":
        """What lies in a folder."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        return cls({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}, seal)

    def put(self, folder: Path, script: Script) -> bool:
        """Write it into a folder with damage of the script's choice; whether it was sealed again afterwards."""
        files, sealed = dict(self.files), bool(script.number(4))
        while not script.ended:
            name = script.one_of(sorted(files))
            if sealed:
                files[name] = edit_file(script, name, files[name])
            elif script.number(8):
                files[name] = edit_bytes(script, files[name])
            else:
                del files[name]
            if not files or (sealed and not script.number(3)):
                break
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if sealed:
            self.seal(folder)
        return sealed


def seal_json(path: Path) -> None:
    """Make the hash of a sealed JSON file agree with what it says."""
    try:
        entries = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError):
        return
    if isinstance(entries, dict):
        entries.pop("digest", None)
        path.write_text(json.dumps({**entries, "digest": _digest(entries)}))


def seal_folder(folder: Path, description: str) -> None:
    """Name the parts of a saved folder by their content, and seal the description that refers to them."""
    names = {}
    for path in sorted(folder.iterdir()):
        if match := _PART.fullmatch(path.name):
            new = f"{match['stem']}-{_size(path):x}-{_checksum(path)}{match['ending'] or ''}"
            names[path.name] = path.rename(folder / new).name
    _replace(folder / description, names)


def seal_cache(folder: Path) -> None:
    """Name the shards of a cache by their content, and seal the manifest that refers to them."""
    names = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD.fullmatch(path.name):
            names[path.name] = path.rename(folder / f"{match['stem']}-{_checksum(path)}.safetensors").name
    manifest = folder / "manifest.json"
    _replace(manifest, names)
    try:
        entries = json.loads(manifest.read_text())
        for kind in (entries["rows"], *entries["probes"].values()):
            for shard in kind["shards"]:
                shard["bytes"] = (folder / shard["name"]).stat().st_size
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return  # the manifest itself was edited so that this has no meaning
    manifest.write_text(json.dumps(entries))
    seal_json(manifest)


def seal_head(folder: Path) -> None:
    """Give the config of a head the hash of its weights."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    digest = _hash(weights.read_bytes())
    config.write_text(re.sub(r'("weights_file": )"[0-9a-f]*"', rf'\1"{digest}"', config.read_text()))
    if '"digest"' in config.read_text():
        seal_json(config)


def seal_score(folder: Path) -> None:
    """Give the description of a score the hash of what it has learned."""
    described, state = folder / "score.json", folder / "state.safetensors"
    digest = _hash(state.read_bytes())
    text = re.sub(rb'("state_file": )"[0-9a-f]*"', rb'\1"' + digest.encode() + b'"', described.read_bytes())
    described.write_bytes(text)
    if b'"digest"' in text:
        seal_json(described)


def seal_guard(folder: Path) -> None:
    """The scores inside of a guard, and then the guard."""
    for state in folder.rglob("state.safetensors"):
        if (state.parent / "score.json").exists():
            seal_score(state.parent)
    seal_folder(folder, "guard.json")


def seal_index(folder: Path) -> None:
    """The score inside of an index, and then the index."""
    for place in folder.glob("score-*"):
        seal_score(place)
    seal_folder(folder, "index.json")


def seal_tensors(path: Path) -> None:
    """Give a file of `write_tensors` the hash of its tensors and notes."""
    data = path.read_bytes()
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header, digest = json.loads(data[8 : 8 + size]), tensors_digest(load(data))
        notes = json.loads(header["__metadata__"]["notes"])
        notes.pop("digest", None)
        header["__metadata__"] = {"notes": json.dumps({**notes, "digest": _digest(notes, f"\n{digest}")})}
    except Exception:
        return
    path.write_bytes(pack_tensors(header, data[8 + size :]))


def _digest(entries: Any, more: str = "") -> str:
    return _hash((json.dumps(entries, sort_keys=True) + more).encode())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in _files(path))


def _checksum(path: Path) -> str:
    """The CRC-32 of a file, or of the names and contents of a folder's files in turn."""
    crc = 0
    for one in _files(path):
        crc = zlib.crc32(one.relative_to(path).as_posix().encode(), crc) if path.is_dir() else crc
        crc = zlib.crc32(one.read_bytes(), crc)
    return f"{crc:08x}"


def _replace(description: Path, names: dict[str, str]) -> None:
    if description.exists():
        text = description.read_bytes().decode("utf-8", "surrogateescape")
        for old, new in names.items():
            text = text.replace(old, new)
        description.write_bytes(text.encode("utf-8", "surrogateescape"))
        seal_json(description)


class World:
    """The artefacts, each made when it is first needed, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.set_num_threads(1)

    def fresh(self) -> Path:
        """An empty folder for one example, which replaces the one before; it becomes the current folder."""
        place = self.folder / "example"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        os.chdir(place)
        return place

    @cached_property
    def images(self) -> Path:
        """Pictures in two class folders, beside a list of them."""
        folder, rng = self.folder / "images", np.random.default_rng(0)
        for index in range(6):
            path = folder / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(path)
        return folder

    @cached_property
    def network(self) -> WrappedClassifier:
        """A tiny network on 6 x 6 pixels."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        return dubito.wrap(module, classes=["a", "b"], transform=dubito.Preprocess((6, 6), 6), name="tiny")

    @cached_property
    def caches(self) -> list[Artefact]:
        """One with logits, and one that rebuilds them."""
        made = []
        for stored in (True, False):
            to = self.folder / f"cache-{stored}"
            probes = [dubito.probes.Forward(store_logit=stored), dubito.probes.Tiles(grids=(2,))][: 2 - stored]
            dubito.extract(self.network, self.images, to, batch_size=2, shard_size=4, workers=0, probes=probes)
            made.append(Artefact.of(to, seal_cache))
        return made

    @cached_property
    def table(self) -> Table:
        """Arrays to calibrate on."""
        return blobs(240)

    @cached_property
    def guard(self) -> dubito.Guard:
        """A guard with a head among its scores."""
        return dubito.Guard.fit(None, self.table, risk=0.3, scores=["entropy", "mahalanobis", "temperature"])

    @cached_property
    def guards(self) -> list[Artefact]:
        """By risk, by coverage, for every class, with costs."""
        other = dubito.Guard.fit(None, self.table, coverage=0.8, scores=["neighbours"], sets=False, novel=0)
        more: Any = {"risk": 0.6, "confidence": 0.6, "scores": ["entropy"], "missed": {1: 0.3}, "novel": 0}
        each = dubito.Guard.fit(None, self.table, per="class", sets=PredictionSets(0.5, "raps", clusters=2), **more)
        paid = (1 - np.eye(4)) * [[1], [2], [1], [1]]
        costs = dubito.Guard.fit(None, self.table, costs=paid, sets=PredictionSets(0.5, "saps"), **more)
        made = []
        for name, guard in (("risk", self.guard), ("coverage", other), ("class", each), ("costs", costs)):
            to = self.folder / f"guard-{name}"
            guard.save(to)
            made.append(Artefact.of(to, seal_guard))
        return made

    @cached_property
    def decisions(self) -> Decisions:
        """What the guard decides on other rows, whose labels nobody knows."""
        return self.guard.decide(blobs(40, seed=3).select("feature", "logit"))

    @cached_property
    def watches(self) -> list[Artefact]:
        """A watch that has seen images, of which some wait for labels."""
        to = self.folder / "watch"
        watch = self.guard.watch(to)
        watch.update(self.decisions)
        asked = watch.request_labels(6)
        watch.label(dict.fromkeys(asked[:3], 0))
        return [Artefact.of(to, lambda folder: seal_json(folder / "watch.json"))]

    @cached_property
    def indexes(self) -> list[Artefact]:
        """Exact, and approximate of every kind that is stored."""
        made = []
        for kind in ("", "IVF4,SQ8", "HNSW4", "IVF4,Flat", "PCA4,IVF4,Flat"):
            index = dubito.SafeIndex.build(self.table, dubito.Entropy(), per_class=not kind)
            if kind:
                index.approximate(kind)
            to = self.folder / f"index-{kind.replace(',', '-')}"
            index.save(to)
            made.append(Artefact.of(to, seal_index))
        return made

    @cached_property
    def heads(self) -> list[Artefact]:
        """Two sizes and two types."""
        made = []
        for depth, dtype in ((1, "float32"), (0, "float16")):
            module = HeadModule(6, width=4, depth=depth)
            config = HeadConfig.of(module, model="tiny", provenance=self.network_identity, dtype=dtype, licence="MIT")
            to = write_head(self.folder / f"head-{depth}", PretrainedHead(module, config))
            made.append(Artefact.of(to, seal_head))
            made[-1].files.pop("README.md")  # a text for people
        return made

    @cached_property
    def network_identity(self) -> Any:
        """Whose head it is."""
        return dubito.open(Path(self.folder / "cache-True")).provenance if self.caches else None

    @cached_property
    def scores(self) -> list[Artefact]:
        """Scores that have learned tensors or numbers."""
        made = []
        for name in ("mahalanobis", "neighbours", "temperature", "density", "entropy"):
            to = self.folder / f"score-{name}"
            dubito.save_score(dubito.scores.make_score(name).fit(self.table), to)
            made.append(Artefact.of(to, seal_score))
        return made

    @cached_property
    def calibrations(self) -> list[Artefact]:
        """One of every method."""
        made = []
        for name in METHODS:
            to = self.folder / f"calibration-{name}"
            save_calibration(make_calibration(name).fit(self.table), to)
            made.append(Artefact.of(to, lambda folder: seal_tensors(folder / "calibration.safetensors")))
        return made

    def train(self, folder: Path) -> Run:
        """Train a head, or go on with the training that a folder holds."""
        recipe = Recipe(episodes=3, warmup=0, rows=240, batch=60)
        loss = nn.functional.cross_entropy(self.table.logit, self.table.label, reduction="none")
        run = Run(self.table.extended(loss=loss), recipe, HeadModule(6, width=4, depth=1), 0, None, folder)
        run.go(progress=False)
        return run

    @cached_property
    def trainings(self) -> list[Artefact]:
        """The state of a training that has ended."""
        self.train(to := self.folder / "training")
        return [Artefact.of(to, lambda folder: seal_tensors(folder / "state.safetensors"))]

    def acquire(self, folder: Path) -> dubito.active.Acquisition:
        """Choose images to label, or go on with the choices that a folder holds."""
        return dubito.active.Acquire("random").run(self.table, rounds=2, count=3, start=20, to=folder)

    @cached_property
    def acquisitions(self) -> list[Artefact]:
        """Two rounds of choices, without the file that people write labels into."""
        self.acquire(to := self.folder / "acquisition")
        (to / "picks.csv").unlink()
        return [Artefact.of(to, lambda folder: seal_json(folder / "acquisition.json"))]

    @cached_property
    def masks(self) -> list[Artefact]:
        """Masks that were learned from features."""
        to = self.folder / "masks"
        recipe = dubito.ensembles.MaskRecipe(steps=2)
        HeadMasks(members=2, recipe=recipe).fit(self.table).save(to / "masks.safetensors")
        return [Artefact.of(to, lambda folder: seal_tensors(folder / "masks.safetensors"))]
