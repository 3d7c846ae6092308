"""How vector, matrix and Dirichlet scaling are fitted: one convex problem, with a Gaussian prior around temperature.

    log p = log_softmax(w * x + M x + b),     x: what is scaled, divided by the temperature T;     M has a zero diagonal

    minimise   mean_i -log p_i[y_i]  +  1/2n (Σ (w_j - 1)² / s²  +  Σ b_j² / s²  +  Σ M_jk² / o²)

With w = 1, M = b = 0 it is temperature scaling. The penalties are those of ODIR (Kull et al. 2019), whose lambda is
c (c - 1) / 2n o² and whose mu is c / 2n s²: written as standard deviations of a prior, they do not depend on n and c.
Ours also holds the diagonal, or classes that do not occur would have w and b without end. Infinity leaves a penalty
out. s is chosen first, without M, then o: from small to large, as long as every fifth image, which is held out for it,
becomes more likely. So a calibration set that says nothing of single classes gives temperature scaling.

Up to 512 parameters, Newton's method within a trust region takes a few steps. Its Hessian is, besides the penalties,
mean_i J_i (diag p_i - p_i p_i') J_i', with J_i the derivative of the logits of image i. For more parameters, or without
penalties, L-BFGS takes its place.

The table is streamed; it is held, in the precision of its logits, where that takes at most half a gigabyte. Sums are
taken in float64; products in float64 up to 128 classes, beyond that in float32.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dubito.calibration.method import Calibration
from dubito.errors import DubitoWarning
from dubito.scores.temperature import fit_temperature
from dubito.table import Table
from dubito.table.folds import folds_of, images_of
from dubito.table.views import chosen_rows
from dubito.validate import check_number

EXACT = 128
"""Most classes for which products are in float64, and several deviations of off-diagonal weights are tried."""
_SMALL = 512
"""Most parameters for Newton's method."""
_HELD = 2**29
_ROUGH, _FLOAT32 = 1e-4, 1e-5
"""The largest slopes that are left where deviations are chosen, and beyond `EXACT`."""
_OWN = (0.03, 0.1, 0.3, 1.0)
_OFF = (0.01, 0.03, 0.1, 0.3)
_FEW = 10
"""Images below which nothing is held out, and the smallest deviation is taken."""
_BATCH = 4096
_HELD_OUT = 5
"""Every how many-th image is held out to choose deviations."""

_Halves = tuple[Table, Table]
_Start = Float64[np.ndarray, "_"] | None


