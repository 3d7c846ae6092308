"""Rows of what is fitted to labels: temperature, Venn-Abers, the last layer's posterior, predicted losses."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _peers_data import Columns
from _peers_row import Contender, Row, Side, score

import dubito
from dubito import metrics
from dubito.calibration import VennAbers, make_calibration
from dubito.scores import make_score

BOTH = ("feature", "logit")
_GIGABYTE = 2**28
"""Numbers of float32."""
_MOST = 8192
"""Logits of a block: the peer makes a square matrix of that size."""


def our_temperature(columns: Columns) -> Contender:
    """By Newton's method, to nine digits."""
    one, table = dubito.Temperature(), columns.train("logit", "label")
    return lambda: one.fit(table), lambda: {"value": one.temperature_}


def their_temperature(columns: Columns) -> Contender:
    """By L-BFGS."""
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415
    from torch_uncertainty.post_processing import TemperatureScaler  # noqa: PLC0415

    one, rows = TemperatureScaler(), TensorDataset(columns["train_logit"], columns["train_label"])
    loader = DataLoader(rows, batch_size=2048)
    return lambda: one.fit(loader, progress=False), lambda: {"value": float(one.temperature[0])}


def our_map(name: str, **settings: Any) -> Side:
    """A map of all logits, and the NLL of other images of the model's classes."""

    def contender(columns: Columns) -> Contender:
        one, train, table = (
            make_calibration(name, **settings),
            columns.train("logit", "label"),
            columns.test("logit", "label"),
        )
        known = table.rows(~columns["ood"])
        return lambda: one.fit(train), lambda: {"nll": metrics.nll(one.apply(known).logit, known.label)}

    return contender


def their_map(name: str, *, by_classes: bool = True) -> Side:
    """The same with the peer's defaults: L-BFGS, or scikit-learn's isotonic regression."""

    def contender(columns: Columns) -> Contender:
        from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415
        from torch_uncertainty import post_processing  # noqa: PLC0415

        logit, label, ood = columns["logit"], columns["label"], columns["ood"]
        one = getattr(post_processing, name)(**({"num_classes": logit.shape[1]} if by_classes else {}))
        loader = DataLoader(TensorDataset(columns["train_logit"], columns["train_label"]), batch_size=2048)
        loss = torch.nn.functional.cross_entropy
        return lambda: one.fit(loader, progress=False), lambda: {"nll": float(loss(one(logit[~ood]), label[~ood]))}

    return contender


