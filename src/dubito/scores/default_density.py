"""Which density suits a table, where nobody has said which; by its n rows of d features, c classes.

    start        by class, k = c Gaussians, where there are labels and n >= 10 c;
                 else free (k-means), k = n / 50 Gaussians, at least 1 and at most c
    covariance   full where n >= 5 k d and 16 k d^2 bytes are at most 1 GB; else tied where n >= 5 d; else diagonal
    EM           not with more than 100 Gaussians by class, nor where an iteration takes more than 2e11 multiply-adds:
                 n k d^2 (full), n d (d + k) (tied), n k d; then the mixture stays as it started, in closed form

So every variance is learned from several rows: with one photograph a class, Gaussians by class were worse than a
single one. Features are taken as they are (z), and 1e-5 is added to every variance. Size and cost are known before
anything is fitted. The rule is ours; the paper fits full covariances by EM wherever it can.
"""

from dubito.choices import Covariance
from dubito.scores.density import Density, class_count
from dubito.table import Table
from dubito.types import Score

_ROWS_PER_FEATURE = 5
_ROWS_PER_CLASS = 10
_ROWS_PER_CLUSTER = 50
_FULL_BYTES = 1e9
_CLOSED_FORM_FROM = 100
QUICK = 1e10
"""Multiply-adds of an iteration of EM, about a second's worth: `most` for those who fit a density by the way."""


def default_density(
    train: Table, covariance: Covariance | None = None, *, by: str = "default_density", most: float = 2e11
) -> Density:
    """The density that suits the size of a table: see the rule above.

    Args:
        train: Rows to fit on.
        covariance: Of that kind, whatever the rule says.
        by: Who asks, for errors.
        most: Multiply-adds that an iteration of EM may take; ten to twenty seconds on one core by default.

    >>> import torch
    >>> table = Table(feature=torch.randn(400, 8), logit=torch.randn(400, 4), label=torch.arange(400) % 4)
    >>> default_density(table).covariance, default_density(table.rows(slice(0, 90))).covariance
    ('full', 'tied')
    """
    train.require("feature", by=by)
    rows, width = train.shape("feature")
    classes = _labels(train) if "label" in train else train.shape("logit")[1] if "logit" in train else 1
    by_class = "label" in train and rows >= _ROWS_PER_CLASS * classes
    components = classes if by_class else max(1, min(classes, rows // _ROWS_PER_CLUSTER))
    covariance = covariance or _covariance(rows, width, components)
    numbers = {"full": components * width * width, "tied": width * (width + components)}
    costly = rows * numbers.get(covariance, components * width) > most
    return Density(
        components=None if by_class else components,
        covariance=covariance,
        start="class" if by_class else "free",
        max_iterations=0 if costly or (by_class and components > _CLOSED_FORM_FROM) else 100,
    )


def told(density: Score, train: Table | None) -> str:
    """The density in words, with its size: what was fitted, or what will be."""
    fitted = density.is_fitted
    if not isinstance(density, Density) or (train is None and not fitted):
        return density.name
    if fitted:
        components, width = density.means_.shape
    elif train is not None:
        width = density.neurons or train.shape("feature")[1]
        components = density.components or (_labels(train) if density.start == "class" else class_count(train) or 1)
    many = "1 Gaussian" if components == 1 else f"{components} Gaussians"
    by = " (one a class)" if density.start == "class" else " (found by k-means)" if components != 1 else ""
    numbers = {"full": components * width**2, "tied": width**2 + components * width}
    size = f", {8 * numbers.get(density.covariance, 2 * components * width) / 1e6:,.1f} MB"
    fit = "in closed form" if density.max_iterations == 0 else "by EM"
    where = " (log z)" if density.space == "log" else ""
    return f"{many}{by}, {density.covariance} covariances of {width} features{where}, {fit}{size}"


def _covariance(rows: int, width: int, components: int) -> Covariance:
    if rows >= _ROWS_PER_FEATURE * components * width and 16 * components * width**2 <= _FULL_BYTES:
        return "full"
    return "tied" if rows >= _ROWS_PER_FEATURE * width else "diagonal"


def _labels(table: Table) -> int:
    return len(set(table.label.tolist()))
