"""Watch what a guard decides, image by image: are images still like those of the calibration, is the guarantee kept?

    every image       its rank among the reference images by uncertainty and by density, and its predicted class, each
                      tested for exchangeability with the calibration images
    every outcome     what the guarantee bounds: errors among accepted images that have a label, refused images, or
                      refused correct predictions, tested against the bound

The tests of `martingale` may be looked at after every image: over the whole life of a watch, a false alarm has a
probability of alpha at most, half of it for the images and half for the guarantee. The capital of several tests is
averaged.

Only labels of images that were drawn at random show the error rate: those that `request_labels` names, or all of a
batch. Labels that people send by themselves are kept, and tested only if the image is drawn later. The interval of the
rate holds at all times at once: with S errors among n,

    {q: Beta-binomial(S, n) / (q^S (1 - q)^(n - S)) < 1 / alpha}          (Robbins 1970), prior Beta(1, 9)

The state is one small file. An update reads it, adds to it and replaces it in one step under a lock: a process may be
killed at any instant, and several may watch together.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from dubito.data.image_set import hash_bytes
from dubito.data.labels import Labels, find_rows, labels_by_image
from dubito.errors import ArtefactError, GuardError, ImagesError
from dubito.guard.combination import rank
from dubito.guard.martingale import ExchangeabilityTest, RateTest, tie_breakers
from dubito.guard.thresholds import Guarantee, images_needed, needed, percent
from dubito.guard.verdict import Decisions, Verdict, class_name
from dubito.result import Axes, Result, axes
from dubito.storage import locked, read_sealed, reading, write_sealed
from dubito.threads import Lock
from dubito.types import Json
from dubito.validate import check_number

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

ALPHA = 0.01
_FORMAT = 1
_FILE = "watch.json"
_BINS = 200
_RECENT = 300
"""Images that findings are about, the latest ones."""
_PENDING = 1000
"""Images that labels may be requested for."""
_MOST = 10_000
"""Images that labels are awaited for."""
_HISTORY = 512
_PATIENCE = 60.0
"""Seconds to wait for another process that writes."""
_PRIOR = (1.0, 9.0)
_TITLES = {"uncertainty": "uncertainty", "density": "features", "classes": "predicted classes"}
_RATES = {"risk": "errors among accepted images", "coverage": "refused images"}
_RATES["false_alarms"] = "refused correct predictions"


@final
class Watch:
    """A guard with a memory: what arrives is compared with the calibration images for as long as it is used.

    Made by `Guard.watch`. Threads may share it, and so may processes by its folder.

    Args:
        guard: The guard whose decisions are watched.
        folder: Where the state is kept; None keeps it in memory.
        alpha: The probability of a false alarm, over the whole life.
        seed: Seed of tie-breaking, and of the images that labels are requested for.
    """

    def __init__(
        self, guard: "Guard", folder: str | Path | None = None, *, alpha: float = ALPHA, seed: int = 0
    ) -> None:
        check_number(alpha, "(0, 1)", by="watch", what="alpha", hint="0.01 is usual.")
        check_number(seed, "[0, inf)", by="watch", what="seed", whole=True, hint="0 is usual.")
        self.guard, self.folder, self.alpha, self.seed = guard, None if folder is None else Path(folder), alpha, seed
        self._lock, self._identity = Lock(), _identity_of(guard, alpha, seed)
        self._state = _Memory.of(guard)
        if self.folder is not None:
            with self._changing():  # a folder that cannot be written, or of another guard, is an error now
                pass

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
        with self._changing() as state:
            for row, name in enumerate(decisions.ids):
                at = {key: values[row] for key, values in columns.items()}
                self._take(state, str(name), at, accept=accept[row], label=None if labels is None else labels[row])
        return self.report()

    def label(self, labels: Labels, *, drawn: bool = False) -> "WatchReport":
        """Take note of true classes that arrive later.

        Args:
            labels: A mapping from image to its class, by number or by name, or a CSV file or a frame of both.
            drawn: Whether you drew these images at random; those that `request_labels` named are drawn anyway.

        Raises:
            GuardError: A label is no class of the model.
        """
        numbers = {str(name): self._class_of(label) for name, label in labels_by_image(labels).items()}
        with self._changing() as state:
            names, rows = list(state.pending), dict[str, int]()
            with suppress(ImagesError):  # not one of them is known
                rows = find_rows(numbers, names, "labels")
            state.unknown += len(numbers) - len(rows)
            for key, row in rows.items():
                entry = state.pending[names[row]]
                entry["wrong"] = numbers[key] != entry["predicted"]
                if drawn or entry["requested"]:
                    self._outcome(state, names[row], entry)
        return self.report()

    def request_labels(self, count: int) -> list[str]:
        """Names of images to label: drawn at random among the latest, of a risk among those that were accepted.

        A drawn image whose label is known already is tested at once, and not named. A name that comes again while its
        label is awaited still means the earlier image.
        """
        by = "watch.request_labels"
        check_number(count, "[1, inf)", by=by, what="count", whole=True, hint="100 are usual.")
        accepted_only = self.guard.guarantee.kind == "risk"
        with self._changing() as state:
            names = [
                name
                for name, one in state.pending.items()
                if not one["requested"] and (one["accept"] or not accepted_only)
            ]
            state.draws += 1
            order = np.random.default_rng([self.seed, state.draws]).permutation(len(names))[:count]
            chosen = [names[place] for place in sorted(order.tolist())]
            for name in chosen:
                entry = state.pending[name]
                entry["requested"] = True
                if entry["wrong"] is not None:
                    self._outcome(state, name, entry)
            return [name for name in chosen if name in state.pending]

    def report(self) -> "WatchReport":
        """What the watch has seen so far."""
        with self._lock:
            state = self._state if self.folder is None else self._read()
            return _report(self.guard, state, self.alpha)

    @contextmanager
    def _changing(self) -> "Iterator[_Memory]":
        with self._lock:
            if self.folder is None:
                yield self._state
                return
            with locked(self.folder, seconds=_PATIENCE):
                state = self._read()
                yield state
                write_sealed(self.folder / _FILE, {"format": _FORMAT, "of": self._identity, **state.to_json()})

    def _read(self) -> "_Memory":
        assert self.folder is not None  # noqa: S101 (our own invariant)
        path = self.folder / _FILE
        if not path.is_file():
            return _Memory.of(self.guard)
        with reading(f"the watch in '{self.folder}'", "Delete it, and watch from now on."):
            saved = read_sealed(path, format=_FORMAT)
            if saved["of"] == self._identity:
                return _Memory.from_json(saved)
        raise ArtefactError(
            f"watch: '{self.folder}' is of another guard, or of another alpha or seed. Choose another folder, or the "
            f"same guard, alpha and seed."
        )

    def _take(self, state: "_Memory", name: str, at: Mapping[str, Any], *, accept: bool, label: int | None) -> None:
        drawn = tie_breakers(self.seed, state.images, len(state.tests))
        p = {
            key: test.update(at[key] if key == "classes" else _bin(at[key]), u)
            for (key, test), u in zip(state.tests.items(), drawn, strict=True)
        }
        state.images += 1
        predicted = at["classes"]
        state.recent.append([name, accept, predicted, p])
        del state.recent[:-_RECENT]
        entry: Json = {"accept": accept, "predicted": predicted, "requested": False, "wrong": None, "at": state.images}
        if self.guard.guarantee.kind == "coverage" or label is not None:
            self._outcome(state, name, entry | {"wrong": None if label is None else label != predicted})
        elif not state.pending.get(name, entry)["requested"]:
            state.pending.pop(name, None)
            state.pending[name] = entry
            state.forget()
        state.note(self.alpha, "images", name, state.log_evidence, state.since)

    def _outcome(self, state: "_Memory", name: str, entry: Json) -> None:
        """Test what is known of an image; its label is not awaited any more."""
        kind = self.guard.guarantee.kind
        state.pending.pop(name, None)
        if kind == "risk" and entry["accept"]:
            state.rate.update(bool(entry["wrong"]), entry["at"] - 1)
        elif kind == "coverage" or (kind == "false_alarms" and not entry["wrong"]):
            state.rate.update(not entry["accept"], entry["at"] - 1)
        state.note(self.alpha, "guarantee", name, state.rate.capital.log_total, state.rate.capital.since)

    def _class_of(self, label: Any) -> int:
        classes = self.guard.classes
        if isinstance(label, str) and classes is not None and label in classes:
            return list(classes).index(label)
        if (isinstance(label, str) and label.isdecimal()) or (isinstance(label, float) and label.is_integer()):
            label = int(label)
        if isinstance(label, int | np.integer) and 0 <= label < (len(classes) if classes is not None else math.inf):
            return int(label)
        raise GuardError(
            f"watch.label: a label must be a class of the model, by its number or its name; got {label!r}. "
            f"Nothing was changed."
        )


@dataclass
class _Memory:
    """What a watch remembers."""

    tests: dict[str, ExchangeabilityTest]
    rate: RateTest
    images: int = 0
    draws: int = 0
    unknown: int = 0
    recent: list[list[Any]] = field(default_factory=list)
    pending: dict[str, Json] = field(default_factory=dict)
    alarms: list[Json] = field(default_factory=list)
    history: list[list[float]] = field(default_factory=list)
    every: int = 1

    @classmethod
    def of(cls, guard: "Guard") -> "_Memory":
        calibration, selection = guard.calibration, guard.selection
        u = torch.from_numpy(calibration.uncertainty)
        ranks = {"uncertainty": rank(u, selection.uncertainty_quantiles)}
        density = selection.roles.density
        if density is not None and calibration.density is not None:
            ranks["density"] = rank(torch.from_numpy(calibration.density), selection.reference_quantiles[density])
        tests = {
            name: ExchangeabilityTest(np.bincount([_bin(one) for one in values.tolist()], minlength=_BINS + 2))
            for name, values in ranks.items()
        }
        classes = len(guard.classes) if guard.classes is not None else int(calibration.predicted.max()) + 1
        counts = np.bincount(calibration.predicted, minlength=classes)
        level = guard.guarantee.level
        bound = 1 - level if guard.guarantee.kind == "coverage" else level
        return cls({**tests, "classes": ExchangeabilityTest(counts, ordered=False)}, RateTest(bound))

    @property
    def log_evidence(self) -> float:
        """The logarithm of the mean capital of the tests."""
        return float(np.logaddexp.reduce(self._logs())) - math.log(len(self.tests))

    @property
    def since(self) -> int:
        """Where the test that has moved most has begun to."""
        return list(self.tests.values())[int(np.argmax(self._logs()))].capital.since

    def _logs(self) -> list[float]:
        return [test.capital.log_total for test in self.tests.values()]

    def forget(self) -> None:
        """Drop the oldest images without a label: first those that no label was requested for."""
        plain = [name for name, one in self.pending.items() if not one["requested"]]
        for name in [*plain[: max(0, len(plain) - _PENDING)], *list(self.pending)[: max(0, len(self.pending) - _MOST)]]:
            self.pending.pop(name, None)

    def note(self, alpha: float, kind: str, name: str, log_evidence: float, since: int) -> None:
        """The first alarm of a kind, and how evidence grows; of a long history, every second point is dropped."""
        if log_evidence >= math.log(2 / alpha) and all(one["kind"] != kind for one in self.alarms):
            self.alarms.append({"kind": kind, "images": self.images, "id": name, "since": since})
        if self.images % self.every == 0 and kind == "images":
            self.history.append([float(self.images), log_evidence, self.rate.capital.log_total])
            if len(self.history) > _HISTORY:
                self.history, self.every = self.history[1::2], 2 * self.every
        if kind == "guarantee" and self.history:
            self.history[-1][2] = log_evidence

    def to_json(self) -> Json:
        plain = {name: value for name, value in vars(self).items() if name not in ("tests", "rate")}
        tests = {name: test.to_json() for name, test in self.tests.items()}
        # A list keeps its order where keys are sorted.
        return {**plain, "pending": list(self.pending.items()), "tests": tests, "rate": self.rate.to_json()}

    @classmethod
    def from_json(cls, saved: Json) -> "_Memory":
        plain = {name: value for name, value in saved.items() if name not in ("tests", "rate", "format", "of")}
        order = [name for name in _TITLES if name in saved["tests"]]
        tests = {name: ExchangeabilityTest.from_json(saved["tests"][name]) for name in order}
        return cls(tests, RateTest.from_json(saved["rate"]), **{**plain, "pending": dict(plain["pending"])})


@final
@dataclass(frozen=True)
class WatchReport(Result):
    """What a watch has seen.

    Attributes:
        images: How many images it has taken note of.
        alpha: The probability of a false alarm, over the whole life.
        guarantee: What is guaranteed.
        alarms: For "images" and "guarantee", where it was raised: after how many images, at which one, and since when.
        evidence: By test, its capital: 1 at the beginning, and at most 1 / alpha, by Ville, where nothing has changed.
        since: By test, the number of images before the change, if there is one.
        outcomes: How many outcomes of the guarantee are known.
        observed: Their rate; None without any.
        interval: Where the rate lies, at all times at once, at confidence 1 - alpha / 2.
        requested: How many images are still to be labelled.
        volunteered: Labels of images that were not drawn at random: they are not tested.
        unknown: Labels whose images the watch does not remember.
        moved: What has moved, in words, one sentence for each test.
        advice: What to do next.
        history: Of some numbers of images: log-evidence of the images and of the guarantee.
    """

    images: int
    alpha: float
    guarantee: Guarantee
    alarms: tuple[Json, ...]
    evidence: dict[str, float]
    since: dict[str, int]
    outcomes: int
    observed: float | None
    interval: tuple[float, float]
    requested: int
    volunteered: int
    unknown: int
    moved: tuple[str, ...]
    advice: str
    history: tuple[tuple[float, ...], ...] = field(repr=False)

    @property
    def alarm(self) -> bool:
        """Whether images have changed, or the guarantee is broken."""
        return bool(self.alarms)

    def title(self) -> str:
        """The answer in one line."""
        if not self.alarms:
            return f"{self.images:,} images, no alarm"
        kinds = " and ".join(
            {"images": "images have changed", "guarantee": "the guarantee is broken"}[one["kind"]]
            for one in self.alarms
        )
        return f"{self.images:,} images: {kinds}"

    def facts(self) -> dict[str, str]:
        """What is tested, and what the labels show."""
        rate = _RATES[self.guarantee.kind]
        low, high = (percent(one) if 0 < one < 1 else f"{100 * one:.0f} %" for one in self.interval)
        shown = (
            "none known"
            if self.observed is None
            else (f"{percent(self.observed)} of {self.outcomes:,} (at all times within {low} and {high})")
        )
        facts = {"guarantee": str(self.guarantee), rate: shown, "false alarms": f"{percent(self.alpha)} at most, ever"}
        if self.requested:
            facts["labels requested"] = f"{self.requested:,}"
        if self.volunteered:
            facts["labels not tested"] = f"{self.volunteered:,}, of images that were not drawn at random"
        if self.unknown:
            facts["labels without an image"] = f"{self.unknown:,}, of images that are not among the latest"
        return facts

    def records(self) -> list[dict[str, Any]]:
        """One row per test."""
        return [
            {"test": _TITLES.get(name, name), "evidence": value, "since_image": self.since[name]}
            for name, value in self.evidence.items()
        ]

    def cell(self, key: str, value: Any) -> str:
        """Evidence with two digits."""
        return f"{value:.2g}" if key == "evidence" else super().cell(key, value)

    def findings(self) -> list[str]:
        """What has changed, and what to do next."""
        return [*self.moved, self.advice]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Evidence by number of images, with the line at which an alarm is raised."""
        ax = axes(ax)
        images, of_images, of_guarantee = np.array(self.history or [(0, 0, 0)]).T
        ax.plot(images, of_images / math.log(10), label="images")
        ax.plot(images, of_guarantee / math.log(10), label=_RATES[self.guarantee.kind])
        ax.axhline(math.log10(2 / self.alpha), color="0.5", linestyle="--", label="alarm")
        ax.set(xlabel="images", ylabel="evidence, powers of ten")
        ax.legend()
        return ax