def top_probabilities(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of images to learn from, whether these are right, and of images to calibrate."""
    logit, label = columns["train_logit"], columns["train_label"]
    right = metrics.correct(logit, label).numpy()
    return metrics.confidence(logit).numpy(), right, metrics.confidence(columns["logit"]).numpy()


def our_venn_abers(columns: Columns) -> Contender:
    """The single probability, which both bounds go into; lower is more uncertain."""
    one, (top, right, new) = VennAbers(), top_probabilities(columns)
    return lambda: one.learn_top(top, right), lambda: -one.top_probability(new)


def their_venn_abers(columns: Columns) -> Contender:
    """Of two classes, wrong and right."""
    from venn_abers import VennAbers as Theirs  # noqa: PLC0415

    one, (top, right, new) = Theirs(), top_probabilities(columns)
    pairs = [np.column_stack([1 - p, p]) for p in (top, new)]
    return lambda: one.fit(pairs[0], right.astype(int)), lambda: -one.predict_proba(pairs[1])[0][:, 1]


def their_laplace(columns: Columns) -> Contender:
    """The same information about the label, of the covariance of the logits that the peer computes."""
    from laplace import Laplace  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    layer, feature = columns.head.requires_grad_(True), columns["feature"]
    loader = DataLoader(TensorDataset(columns["train_feature"], columns["train_label"]), batch_size=2048)
    one = Laplace(layer, "classification", subset_of_weights="all", hessian_structure="kron")

    def fit() -> None:
        one.fit(loader)
        one.optimize_prior_precision()

    def information() -> np.ndarray:
        parts = []
        rows = min(_GIGABYTE // layer.weight.numel(), _MOST) // layer.out_features
        for block in feature.split(max(1, rows)):
            jacobians, logits = one.backend.jacobians(block)
            p, covariance = logits.double().softmax(1), one.functional_variance(jacobians).double()
            spread = (p * covariance.diagonal(dim1=1, dim2=2)).sum(1)
            parts.append((spread - torch.einsum("nc,nck,nk->n", p, covariance, p)) / 2)
        return torch.cat(parts).detach().numpy()

    return fit, information


def wrong_auroc(columns: Columns, uncertainty: np.ndarray) -> dict[str, float]:
    """How well an uncertainty finds wrong predictions among the images of the model's classes, and OOD images."""
    ood, logit, label = columns["ood"], columns["logit"], columns["label"]
    u = torch.from_numpy(uncertainty)
    wrong = ~metrics.correct(logit[~ood], label[~ood])
    return {"error_auroc": metrics.auroc(u[~ood], wrong), "ood_auroc": metrics.auroc(u, ood)}


def losses(columns: Columns) -> dubito.Table:
    """Features, logits, labels and losses to learn from."""
    logit, label = columns["train_logit"], columns["train_label"]
    loss = torch.nn.functional.cross_entropy(logit, label, reduction="none")
    return dubito.Table(feature=columns["train_feature"], logit=logit, label=label, loss=loss)


def our_head(columns: Columns) -> Contender:
    """Trained to rank the losses by the features, with its defaults."""
    head, train, table = dubito.UncertaintyHead(), losses(columns), columns.test("feature")
    return lambda: head.fit(train), lambda: wrong_auroc(columns, head.score(table).numpy())


def our_deup(columns: Columns) -> Contender:
    """Trained on the losses by features, density and variance, with its defaults."""
    one, train, table = make_score("deup"), losses(columns), columns.test(*BOTH)
    return lambda: one.fit(train), lambda: wrong_auroc(columns, one.score(table).numpy())


def their_deup(columns: Columns) -> Contender:
    """Trained on the losses by the logits, with its defaults."""
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415
    from torch_uncertainty.post_processing import DEUP  # noqa: PLC0415

    one = DEUP("classification", model=columns.head)
    loader = DataLoader(TensorDataset(columns["train_feature"], columns["train_label"]), batch_size=2048)
    return lambda: one.fit(loader), lambda: wrong_auroc(columns, one(columns["feature"]).numpy())


_STEPS = "the peer stops after 200 steps; ours converges, with a penalty"
_TU = "torch-uncertainty"
POSTERIORS = tuple(
    replace(row, kind="Learned from labels")
    for row in (
        Row("temperature", _TU, our_temperature, their_temperature),
        Row("vector scaling", _TU, our_map("vector"), their_map("VectorScaler"), why=_STEPS),
        Row("vector scaling", _TU, our_map("vector"), their_map("VectorScaler"), columns="small", why=_STEPS),
        Row("matrix scaling", _TU, our_map("matrix"), their_map("MatrixScaler"), columns="small", why=_STEPS),
        Row("dirichlet scaling", _TU, our_map("dirichlet"), their_map("DirichletScaler"), columns="small", why=_STEPS),
        Row(
            "isotonic regression of every class",
            _TU,
            our_map("class_wise_isotonic"),
            their_map("IsotonicRegressionScaler", by_classes=False),
            columns="medium",
            why="the peer raises probabilities to 1e-6 at least, after they were normalised",
        ),
        Row(
            "histogram",
            _TU,
            our_map("histogram"),
            their_map("HistogramBinningScaler", by_classes=False),
            columns="medium",
            why="the peer bins the probabilities of every class, ours the largest",
        ),
        Row("Venn-Abers", "venn-abers", our_venn_abers, their_venn_abers),
        *(
            Row(
                "last-layer Laplace",
                "laplace-torch",
                score("laplace", *BOTH, fits=BOTH),
                their_laplace,
                share=share,
                columns=columns,
                why="the peer makes the biases a block of their own; ours recovers the last layer from the columns",
            )
            for columns, share in {"small": 1.0, "medium": 0.02}.items()
        ),
        Row("DEUP", _TU, our_deup, their_deup, columns="small", why="the peer's inputs are the logits"),
        Row(
            "uncertainty head, and the peer's DEUP",
            _TU,
            our_head,
            their_deup,
            columns="small",
            why="a head ranks losses, in many more passes; DEUP predicts them",
            same_work=False,
        ),
    )
)
"""What is fitted to labels or losses."""
