"""Which images should be labelled next? Ten strategies over any score, once or in a loop that trains and goes on.

    top, random, softmax, power, softrank     by the uncertainty alone                         `strategies`
    bald                                      top by mutual information (Houlsby et al. 2011, 1112.5745)
    batch_bald                                by the joint information of a batch              `batch_bald`
    core_set, weighted, seeding               far from each other and from labelled images     `strategies`

After every round of a loop the state is on the disk; a loop that was killed ends with the same picks.
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
from jaxtyping import Float64, Int64
from torch import Tensor

from dubito.active import loop
from dubito.active.batch_bald import batch_bald, member_probabilities
from dubito.active.labels import require_labels
from dubito.active.linear import LinearTrainer
from dubito.active.loop import Acquisition, Picks, Round
from dubito.active.strategies import Distances, diverse, stochastic, top
from dubito.choices import Strategy
from dubito.errors import DubitoWarning, TableError, UnlabelledError, ValueRangeError
from dubito.evaluate.evaluate import uncertainty
from dubito.metrics import Array
from dubito.scores import Entropy, MutualInformation
from dubito.storage import locked, to_path
from dubito.table import Rows, Table
from dubito.types import Json, Score
from dubito.validate import check_choice, check_number, check_rows, check_seed

_DISAGREEMENT = ("bald", "batch_bald")
_SHORTLIST = 5000
"""Candidates of batch_bald, those with the highest mutual information: no image adds more than its own."""


Trainer = Callable[[Table, Int64[Tensor, "k"]], Any]
"""From a pool and its labelled rows to a Score, to uncertainties (n) of the pool, to the pool with other columns, or to
something that extends tables."""


@final
@dataclass(frozen=True)
class Acquire:
    """Chooses images to label.

    Attributes:
        strategy: The strategy, see above; power requires uncertainties that are not negative.
        score: The uncertainty; by default the entropy of the logits. A score that learns and is not fitted is fitted on
            the labelled rows. None for bald and batch_bald, which use the mutual information of the ensemble `of`.
        of: An ensemble of the table; batch_bald needs its members' logits.
        beta: Inverse temperature of softmax, power and softrank: near 0 they are random, the larger, the closer to top.
        samples: The number of joint labels of batch_bald.
        seed: Seed of all draws, together with the number of the round.

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
        check_choice(self.strategy, get_args(Strategy), by="Acquire", what="strategy")
        check_number(self.beta, "(0, inf)", by="Acquire", what="beta", hint="1 is usual.")
        check_number(self.samples, "[2, inf)", by="Acquire", what="samples", whole=True, hint="1000 are usual.")
        check_seed(self.seed, by="Acquire")
        if self.score is not None and self.strategy in _DISAGREEMENT:
            raise ValueRangeError(
                f"Acquire: '{self.strategy}' uses the mutual information of the ensemble '{self.of}' and takes no "
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
        """Choose rows to label next.

        Args:
            table: The pool, with the columns that strategy and score need.
            count: How many rows. Where fewer are left, all of them are taken, with a warning.
            labelled: Rows that have labels already: indices, or a mask.
            u: (n) uncertainties in place of the score's; not for batch_bald.
            round: The number of the round; every round draws other random numbers.
        """
        check_rows(table, by="acquire")
        check_number(count, "[1, inf)", by="acquire", what="count", whole=True, hint="100 are usual.")
        if u is not None and self.strategy == "batch_bald":
            raise ValueRangeError(
                "acquire: 'batch_bald' uses the predictions of every member and takes no uncertainties; got some. Pass "
                f"a table with '{self.of}_logit', or choose 'top'."
            )
        labelled_rows = _row_indices(table, labelled)
        if (left := len(table) - len(labelled_rows)) < count:
            warnings.warn(
                f"acquire: count is {count}, but only {left} of the {len(table)} images of {table.name} are not "
                f"labelled: all of them are taken.",
                DubitoWarning,
                stacklevel=2,
            )
        values = self._values(table, labelled_rows, u)
        rows = self._choose(table, min(count, left), values, labelled_rows, round)
        return Picks(rows, table.row_ids(rows), None if values is None else values[rows], round, self.strategy)

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
        """Run the loop: label, train, choose, and again.

        Args:
            pool: The images to choose from, with labels where the trainer needs them.
            rounds: How often images are chosen, less often if none is left. A finished loop can be extended.
            count: How many images to choose per round.
            start: Rows that have labels at the beginning, or how many to draw at random.
            trainer: Called with the pool and its labelled rows (ascending) before every choice, and once at the end; by
                default linear classifiers on the features, with 20 members where the strategy uses disagreement.
            test: Other images with labels, for the accuracy of what was trained, if it extends tables by logits.
            to: A folder for the state and for picks.csv, written after every round, and before the first one with the
                images to begin with that have no label. The same call continues with the labels written there.
            classes: Class names of the labels in picks.csv, in order, where they are your own and not the model's.
        """
        check_rows(pool, by="acquire")
        check_number(rounds, "[0, inf)", by="acquire", what="rounds", whole=True, hint="0 trains once.")
        check_number(count, "[1, inf)", by="acquire", what="count", whole=True, hint="100 are usual.")
        if isinstance(start, int | np.integer):
            hint = f"{pool.name} has {len(pool)} rows."
            check_number(start, f"[0, {len(pool)}]", by="acquire", what="start", whole=True, hint=hint)
            # A stream of its own: round 0 draws from (seed, 0).
            start = np.random.default_rng([self.seed, 2**31]).permutation(len(pool))[:start]
        begin = _row_indices(pool, start)
        trainer = trainer or LinearTrainer(members=20 if self.strategy in _DISAGREEMENT else 0, seed=self.seed)
        folder = None if to is None else to_path(to, "acquire: to")
        with nullcontext() if folder is None else locked(folder):
            identity = self._identity(pool, begin, count, trainer, test)
            done = [] if folder is None else loop.read_rounds(folder, identity)
            pool, first = loop.with_labels(pool, begin, folder, classes)
            if folder is not None and (done or len(begin)):
                loop.write_loop(folder, identity, first, done)
            result = Acquisition(pool.name, self.strategy, begin, loop.reusable(done, rounds, len(pool)))
            try:
                while len(result.rounds) <= rounds and (not result.rounds or result.rounds[-1].picks is not None):
                    last = len(result.rounds) == rounds or len(result.labelled) == len(pool)
                    result.rounds.append(self._round(pool, result, count, trainer, test, last=last))
                    if folder is not None:
                        loop.write_loop(folder, identity, first, result.rounds)
            except UnlabelledError as error:
                where = "" if folder is None else f" They are in {folder / loop.PICKS}: fill in its column label."
                raise UnlabelledError(f"{error}{where}") from error
        return result

    def _round(
        self, pool: Table, result: Acquisition, count: int, trainer: Trainer, test: Table | None, *, last: bool
    ) -> Round:
        labelled = np.sort(result.labelled)
        if "label" in pool:
            require_labels(pool, labelled, "acquire")
        trained = trainer(pool, torch.from_numpy(labelled.copy()))  # a trainer may shuffle its rows
        accuracy = loop.accuracy_of(trained, test)
        if last:
            return Round(len(labelled), accuracy, None)
        table, score, u = loop.read_trained(trained, pool)
        one = self if score is None else replace(self, score=score)
        size = min(count, len(pool) - len(labelled))
        return Round(len(labelled), accuracy, one.pick(table, size, labelled=labelled, u=u, round=len(result.rounds)))

    def _choose(
        self, table: Table, count: int, u: Float64[np.ndarray, "n"] | None, labelled: Int64[np.ndarray, "k"], step: int
    ) -> Int64[np.ndarray, "p"]:
        rng, free = np.random.default_rng([self.seed, step]), np.isin(np.arange(len(table)), labelled, invert=True)
        candidates = np.flatnonzero(free)
        if count == 0:
            return candidates[:0]
        if self.strategy == "random":
            return rng.permutation(candidates)[:count]
        if self.strategy in ("core_set", "weighted", "seeding"):
            table.require("feature", by=f"acquire: strategy '{self.strategy}'")
            distances = Distances(table.column("feature"))
            distances.add(labelled)
            return diverse(distances, self.strategy, free, count, u=u, rng=rng)
        assert u is not None, "every other strategy uses it"  # noqa: S101 (our own invariant)
        if self.strategy == "batch_bald":
            candidates = candidates[np.sort(top(u[candidates], max(_SHORTLIST, 20 * count)))]
            predicted = member_probabilities(table, f"{self.of}_logit", candidates)
            places, _ = batch_bald(predicted, u[candidates], count, self.samples, rng)
        elif self.strategy in ("top", "bald"):
            places = top(u[candidates], count)
        else:
            places = stochastic(u[candidates], count, self.strategy, beta=self.beta, rng=rng)
        return np.take(candidates, places)

    def _values(
        self, table: Table, labelled: Int64[np.ndarray, "k"], u: Array | None
    ) -> Float64[np.ndarray, "n"] | None:
        if u is not None:
            return uncertainty(u, table, by="acquire", name="u").double().numpy()
        score = MutualInformation(of=self.of) if self.strategy in _DISAGREEMENT else self.score
        if score is None and self.strategy in ("random", "core_set"):
            return None
        score = Entropy() if score is None else score
        if score.learned and not score.is_fitted:
            if not len(labelled):
                raise TableError(
                    f"acquire: {score.name} learns from labelled rows; no rows of {table.name} are labelled. Pass "
                    f"labelled=..., or a fitted score."
                )
            # A copy: the next round has more labels, and fits again.
            score = deepcopy(score).fit(table.rows(torch.from_numpy(labelled)))
        return score.score(table).numpy()

    def _identity(
        self, pool: Table, begin: Int64[np.ndarray, "s"], count: int, trainer: Trainer, test: Table | None
    ) -> Json:
        name = str(getattr(trainer, "__qualname__", type(trainer).__qualname__))  # all that identifies it
        return {
            **{key: getattr(self, key) for key in ("strategy", "of", "beta", "samples", "seed")},
            "score": None if self.score is None else repr(self.score),
            "pool": loop.identity_of(pool),
            "count": count,
            "start": begin.tolist(),
            "trainer": asdict(trainer) if isinstance(trainer, LinearTrainer) else name,
            "test": None if test is None else loop.identity_of(test),
        }


def _row_indices(table: Table, rows: Rows) -> Int64[np.ndarray, "k"]:
    """Rows as unique indices, in their order; -1, which marks a missing label elsewhere, is no row."""
    if not isinstance(rows, slice) and (np.asarray(rows, dtype=np.int64) < 0).any():
        raise TableError(
            f"acquire: rows of {table.name} must be indices from 0 to {len(table) - 1}; got a negative one."
        )
    index = Table(name=table.name, row=np.arange(len(table))).rows(rows).whole("row").numpy()
    return np.take(index, np.sort(np.unique(index, return_index=True)[1]))