def _report(guard: "Guard", state: _Memory, alpha: float) -> WatchReport:
    tests = {name: test.capital for name, test in state.tests.items()}
    capitals = {**tests, "guarantee": state.rate.capital}
    outcomes = state.rate.capital.seen
    return WatchReport(
        images=state.images,
        alpha=alpha,
        guarantee=guard.guarantee,
        alarms=tuple(state.alarms),
        evidence={name: math.exp(min(one.log_total, 700.0)) for name, one in capitals.items()},
        since={name: one.since for name, one in capitals.items()},
        outcomes=outcomes,
        observed=state.rate.observed,
        interval=_interval(state.rate.total, outcomes, alpha / 2),
        requested=sum(one["requested"] for one in state.pending.values()),
        volunteered=sum(one["wrong"] is not None for one in state.pending.values()),
        unknown=state.unknown,
        moved=tuple(_moved(guard, state, alpha)),
        advice=_advice(guard, state, alpha),
        history=tuple(tuple(one) for one in state.history),
    )


def _moved(guard: "Guard", state: _Memory, alpha: float) -> Iterator[str]:
    """One sentence for each test that has moved; only after an alarm, as evidence of one test alone proves less."""
    if any(one["kind"] == "images" for one in state.alarms):
        for name, test in state.tests.items():
            if test.capital.log_total < math.log(1 / alpha):
                continue
            since = test.capital.since
            latest = state.recent[max(0, len(state.recent) - (state.images - since)) :]
            shown = ", ".join(f"'{one[0]}'" for one in sorted(latest, key=lambda one: abs(one[3][name] - 0.5))[-3:])
            yield f"{_in_words(guard, name, latest)} since image {since + 1:,}; most of all {shown}."
    if any(one["kind"] == "guarantee" for one in state.alarms):
        what, bound = _RATES[guard.guarantee.kind], percent(state.rate.bound)
        yield f"The guarantee is broken: {percent(state.rate.observed or 0)} {what}; at most {bound} are guaranteed."


