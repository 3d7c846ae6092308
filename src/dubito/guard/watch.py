"""Watch what a guard decides, image by image: are images still like those of the calibration, is the guarantee kept?

    every image       its rank among the reference images by uncertainty and by density, and its predicted class, each
                      tested for exchangeability with the calibration images
    every outcome     what the guarantee bounds: errors among accepted images that have a label, refused images, or
                      refused correct predictions, tested against the bound

The tests of `martingale` may be looked at after every image: over the whole life of a watch, a false alarm has a
probability of alpha at most, half of it for the images and half for the guarantee. The capital of several tests is
averaged.

Only labels of images that were drawn at random show the error rate: those that `request_labels` names, or all of a
batch. Images that are likely wrong are drawn more often, and weigh less (`label_draws`). Labels that people send by
themselves are kept, and tested only if the image is drawn later. Requested labels are tested in the order of the draw,
not in that of their arrival, because errors may arrive sooner, or later, than the rest. A label that does not arrive
is missing: no alarm depends on it, and the interval of the rate allows for any class.

What the watch cannot check: *when* labels are requested, and when labels of a batch or of your own draw are sent, which
are tested as they arrive, between requested ones. Neither may depend on what the labels show. Follow a schedule, such
as every day or every 1,000 images; whoever requests labels after complaints labels the errors behind them.

The state is one small file. An update reads it, adds to it and replaces it in one step under a lock: a process may be
killed at any instant, and several may watch together.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from dubito.data.labels import Labels, labels_by_image
from dubito.errors import ArtefactError, GuardError
from dubito.guard.martingale import tie_breakers
from dubito.guard.verdict import Decisions, Verdict
from dubito.guard.watch_layout import check_watch
from dubito.guard.watch_memory import RECENT, WatchMemory, bin_of, single_request
from dubito.guard.watch_report import WatchReport, make_report, note_peaks
from dubito.storage import LOCK, UNFINISHED, check_empty, locked, read_sealed, reading, to_path, write_sealed
from dubito.threads import Lock
from dubito.types import Json
from dubito.validate import check_number, check_seed

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

ALPHA = 0.01
_FORMAT = 6
_FILE = "watch.json"
_OURS = (LOCK, _FILE, f"{_FILE}{UNFINISHED}")
_PATIENCE = 60.0
"""Seconds to wait for another process that writes."""
_MOST = 10_000
"""Images whose labels are awaited at a time."""
_UNLABELLED = ("", "?")
"""Labels of images that cannot be labelled."""


@final
class Watch:
    """A guard with a memory: what arrives is compared with the calibration images for as long as it is used.

    Made by `Guard.watch`. Threads may share it, and so may processes by its folder.

    Args:
        guard: The guard whose decisions are watched.
        folder: Where the state is kept; None keeps it in memory.
        alpha: The probability of a false alarm, over the whole life; by default that of the folder, 0.01 for a new one.
        seed: Seed of tie-breaking, and of the images that labels are requested for; by default that of the folder, 0
            for a new one.

    Raises:
        ArtefactError: The folder has the state of another guard, or of another alpha or seed than these.
    """

    def __init__(
        self, guard: "Guard", folder: str | Path | None = None, *, alpha: float | None = None, seed: int | None = None
    ) -> None:
        if guard.guarantee.kind == "cost":
            raise GuardError(
                "watch: a guarantee about costs cannot be watched, because the tests are of rates of errors. Check it "
                "on labelled images (guard.check), or fit a guard with a risk and without costs."
            )
        self.guard, self.folder = guard, None if folder is None else to_path(folder, "the folder of a watch")
        saved_alpha, saved_seed = self._saved_settings()
        self.alpha, self.seed = saved_alpha if alpha is None else alpha, saved_seed if seed is None else seed
        check_number(self.alpha, "(0, 1)", by="watch", what="alpha", hint="0.01 is usual.")
        check_seed(self.seed, by="watch")
        self._lock, self._identity = Lock(), f"{guard.fingerprint}, alpha {self.alpha!r}, seed {self.seed}"
        self._state = WatchMemory.of(guard)
        self._written: tuple[int, ...] = ()
        if self.folder is not None and not (self.folder / _FILE).is_file():
            others = sorted(one.name for one in self.folder.iterdir()) if self.folder.is_dir() else []
            check_empty(self.folder, [one for one in others if one not in _OURS], "watch", "the folder of a watch")
            with self._changing():  # a folder that cannot be written is an error now
                pass
        elif self.folder is not None:
            self._read()  # another guard's is one, too

    @classmethod
    def open(cls, guard: "Guard", folder: str | Path) -> "Watch":
        """The watch whose state is in a folder, which must be there.

        Raises:
            ArtefactError: There is none, or it is of another guard.
        """
        if not (to_path(folder, "the folder of a watch") / _FILE).is_file():
            raise ArtefactError(
                f"watch: '{folder}' must be the folder of a watch; it has no {_FILE}. Choose another one."
            )
        return cls(guard, folder)

    def check_guard(self, guard: "Guard", *, by: str) -> None:
        """Raise GuardError if it watches another guard."""
        if self.guard is not guard:
            raise GuardError(f"{by}: watch must be a watch of this guard. Make one: guard.watch(folder).")

    def __call__(self, images: Any) -> Verdict | Decisions:
        """The guard's verdicts of one image or many, which the watch takes note of."""
        decisions, single = self.guard.decide_images(images)
        self.update(decisions)
        return decisions[0] if single else decisions

    def update(self, decisions: Decisions) -> "WatchReport":
        """Take note of decisions, in order. Labels that come with them are tested, as every image has one."""
        places = {
            "uncertainty": torch.where(decisions.novel, 1.0, decisions.rank),
            "classes": decisions.predicted[:, 0],
        }
        if decisions.density_rank is not None:
            places["density"] = 1 - decisions.density_rank
        columns = {name: values.tolist() for name, values in places.items()}
        accept, labels = decisions.accept.tolist(), None if decisions.label is None else decisions.label.tolist()
        uncertainty = decisions.uncertainty.tolist()
        with self._changing() as state:
            for row, name in enumerate(decisions.ids):
                at = {key: values[row] for key, values in columns.items()}
                about: Json = {"accept": accept[row], "stratum": state.stratum(uncertainty[row])}
                self._take(state, str(name), at, about, label=None if labels is None else labels[row])
            return self._noted(state)

    def label(self, labels: Labels, *, drawn: bool = False) -> "WatchReport":
        """Take note of true classes that arrive later.

        Args:
            labels: A mapping from image to its class, by number or by name, or a CSV file or a frame of both. Images
                are named as they were decided on, or by the file's name, if only one has it. "?" stands for an image
                that cannot be labelled, and in a mapping None and "" do, too; rows of a file or a frame that are still
                empty are left out.
            drawn: Whether you drew these images at random; those that `request_labels` named are drawn anyway. Send
                all labels of a draw, whatever they show.

        Raises:
            GuardError: A label is no class of the model.
        """
        numbers = self.check_labels(labels)
        with self._changing() as state:
            files = Counter(Path(name).name for name in state.pending)
            by_file = {file: name for name in state.pending if files[file := Path(name).name] == 1}
            for key, number in numbers.items():
                name = key if key in state.pending else by_file.get(Path(key).name, "")
                if name not in state.pending:
                    state.unknown += 1
                    continue
                image = state.pending[name]
                image["label"] = _compared(image, number)
                if drawn and not image["requested"]:
                    self._test(state, single_request(name, state.pending.pop(name)), [image])
            self._settle(state)
            return self._noted(state)

    def check_labels(self, labels: Labels) -> dict[str, int | None]:
        """What `label` would take note of: classes by image, by their numbers; None for what cannot be labelled.

        Raises:
            GuardError: A label is no class of the model.
        """
        by_image = labels_by_image(labels)
        if not isinstance(labels, Mapping):
            by_image = {name: label for name, label in by_image.items() if not _is_empty(label)}
        return {str(name): self._class_of(label) for name, label in by_image.items()}

    def request_labels(self, count: int) -> list[str]:
        """Names of `count` images to label, or fewer: those whose labels are awaited, and others, drawn at random.

        Of a risk, they are drawn among the latest accepted images, three for each label, more often where errors are
        likely; a label speaks for the images that are passed over, too, which are not drawn again. An image whose
        label is known already may be drawn, and is not named. While its label is awaited, a name stands for the image
        that was drawn, even if it is used again.

        Call it by a schedule, such as every day or every 1,000 images, and never because of complaints or errors: the
        probability of a false alarm holds only if the time says nothing about the latest images. Where an image is
        lost, send None as its label: until then, it is named again.
        """
        by = "watch.request_labels"
        check_number(count, "[1, inf)", by=by, what="count", whole=True, hint="100 are usual.")
        with self._changing() as state:
            state.draws += 1
            more, rng = min(count, _MOST) - len(state.awaited), np.random.default_rng([self.seed, state.draws])
            state.request(self.guard.guarantee.kind, more, rng)
            self._settle(state)
            self._noted(state)
            return state.awaited[:count]

    def report(self) -> "WatchReport":
        """What the watch has seen so far."""
        with self._lock:
            state = self._state if self.folder is None else self._read()
            return make_report(self.guard, state, self.alpha)

    @contextmanager
    def _changing(self) -> "Iterator[WatchMemory]":
        with self._lock:
            if self.folder is None:
                yield self._state
                return
            with locked(self.folder, seconds=_PATIENCE):
                state, self._written = self._read(), ()
                yield state
                made = {"format": _FORMAT, "of": self._identity, "alpha": self.alpha, "seed": self.seed}
                write_sealed(self.folder / _FILE, made | state.to_json(), compact=True)
                self._state, self._written = state, _stamp(self.folder / _FILE)

    def _saved_settings(self) -> tuple[float, int]:
        """Alpha and seed of the state in the folder, or those of a new watch."""
        if self.folder is None or not (self.folder / _FILE).is_file():
            return ALPHA, 0
        with _reading(self.folder):
            saved = read_sealed(self.folder / _FILE, format=_FORMAT)
            return float(saved["alpha"]), int(saved["seed"])

    def _read(self) -> "WatchMemory":
        assert self.folder is not None  # noqa: S101 (our own invariant)
        path = self.folder / _FILE
        if not path.is_file():
            return WatchMemory.of(self.guard)
        if self._written and self._written == _stamp(path):
            return self._state  # nobody else has written since
        with _reading(self.folder):
            saved = read_sealed(path, format=_FORMAT)
            if saved["of"] == self._identity:
                check_watch(saved, WatchMemory.of(self.guard).to_json())
                return WatchMemory.from_json(saved)
        raise ArtefactError(
            f"watch: '{self.folder}' is of another guard, or of another alpha or seed. Choose another folder, or the "
            f"same guard, and leave out alpha and seed."
        )

    def _take(self, state: "WatchMemory", name: str, at: Mapping[str, Any], about: Json, *, label: int | None) -> None:
        drawn = tie_breakers(self.seed, state.images, len(state.tests))
        p = {
            key: test.update(at[key] if key == "classes" else bin_of(at[key]), u)
            for (key, test), u in zip(state.tests.items(), drawn, strict=True)
        }
        state.images += 1
        predicted = at["classes"]
        state.recent.append([name, about["accept"], predicted, p])
        del state.recent[:-RECENT]
        image: Json = {**about, "predicted": predicted, "requested": False, "label": "awaited", "at": state.images}
        if self.guard.guarantee.kind == "coverage" or label is not None:
            image["label"] = _compared(image, label)
            self._test(state, single_request(name, image), [image])
        elif name not in state.pending or not state.pending[name]["requested"]:
            state.repeated += state.pending.pop(name, None) is not None
            state.pending[name] = image
            state.forget()
        else:
            state.repeated += 1
        state.note(self.alpha, "images", name, state.log_evidence, state.since)
        note_peaks(self.guard, state, self.alpha)

    def _settle(self, state: "WatchMemory") -> None:
        for request, images in state.settled_requests():
            self._test(state, request, images)

    def _test(self, state: "WatchMemory", request: Json, images: list[Json]) -> None:
        state.test_outcomes(self.guard.guarantee.kind, request, images)
        state.note(
            self.alpha, "guarantee", request["names"][-1], state.rate.capital.log_total, state.rate.capital.since
        )

    def _noted(self, state: "WatchMemory") -> "WatchReport":
        state.note_rate(self.alpha)
        return make_report(self.guard, state, self.alpha)

    def _class_of(self, label: Any) -> int | None:
        classes = self.guard.classes
        if isinstance(label, str) and classes is not None and label in classes:
            return list(classes).index(label)
        if label is None or (isinstance(label, str) and label in _UNLABELLED):
            return None
        short = isinstance(label, str) and len(label) < 10  # Python refuses to read very long numbers
        if (short and label.isdecimal()) or (isinstance(label, float) and label.is_integer()):
            label = int(label)
        if (
            isinstance(label, int | np.integer)
            and not isinstance(label, bool)
            and 0 <= label < (len(classes) if classes is not None else math.inf)
        ):
            return int(label)
        raise GuardError(
            f"watch.label: a label must be a class of the model, by its number or its name; got {label!r}. "
            f"Nothing was changed. For an image that cannot be labelled, send '?'."
        )


def _compared(image: Json, number: int | None) -> str:
    """What a label says of the prediction."""
    return "missing" if number is None else "right" if number == image["predicted"] else "wrong"


def _is_empty(cell: Any) -> bool:
    """Whether nobody has filled in a cell of a file or a frame."""
    return cell is None or (isinstance(cell, str) and not cell) or (isinstance(cell, float) and math.isnan(cell))


def _stamp(path: Path) -> tuple[int, ...]:
    """What differs once a file has been replaced."""
    about = path.stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


def _reading(folder: str | Path) -> AbstractContextManager[None]:
    return reading(f"the watch in '{folder}'", "Delete it, and watch from now on.")
