"""Which images should be labelled next? Ten strategies over any score, once or in a loop that trains and goes on.

    top, random, softmax, power, softrank     by the uncertainty alone                     `ranked`
    bald                                      top by mutual information (Houlsby et al. 2011, 1112.5745)
    batch_bald                                by what a batch tells together               `batch_bald`
    core_set, weighted, seeding               far from each other and from what is known   `spread_out`

A loop needs a trainer: what it returns is asked for the next picks. After every round its state is on the disk, and a
loop that was killed goes on and ends with the same picks.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from dubito.active._given import (
    accuracy_of,
    answer_of,
    identity_of,
    ids_of,
    name_of,
    need_labels,
    rows_of,
    start_of,
)
from dubito.active.batch_bald import batch_bald, probabilities_of
from dubito.active.linear import LinearTrainer
from dubito.active.ranked import stochastic, top
from dubito.active.result import Acquisition, Picks, Round
from dubito.active.spread_out import Distances, spread_out
from dubito.active.state import answered, kept, read_rounds, telling_where, to_begin, write_loop
from dubito.choices import Strategy
from dubito.errors import DubitoWarning, TableError, ValueRangeError
from dubito.evaluate.uncertainties import uncertainty
from dubito.metrics import Array
from dubito.scores import Entropy, MutualInformation
from dubito.storage import locked
from dubito.table import Rows, Table
from dubito.types import Json, Score
from dubito.validate import check_rows

_DISAGREEMENT = ("bald", "batch_bald")
_APART = ("core_set", "weighted", "seeding")
_WITHOUT_U = ("random", "core_set")
_SHORTLIST = 5000
"""Candidates of batch_bald, those of the highest mutual information: an image adds no more than its own."""


Trainer = Callable[[Table, Int64[Tensor, "k"]], Any]
"""From a pool and its labelled rows to a Score, to uncertainties (n) of the pool, to the pool with other columns, or to
something that extends tables."""


@final
@dataclass(frozen=True)
class Acquire:
    """Chooses images to label.

    Attributes:
        strategy: See above; power needs uncertainties that are not negative.
        score: The uncertainty; by default the entropy of the logits. One that learns and is not fitted is fitted on the
            labelled rows. None for bald and batch_bald, which go by the mutual information of the ensemble `of`.
        of: An ensemble of the table; batch_bald needs its members' logits.
        beta: Of softmax, power and softrank: near 0 all images are alike, the larger, the closer to top.
        samples: Joint labels of batch_bald.
        seed: Of everything that is drawn, with the number of the round.

    >>> pool = Table(logit=[[2.0, 0.0], [0.1, 0.0], [0.0, 5.0], [0.3, 0.0]])
    >>> Acquire("top").pick(pool, 2).rows.tolist(), Acquire("top").pick(pool, 2, labelled=[1]).rows.tolist()
    ([1, 3], [3, 0])
    """

    strategy: Strategy = "power"
    score: Score | None = None
    of: str = "members"
    beta: float = 1.0
    samples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueRangeError(
                f"Acquire: strategy must be one of {', '.join(get_args(Strategy))}; got '{self.strategy}'."
            )
        if not self.beta > 0 or self.samples < 2 or self.seed < 0:
            raise ValueRangeError(
                f"Acquire: beta must be above 0, samples at least 2 and seed not negative; got beta={self.beta}, "
                f"samples={self.samples}, seed={self.seed}. 1, 1000 and 0 are usual."
            )
        if self.score is not None and self.strategy in _DISAGREEMENT:
            raise ValueRangeError(
                f"Acquire: '{self.strategy}' goes by the mutual information of the ensemble '{self.of}' and takes no "
                f"score; got {self.score.name}. Leave it out, or choose 'top', which takes any."
            )

    def pick(
        self,
        table: Table,
        count: int,
        *,
        labelled: Rows = (),
        u: Array | None = None,
        round: int = 0,  # noqa: A002
    ) -> Picks:
        """Rows to label next.

        Args:
            table: The pool, with the columns that strategy and score need.
            count: How many. Where fewer are left, all of them are taken, and a warning says so.
            labelled: Rows that have labels already: indices, or a mask.
            u: (n) uncertainties in place of the score's; not for batch_bald.
            round: Which one it is; another one draws other numbers.
        """
        check_rows(table, by="acquire")
        if count < 1:
            raise ValueRangeError(f"acquire: count must be at least 1; got {count}.")
        if u is not None and self.strategy == "batch_bald":
            raise ValueRangeError(
                "acquire: 'batch_bald' looks at what every member says and takes no uncertainties; got some. Give a "
                f"table with '{self.of}_logit', or choose 'top'."
            )
        known = rows_of(table, labelled)
        free = np.ones(len(table), dtype=bool)
        free[known] = False
        left = int(free.sum())
        if left < count:
            warnings.warn(
                f"acquire: {count} picks are asked for, and {left} of the {len(table)} images of {table.name} are not "
                f"labelled: all of them are taken.",
                DubitoWarning,
                stacklevel=2,
            )
        values = self._values(table, known, u)
        rows = self._chosen(table, free, min(count, left), values, np.random.default_rng([self.seed, round]), known)
        return Picks(rows, ids_of(table, rows), None if values is None else values[rows], round, self.strategy)

    def run(
        self,
        pool: Table,
        *,
        rounds: int,
        count: int,
        start: int | Rows,
        trainer: Trainer | None = None,
        test: Table | None = None,
        to: str | Path | None = None,
        classes: Sequence[str] | None = None,
    ) -> Acquisition:
        """Label, train, choose, and again.

        Args:
            pool: With labels where the trainer needs them.
            rounds: How often images are chosen; ends earlier when none is left. A finished loop can be prolonged.
            count: How many images a round.
            start: Rows that have labels at the beginning, or how many to draw at random.
            trainer: Called with the pool and its labelled rows (ascending) before every choice, and once at the end; by
                default linear classifiers on the features, with 20 members where the strategy looks at disagreement.
            test: Other images with labels: the accuracy of what was trained, if it extends tables by a column logit.
            to: A folder for the state and for picks.csv, written after every round, and before the first one with the
                images to begin with that have no label. The same call goes on from there, with the labels that people
                wrote into picks.csv.
            classes: Names of labels in picks.csv, in order, where they are classes of your own and not the model's.
        """
        check_rows(pool, by="acquire")
        if rounds < 0 or count < 1:
            raise ValueRangeError(
                f"acquire: rounds must not be negative and count at least 1; got rounds={rounds}, count={count}."
            )
        begin = start_of(pool, start, self.seed)
        trainer = trainer or LinearTrainer(members=20 if self.strategy in _DISAGREEMENT else 0, seed=self.seed)
        folder = None if to is None else Path(to)
        with nullcontext() if folder is None else locked(folder):
            identity = self._identity(pool, begin, count, trainer, test)
            done = [] if folder is None else read_rounds(folder, identity)
            first = to_begin(pool, begin, folder)
            if folder is not None and (done or len(begin)):
                write_loop(folder, identity, first, done)
            pool = answered(pool, folder, classes)
            found = Acquisition(pool.name, self.strategy, begin, kept(done, rounds, len(pool)))
            while len(found.rounds) <= rounds and (not found.rounds or found.rounds[-1].picks is not None):
                last = len(found.rounds) == rounds or len(found.labelled) == len(pool)
                with telling_where(folder):
                    found.rounds.append(self._round(pool, found, count, trainer, test, last=last))
                if folder is not None:
                    write_loop(folder, identity, first, found.rounds)
        return found

    def _round(
        self, pool: Table, found: Acquisition, count: int, trainer: Trainer, test: Table | None, *, last: bool
    ) -> Round:
        known = np.sort(found.labelled)
        if "label" in pool:
            need_labels(pool, known, "acquire")
        trained = trainer(pool, torch.from_numpy(known.copy()))  # a trainer may shuffle its rows
        accuracy = accuracy_of(trained, test)
        if last:
            return Round(len(known), accuracy, None)
        table, score, u = answer_of(trained, pool)
        one = self if score is None else replace(self, score=score)
        size = min(count, len(pool) - len(known))
        return Round(len(known), accuracy, one.pick(table, size, labelled=known, u=u, round=len(found.rounds)))

    def _chosen(
        self,
        table: Table,
        free: Bool[np.ndarray, "n"],
        count: int,
        u: Float64[np.ndarray, "n"] | None,
        rng: np.random.Generator,
        known: Int64[np.ndarray, "k"],
    ) -> Int64[np.ndarray, "p"]:
        candidates = np.flatnonzero(free)
        if count == 0:
            return candidates[:0]
        if self.strategy == "random":
            return rng.permutation(candidates)[:count]
        if self.strategy in _APART:
            table.require("feature", by=f"acquire: strategy '{self.strategy}'")
            distances = Distances(table.column("feature"))
            distances.add(known)
            return spread_out(distances, self.strategy, free, count, u=u, rng=rng)
        assert u is not None, "every other strategy looks at it"  # noqa: S101 (our own invariant)
        if self.strategy == "batch_bald":
            candidates = candidates[np.sort(top(u[candidates], max(_SHORTLIST, 20 * count)))]
            said = probabilities_of(table, f"{self.of}_logit", candidates)
            places, _ = batch_bald(said, u[candidates], count, samples=self.samples, seed=rng)
        elif self.strategy in ("top", "bald"):
            places = top(u[candidates], count)
        else:
            places = stochastic(u[candidates], count, self.strategy, beta=self.beta, rng=rng)
        chosen: np.ndarray = candidates[places]
        return chosen

    def _values(self, table: Table, known: Int64[np.ndarray, "k"], u: Array | None) -> Float64[np.ndarray, "n"] | None:
        if u is not None:
            return uncertainty(u, table, by="acquire", name="u").double().numpy()
        score = MutualInformation(of=self.of) if self.strategy in _DISAGREEMENT else self.score
        if score is None and self.strategy in _WITHOUT_U:
            return None
        if score is None:
            score = Entropy()
        if score.learned and not score.is_fitted:
            if not len(known):
                raise TableError(
                    f"acquire: {score.name} learns from labelled rows; no rows of {table.name} are labelled. Give "
                    f"labelled=..., or a fitted score."
                )
            # A copy: the next round has more labels, and fits anew.
            score = deepcopy(score).fit(table.rows(torch.from_numpy(known)))
        return score.score(table).numpy()

    def _identity(
        self, pool: Table, begin: Int64[np.ndarray, "s"], count: int, trainer: Trainer, test: Table | None
    ) -> Json:
        return {
            "strategy": self.strategy,
            "settings": {"of": self.of, "beta": self.beta, "samples": self.samples, "seed": self.seed},
            "score": None if self.score is None else repr(self.score),
            "pool": identity_of(pool),
            "count": count,
            "start": begin.tolist(),
            "trainer": asdict(trainer) if isinstance(trainer, LinearTrainer) else name_of(trainer),
            "test": None if test is None else identity_of(test),
        }