def _in_words(guard: "Guard", name: str, latest: list[list[Any]]) -> str:
    calibration, n = guard.calibration, max(1, len(latest))
    if name == "classes":
        before = np.bincount(calibration.predicted, minlength=1) / len(calibration)
        now = np.bincount([one[2] for one in latest], minlength=len(before)) / n
        before = np.pad(before, (0, len(now) - len(before)))
        worst = int(np.argmax(np.abs(now - before)))
        return (
            f"'{class_name(guard.classes, worst)}' is predicted for {percent(now[worst])} of the images and was for "
            f"{percent(before[worst])} of the calibration images,"
        )
    if name == "uncertainty":
        accepted = sum(one[1] for one in latest) / n
        earlier = guard.threshold.accepted / guard.threshold.of
        return f"{percent(accepted)} of the images are accepted and {percent(earlier)} of the calibration images were,"
    middle = float(np.median([one[3][name] for one in latest]))
    return f"Features are {'rarer' if middle < 0.5 else 'more usual'} than those of the calibration images"


def _advice(guard: "Guard", state: _Memory, alpha: float) -> str:
    kinds = {one["kind"] for one in state.alarms}
    if not kinds:
        if guard.guarantee.kind == "coverage":
            return "Nothing has to be done."
        count, rate = state.rate.needed(alpha / 2)
        return f"Nothing has to be done. About {count:,} randomly drawn labels would reveal a rate of {percent(rate)}."
    u, wrong = guard.calibration.outcomes
    level, confidence = guard.guarantee.level, guard.guarantee.confidence
    enough = None if wrong is None else images_needed(u, wrong, risk=level, confidence=confidence)
    enough = max(enough or 0, needed(level, confidence), min(len(u), 500))
    then = f"label about {float(f'{enough:.2g}'):,.0f} new images drawn at random and calibrate on them (guard.refit)"
    if "guarantee" in kinds:
        return f"Stop using its verdicts, or accept less (guard.with_risk); {then}."
    return f"The guarantee says nothing about such images: {then}, or label some of them to see whether it is kept."