@dataclass
class AffineScaling(Calibration):
    """Calibrated logits that are affine in the inputs; subclasses say what these are, and whether classes are mixed.

    Attributes:
        deviation: s, the standard deviation of the prior of every w_j around 1 and b_j around 0. None: chosen from
            0.03, 0.1, 0.3 and 1.
        steps: Most steps of a fit; where they do not suffice, a warning says so.
        temperature_: T, once fitted.
        weight_: (c), or (c, c) with the diagonal, of inputs divided by T.
        bias_: (c).
        deviation_: s, as set or chosen.
    """

    deviation: float | None = None
    steps: int = 500

    learned = ("temperature_", "weight_", "bias_", "deviation_")

    def __post_init__(self) -> None:
        check_deviation(self.deviation, by=self.name, what="deviation")
        check_number(self.steps, "[1, inf)", by=self.name, what="steps", whole=True, hint="500 are usual.")

    @staticmethod
    def inputs(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        """What is scaled."""
        return logits

    def learn(self, table: Table) -> None:
        """Temperature first, then the weights around it."""
        few = len(torch.unique(images_of(table))) < _FEW
        fold = folds_of(table, _HELD_OUT, seed=0)
        table, c = _held(table), table.shape("logit")[1]
        self.temperature_ = fit_temperature(table)
        kept, held_out = (chosen_rows(table, one.nonzero()[:, 0]) for one in (fold > 0, fold == 0))
        halves = None if few else (kept, held_out)
        deviation, start = self.deviation, None
        if deviation is None:
            deviation, start = self._best(halves, _OWN, lambda own: (own, None))
        self.deviation_: float = deviation
        off, start = self._chosen_off(halves, c, start)
        theta = self._fitted(table, self.deviation_, off, start)
        self.weight_, self.bias_ = (part.clone() for part in _parts(torch.from_numpy(theta), c))

    def parts_agree(self) -> bool:
        """Weights and intercepts of as many classes as there are."""
        c = self.classes_
        return tuple(self.weight_.shape) in ((c,), (c, c)) and tuple(self.bias_.shape) == (c,)

    def calibrated(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """W x + b."""
        x = self.inputs(logits.double()) / self.temperature_
        return _scaled(x, self.weight_, self.bias_)

    def _chosen_off(self, halves: _Halves | None, c: int, start: _Start) -> tuple[float | None, _Start]:  # noqa: ARG002 (subclasses try several)
        """o, None without off-diagonal weights; and where a fit with it may start."""
        return None, start

    def _best(
        self, halves: _Halves | None, grid: Sequence[float], deviations: Callable[[float], tuple[float, float | None]]
    ) -> tuple[float, _Start]:
        """The deviation with which the held-out rows are most likely, and what was fitted with it.

        None beyond the first that is too large is tried.

        Args:
            halves: Rows to fit and rows held out; None for too few rows.
            grid: Deviations, rising.
            deviations: s and o for a deviation of the grid.
        """
        if halves is None:
            return grid[0], None
        losses: list[float] = []
        fitted: list[_Start] = [None]
        for one in grid:
            theta = self._fitted(halves[0], *deviations(one), fitted[-1], slope=_ROUGH)
            fitted.append(theta)
            losses.append(self._loss(halves[1], torch.from_numpy(theta))[0])
            if losses[-1] > min(losses):
                break
        best = losses.index(min(losses))
        return grid[best], fitted[best + 1]

    def _fitted(
        self,
        table: Table,
        own: float,
        off: float | None,
        start: _Start = None,
        slope: float = 1e-7,
    ) -> Float64[np.ndarray, "k"]:
        """Diagonal or matrix, then intercepts, as one vector; the fit ends where no slope is larger."""
        from scipy.optimize import minimize  # noqa: PLC0415 (slow to import)

        (n, c), exact = table.shape("logit"), table.shape("logit")[1] <= EXACT
        centre = np.zeros(2 * c) if off is None else np.zeros(c * c + c)
        centre[: c if off is None else c * c : 1 if off is None else c + 1] = 1.0
        pull = _pull(c, own, off) / n

        newton = len(centre) <= _SMALL and pull.all()
        curvature = torch.zeros((c, len(centre) // c) * 2 if newton else (0, 0, 0, 0), dtype=torch.float64)

        def objective(theta: Float64[np.ndarray, "k"]) -> tuple[float, Float64[np.ndarray, "k"]]:
            loss, gradient = self._loss(table, torch.from_numpy(theta), curvature if newton else None)
            moved = theta - centre
            return loss + float(pull @ np.square(moved)) / 2, gradient + pull * moved

        def hessian(_: Float64[np.ndarray, "k"]) -> Float64[np.ndarray, "k k"]:  # where the objective was computed last
            return _as_matrix(curvature) / n + np.diag(pull)

        options: dict[str, float] = {"maxiter": self.steps, "gtol": slope if exact else _FLOAT32}
        first = centre if start is None else start
        if newton:
            optimum = minimize(objective, first, jac=True, hess=hessian, method="trust-exact", options=options)
        else:
            options |= {"maxfun": 2 * self.steps, "maxcor": 20 if exact else 5, "ftol": 1e-13 if exact else 1e-8}
            optimum = minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
        if optimum.status == 1:
            warnings.warn(
                f"{self.name}.fit: {self.steps} steps did not suffice on {n} rows of {c} classes; the largest slope "
                f"is {np.abs(optimum.jac).max():.1g}. Raise steps, or lower the standard deviations.",
                DubitoWarning,
                stacklevel=5,
            )
        return np.asarray(optimum.x)

    def _batches(self, table: Table) -> Iterator[tuple[Float[Tensor, "b c"], Int64[Tensor, "b"]]]:
        dtype = torch.float64 if table.shape("logit")[1] <= EXACT else torch.float32
        for batch in table.batches("logit", "label", size=_BATCH):
            yield self.inputs(batch.logit.to(dtype)) / self.temperature_, batch.label

    def _loss(
        self, table: Table, theta: Float64[Tensor, "k"], curvature: Float64[Tensor, "c m c m"] | None = None
    ) -> tuple[float, Float64[np.ndarray, "k"]]:
        """The mean negative log-likelihood, and its gradient.

        Args:
            table: Logits and labels.
            theta: The parameters.
            curvature: Is set to the Hessian of the sum, by classes and their m parameters, the last of which is the
                intercept. Its parts are computed in float32: it changes the steps of a fit, not where they end.
        """
        n, c = table.shape("logit")
        weight, bias = _parts(theta, c)
        slope = torch.zeros(len(theta), dtype=torch.float64)
        of_weight, of_bias = _parts(slope, c)
        total = 0.0
        if curvature is not None:
            curvature.zero_()
        for x, label in self._batches(table):
            log_p = _scaled(x, weight.to(x.dtype), bias.to(x.dtype)).log_softmax(-1)
            own = torch.arange(len(x)), label
            total -= float(log_p[own].double().sum())
            error = log_p.exp_()
            if curvature is not None:
                _add_curvature(curvature, error.float(), x.float(), mixed=weight.dim() == 2)
            error[own] -= 1
            of_weight += error.T @ x if weight.dim() == 2 else (error * x).sum(0)
            of_bias += error.sum(0)
        return total / n, slope.div_(n).numpy()


@dataclass
class MixingScaling(AffineScaling):
    """Affine scaling in which every class sees the inputs of all.

    Attributes:
        off_diagonal: o, the standard deviation of the prior of the weights between classes. None: chosen from 0.01,
            0.03, 0.1 and 0.3; beyond 128 classes, where trying them would take hours, 0.01.
    """

    off_diagonal: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_deviation(self.off_diagonal, by=self.name, what="off_diagonal")

    def _chosen_off(self, halves: _Halves | None, c: int, start: _Start) -> tuple[float | None, _Start]:  # noqa: ARG002
        if self.off_diagonal is not None or c > EXACT:
            return self.off_diagonal or _OFF[0], None
        return self._best(halves, _OFF, lambda off: (self.deviation_, off))


def check_deviation(value: float | None, *, by: str, what: str) -> None:
    """Raise ValueRangeError unless a standard deviation is positive, or infinite; None passes."""
    if value is not None and value != float("inf"):
        check_number(value, "(0, inf)", by=by, what=what, hint="None chooses it; infinity leaves the penalty out.")


def _pull(c: int, own: float, off: float | None) -> Float64[np.ndarray, "k"]:
    """1 / deviation² of every parameter."""
    if off is None:
        return np.full(2 * c, own**-2)
    weights = np.full((c, c), off**-2)
    np.fill_diagonal(weights, own**-2)
    return np.append(weights.ravel(), np.full(c, own**-2))


def _scaled(x: Float[Tensor, "n c"], weight: Float[Tensor, "..."], bias: Float[Tensor, "c"]) -> Float[Tensor, "n c"]:
    return torch.addmm(bias, x, weight.T) if weight.dim() == 2 else torch.addcmul(bias, x, weight)


def _add_curvature(
    total: Float64[Tensor, "c m c m"], p: Float32[Tensor, "n c"], x: Float32[Tensor, "n c"], *, mixed: bool
) -> None:
    """Add what some rows add to the Hessian."""
    one = torch.ones_like(x[:, :1])
    of_class = (
        torch.cat([x, one], 1)[:, None].expand(-1, x.shape[1], -1) if mixed else torch.stack([x, one.expand_as(x)], 2)
    )
    scaled = p[..., None] * of_class
    flat = scaled.flatten(1)
    total -= (flat.T @ flat).view_as(total)
    total.diagonal(dim1=0, dim2=2).add_(torch.einsum("njk,njl->klj", scaled, of_class))


def _as_matrix(curvature: Float64[Tensor, "c m c m"]) -> Float64[np.ndarray, "k k"]:
    """In the order of theta: all weights, then all intercepts."""
    c, m = curvature.shape[:2]
    place = torch.arange(c * m).reshape(c, m)
    order = torch.cat([place[:, :-1].flatten(), place[:, -1]])
    return curvature.reshape(c * m, c * m)[order][:, order].numpy()


def _parts(theta: Float64[Tensor, "k"], c: int) -> tuple[Float64[Tensor, "..."], Float64[Tensor, "c"]]:
    """Weights, (c) or (c, c), and intercepts: views."""
    weight, bias = theta[:-c], theta[-c:]
    return (weight if len(weight) == c else weight.reshape(c, c)), bias


def _held(table: Table) -> Table:
    """Logits and labels in memory, where they take at most half a gigabyte; the fit reads them many times."""
    n, c = table.shape("logit")
    columns = table.select("logit", "label")
    return columns.rows(slice(None)) if 4 * n * c <= _HELD else columns
