"""Last-layer Laplace approximation: how far the classifying layer is still undecided about an image.

    q(theta) = N(theta*, H^-1),   H = sum_i F_i (x) x_i x_i^T + tau I,   F = diag p - p p^T,   x = (z, 1)
    u(x)     = I[y; theta] ~ 1/2 tr(F S),   S = cov_q(logits)

Daxberger et al. 2021 (arXiv 2106.14806), Kristiadi et al. 2020 (arXiv 2002.10118). theta = (W, b) is the classifying
layer. The sum over the rows of fit is the generalised Gauss-Newton matrix of the cross-entropy, which needs no labels;
tau is the precision of the prior N(0, I / tau) on weights and bias. Three structures of H:

    kron       n B (x) A + tau I,   A = mean of x x^T,   B = mean of F                    (the default)
    diagonal   sum_i p_ik (1 - p_ik) x_ij^2 + tau
    full       as above; c (d + 1) may be at most 6,000

The logits are linear in theta, so S is exact: with A = U diag(a) U^T and B = V diag(b) V^T,

    S = V diag(s) V^T,   s_k = sum_j (u_j^T x)^2 / (n b_k a_j + tau)

and 1/2 tr(F S) is the mutual information of the label and theta to second order, in closed form; Kirsch and Gal 2022
(arXiv 2208.00549) give the same form. It does not depend on what all logits share, where only the prior decides. The
variance of the logits alone is no measure of uncertainty: it grows with the length of x, which is largest for certain
images.

By default tau maximises the evidence at the fixed theta*, log p(D | tau) = const + 1/2 (P log tau - tau |theta*|^2 -
log det H). Its slope in log tau, 1/2 (gamma - tau |theta*|^2) with gamma = sum h / (h + tau) over the eigenvalues h of
the Gauss-Newton matrix (MacKay 1992), falls everywhere, so its only root is found by bisection.

theta* comes from features and logits (`_last_layer.py`). Weight and bias form one block, so A includes the covariance
of features and bias; laplace-torch makes the bias a block of its own. If `fit` sees fewer images than the model was
trained on, S is larger, and the order of images about the same. Products are in the precision of the features; sums
over rows and eigenvalues are in float64. Each v_k is kept less its mean, which no probability depends on, so that what
all logits share takes no digits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import LaplaceStructure
from dubito.errors import TableError, ValueRangeError
from dubito.heads.linear_logits import add_gram, mirrored
from dubito.scores._features import ScoreOfFeatures, mean_feature
from dubito.scores._last_layer import recovered
from dubito.scores.softmax import check_two_classes
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_choice, check_number, check_rows

_MOST_FULL = 6_000
_SMALLEST, _LARGEST = 1e-12, 1e12
_TINY = 1e-300
_BISECTIONS = 80
_NUMBERS = 4e6
"""Numbers per block of the full structure."""


def logit_information(
    logits: Float[Tensor, "n c"], variances: Float[Tensor, "n k"], directions: Float[Tensor, "c k"] | None = None
) -> Float64[Tensor, "n"]:
    """1/2 tr(F S) for S = sum_k s_k v_k v_k^T: the information about the label in Gaussian logits, to second order.

    Per direction it is half the variance s_k times the variance of v_ky for labels y drawn from p. With q = 1 - p of
    the most likely class t, a sum of the other probabilities, and E and Var for labels y drawn from these, that is

        q (Var v_ky + (1 - q) (E v_ky - v_kt)^2)

    so that confident rows keep their order, also where products with the directions are in float32.

    Args:
        logits: The mean of the logits.
        variances: s_k of every row.
        directions: v_k; None for one per class.

    >>> logit_information(torch.zeros(1, 2), torch.tensor([[0.5, 1.5]])).item()  # (0.5 / 4 + 1.5 / 4) / 2
    0.25
    """
    p = logits.double().softmax(-1)
    top = p.argmax(-1, keepdim=True)
    others = p.scatter(-1, top, 0.0)
    rest = others.sum(-1, keepdim=True)
    if directions is None:
        spread = (p * (1 - p)).scatter(-1, top, rest * (1 - rest))
        return 0.5 * (spread * variances).sum(-1)
    share = (others / rest.clamp(min=_TINY)).to(directions.dtype)
    mean = share @ directions
    spread = (share @ directions.square() - mean.square()).clamp(min=0)
    spread = spread + (1 - rest).to(mean.dtype) * (mean - directions[top[:, 0]]).square()
    return 0.5 * rest[:, 0] * (spread * variances).sum(-1, dtype=torch.float64)


def with_one(feature: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
    """Features and a one for the bias; x.shape[0] in place of len(x), so that an exported graph takes any number."""
    return torch.cat([feature, feature.new_ones(feature.shape[0], 1)], dim=1)


def evidence_precision(eigenvalues: Float[Tensor, "..."], norm: float) -> float:
    """The tau at which sum h / (h + tau) = tau norm, where the evidence is largest; ValueRangeError if there is none.

    Args:
        eigenvalues: Those of the Gauss-Newton matrix, all of them.
        norm: The squared norm of all weights and biases.

    >>> round(evidence_precision(torch.tensor([2.0, 2.0]), 1.0), 6)  # 2 * 2 / (2 + tau) = tau: tau^2 + 2 tau = 4
    1.236068
    """
    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        tau = math.exp(middle)
        effective = float((eigenvalues / (eigenvalues + tau)).sum())
        low, high = (middle, high) if effective > tau * norm else (low, middle)
    tau = math.exp((low + high) / 2)
    if not 2 * _SMALLEST < tau < _LARGEST / 2:
        raise ValueRangeError(
            f"laplace.fit: the evidence has no maximum for a prior precision from {_SMALLEST:g} to {_LARGEST:g}, as "
            f"when every prediction is certain. Look at the logits, or pass prior_precision=1.0."
        )
    return tau


@final
@dataclass
class Laplace(ScoreOfFeatures):
    """What the weights of the last layer, under their Laplace posterior, leave open about the prediction.

    Attributes:
        structure: That of the posterior precision: "kron", "diagonal" or "full".
        prior_precision: tau; None maximises the evidence.
        basis_: (e, e) eigenvectors of A with e = d + 1; of "full", (c e, c e); empty for the axes themselves.
        outputs_: (c, c) eigenvectors of B, each less its mean; empty for the classes themselves.
        curvature_: (c, e) eigenvalues of the Gauss-Newton matrix.
        precision_: tau, once fitted.
    """

    structure: LaplaceStructure = "kron"
    prior_precision: float | None = None

    name = "laplace"
    kind = "epistemic"
    needs = ("feature", "logit")
    learns_from = ("feature", "logit")
    learned = ("basis_", "outputs_", "curvature_", "precision_")

    def __post_init__(self) -> None:
        check_choice(self.structure, get_args(LaplaceStructure), by=self.name, what="structure")
        if self.prior_precision is not None:
            check_number(self.prior_precision, "(0, inf)", by=self.name, what="prior_precision", hint="Or pass None.")

    def learn(self, table: Table) -> None:
        """The Gauss-Newton matrix in one pass, and the prior precision from its eigenvalues."""
        by, (c, e) = "laplace.fit", (table.shape("logit")[1], table.shape("feature")[1] + 1)
        check_rows(table, by=by)
        if self.structure == "full" and c * e > _MOST_FULL:
            raise ValueRangeError(
                f"{by}: structure='full' is for at most {_MOST_FULL:,} weights and biases; {c} classes and {e - 1} "
                f"features have {c * e:,}. Use structure='kron'."
            )
        norm = _squared_norm(table, by) if self.prior_precision is None else 0.0
        learn = {"kron": _kron, "diagonal": _diagonal, "full": _full}[self.structure]
        basis, outputs, curvature = learn(table, c, e, by)
        self.precision_ = self.prior_precision or evidence_precision(curvature, norm)
        self.basis_, self.outputs_, self.curvature_ = basis, outputs, curvature

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The information, in nats."""
        self.check_shapes(batch)
        return self.information(batch.feature, batch.logit)

    def check_shapes(self, batch: Table) -> None:
        """Raise TableError for features of another width, or logits of other classes, than in fit."""
        c, e = self.curvature_.shape
        self.check_width(batch, e - 1)
        if batch.shape("logit")[1] != c:
            raise TableError(
                f"laplace.score: logits must be of {c} classes, as in fit; got {batch.shape('logit')[1]} in "
                f"{batch.name}. Score a table of the same model."
            )

    def information(self, feature: Float[Tensor, "n d"], logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n"]:
        """The same from features and logits, unchecked."""
        x = with_one(feature)
        if self.structure == "full":
            return self._of_full(x.double(), logits)
        x = x @ self.basis_.to(x.dtype) if len(self.basis_) else x
        variances = x.square() @ (self.curvature_ + self.precision_).reciprocal().to(x.dtype).T
        return logit_information(logits, variances, self.outputs_.to(x.dtype) if len(self.outputs_) else None)

    def _of_full(self, x: Float64[Tensor, "n e"], logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n"]:
        """Every eigenvector of H moves the logits of a row in a direction of its own."""
        c, e = self.curvature_.shape
        scaled = self.basis_ * (self.curvature_.flatten() + self.precision_).rsqrt()
        parts, size = [], max(1, int(_NUMBERS / (c * c * e)))
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            moves = torch.einsum("ne,cek->nck", x[rows], scaled.view(c, e, -1))
            p = logits[rows].double().softmax(-1)
            away = moves - moves.gather(1, p.argmax(-1)[:, None, None].expand(-1, 1, c * e))
            spread = torch.einsum("nc,nck->nk", p, away.square()) - torch.einsum("nc,nck->nk", p, away).square_()
            parts.append(0.5 * spread.clamp_(min=0).sum(1))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def _squared_norm(table: Table, by: str) -> float:
    """Of the last layer's weights and biases."""
    layer = recovered(table, by=by)
    layer.check_linear(table.name, by=by, repair="or set prior_precision")
    return float(layer.weight.square().sum() + layer.bias.square().sum())


def _rows(table: Table, by: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (n, d), and probabilities (n, c) in float64, block by block."""
    for batch in finite_batches(table.batches("feature", "logit"), table.name, by=by):
        yield batch.feature, check_two_classes(batch.logit, by).softmax(-1)


def _kron(table: Table, c: int, e: int, by: str) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors of A and of B, and n times all products of their eigenvalues."""
    mean, n = mean_feature(table, by=by), len(table)
    inputs, outputs = torch.zeros(e - 1, e - 1, dtype=torch.float64), torch.zeros(c, c, dtype=torch.float64)
    spread = torch.zeros(c, dtype=torch.float64)
    for z, p in _rows(table, by):
        # Around the mean, as in residual.py, and the diagonal by itself: products in float32 keep their digits.
        add_gram(inputs, z - mean.to(z.dtype))
        add_gram(outputs, p.to(z.dtype))
        spread += (p * (1 - p)).sum(0)
    first = with_one(mean[None])[0]
    whole = torch.outer(first, first)
    whole[:-1, :-1] += mirrored(inputs) / n
    (a, basis), (b, directions) = _eigen(whole), _eigen((-mirrored(outputs)).diagonal_scatter(spread))
    return basis, directions - directions.mean(0), torch.outer(b, a)


def _diagonal(table: Table, c: int, e: int, by: str) -> tuple[Tensor, Tensor, Tensor]:
    """The diagonal of the Gauss-Newton matrix; its axes are weights."""
    curvature, none = torch.zeros(c, e, dtype=torch.float64), torch.empty(0, 0, dtype=torch.float64)
    for z, p in _rows(table, by):
        curvature += (p * (1 - p)).to(z.dtype).T @ with_one(z).square()
    return none, none.clone(), curvature


def _full(table: Table, c: int, e: int, by: str) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors of the whole matrix, and its eigenvalues, which have no order by class."""
    whole = torch.zeros(c, e, c, e, dtype=torch.float64)
    for z, p in _rows(table, by):
        x = with_one(z.double())
        for k in range(c):
            for other in range(k + 1):
                share = p[:, k] * ((1.0 if k == other else 0.0) - p[:, other])
                whole[k, :, other].addmm_((x * share[:, None]).T, x)
    eigenvalues, vectors = _eigen(whole.view(c * e, c * e))
    return vectors, torch.empty(0, 0, dtype=torch.float64), eigenvalues.view(c, e)


def _eigen(matrix: Float64[Tensor, "k k"]) -> tuple[Float64[Tensor, "k"], Float64[Tensor, "k k"]]:
    """Eigenvalues and vectors of the lower triangle; row-major, as they come back from a file."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp_(min=0), vectors.contiguous()