def _interval(successes: int, n: int, alpha: float) -> tuple[float, float]:
    """Where a rate lies, at all numbers of outcomes at once."""
    from scipy.optimize import brentq  # noqa: PLC0415 (slow to import)
    from scipy.special import betaln  # noqa: PLC0415 (slow to import)

    if n == 0:
        return 0.0, 1.0
    a, b = _PRIOR
    mixture = float(betaln(a + successes, b + n - successes) - betaln(a, b))

    def excess(q: float) -> float:
        return mixture - successes * math.log(q) - (n - successes) * math.log1p(-q) - math.log(1 / alpha)

    tiny = 1e-12
    mean = min(max(successes / n, tiny), 1 - tiny)
    low = brentq(excess, tiny, mean) if successes and excess(tiny) > 0 else 0.0
    high = brentq(excess, mean, 1 - tiny) if successes < n and excess(1 - tiny) > 0 else 1.0
    return float(low), float(high)


def _bin(share: float) -> int:
    """Ranks of 0 and of 1 have a bin each: these are all images beyond the reference images."""
    return 0 if share <= 0 else _BINS + 1 if share >= 1 else 1 + int(share * _BINS)


def _identity_of(guard: "Guard", alpha: float, seed: int) -> str:
    arrays = [np.ascontiguousarray(one).tobytes() for _, one in sorted(guard.calibration.arrays().items())]
    settings = f"{guard.guarantee}|{guard.threshold.value!r}|{alpha!r}|{seed}"
    return hash_bytes(settings.encode(), *arrays).hex()
