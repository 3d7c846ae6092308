"""Rows of prediction sets and guarantees: TorchCP's and MAPIE's."""

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import abstention
import numpy as np
import torch
from _peers_data import Columns
from _peers_row import Contender, Row, Side, nothing

from dubito.guard.conformal import PredictionSets
from dubito.guard.set_scores import FREE_RANKS, PENALTY

COVERAGE = 0.9
CONFIDENCE = 0.95
ALLOWED = 1 - CONFIDENCE
"""The share of draws in which a guarantee may be broken."""
DRAWS, DRAWN = 2000, 1000
"""Calibration sets, and images of each."""


def our_sets(method: str, **settings: Any) -> Side:
    """Calibrated on one table, of another."""

    def contender(columns: Columns) -> Contender:
        sets = PredictionSets(COVERAGE, method, **settings)  # type: ignore[arg-type]
        train, table, label = columns.train("logit", "label"), columns.test("logit"), columns["label"]
        return lambda: sets.fit(train), lambda: {"inside": sets.sets(table), "label": label}

    return contender


def torchcp_sets(name: str, predictor: str = "SplitPredictor", **settings: Any) -> Side:
    """Calibrated on logits."""

    def contender(columns: Columns) -> Contender:
        # The package imports graphs and language models, and a loss that needs torchsort, which must be compiled;
        # prediction sets need none of them.
        if "torchcp" not in sys.modules and (found := importlib.util.find_spec("torchcp")) is not None:
            sys.modules["torchcp"] = importlib.util.module_from_spec(found)
        sys.modules["torchsort"] = types.SimpleNamespace(soft_rank=None, soft_sort=None)  # type: ignore[assignment]
        from torchcp.classification import predictor as predictors  # noqa: PLC0415
        from torchcp.classification import score as scores  # noqa: PLC0415

        one = getattr(predictors, predictor)(getattr(scores, name)(**settings), alpha=1 - COVERAGE)
        train, train_label = columns["train_logit"], columns["train_label"]
        logit, label = columns["logit"], columns["label"]
        return (
            lambda: one.calculate_threshold(train, train_label, 1 - COVERAGE),
            lambda: {"inside": one.predict_with_logits(logit), "label": label},
        )

    return contender


def mapie_sets(name: str) -> Side:
    """Of probabilities, which an estimator passes through."""

    def contender(columns: Columns) -> Contender:
        from mapie.classification import SplitConformalClassifier  # noqa: PLC0415
        from sklearn.base import BaseEstimator, ClassifierMixin  # noqa: PLC0415

        class Softmax(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
            """Its inputs are logits."""

            def __init__(self, classes: int = 2) -> None:
                self.classes = classes
                self.classes_ = np.arange(classes)

            def fit(self, x: object, y: object) -> "Softmax":  # noqa: ARG002
                """It is."""
                return self

            def __sklearn_is_fitted__(self) -> bool:
                return True

            def predict_proba(self, x: np.ndarray) -> np.ndarray:
                """In float64, so that rows sum to one."""
                return np.asarray(torch.from_numpy(x).double().softmax(1))

            def predict(self, x: np.ndarray) -> np.ndarray:
                """The largest."""
                return np.asarray(x.argmax(axis=1))

        train, train_label = columns["train_logit"].numpy(), columns["train_label"].numpy()
        logit, label = columns["logit"].numpy(), columns["label"]
        one = SplitConformalClassifier(Softmax(train.shape[1]), confidence_level=COVERAGE, conformity_score=name)
        return (
            lambda: one.conformalize(train, train_label),
            lambda: {"inside": torch.from_numpy(one.predict_set(logit)[1][..., 0]), "label": label},
        )

    return contender


@dataclass(frozen=True)
class Draws:
    """Calibration sets, drawn with replacement from labelled images, which are the population (`abstention.py`)."""

    logit: np.ndarray
    label: np.ndarray
    draws: int = DRAWS
    rows: int = DRAWN

    def measured(self, accepted: Callable[[np.ndarray], np.ndarray], risk: float) -> dict[str, float]:
        """The share of draws with more errors than the risk, and the mean share of images that is accepted."""
        wrong = self.logit.argmax(1) != self.label
        broken, coverage = 0, 0.0
        for seed in range(self.draws):
            inside = accepted(np.random.default_rng(seed).integers(len(wrong), size=self.rows))
            broken += bool(inside.any() and wrong[inside].mean() > risk)
            coverage += float(inside.mean())
        return {"violations": broken / self.draws, "kept_coverage": coverage / self.draws}


def our_guarantee(risk: float, *, temperature: bool = False) -> Side:
    """The test behind `Guard.fit`, of max-probabilities; with a temperature, which a tenth of the images fits."""

    def contender(columns: Columns) -> Contender:
        logit, label = columns["train_logit"].numpy(), columns["noisy_label"].numpy()
        p, wrong = abstention.probabilities(logit), logit.argmax(1) != label

        def accepted(rows: np.ndarray) -> np.ndarray:
            if temperature:
                return abstention.guarded(logit, label, wrong, rows, risk, CONFIDENCE)
            return np.asarray(p >= -abstention.ours(-p[rows], wrong[rows], risk, CONFIDENCE))

        return nothing, lambda: Draws(logit, label).measured(accepted, risk)

    return contender


def mapie_guarantee(risk: float) -> Side:
    """One risk for all classes: where it does not abstain, the prediction is right."""

    def contender(columns: Columns) -> Contender:
        from mapie.risk_control import BinaryRisk, MultiClassificationLTTController  # noqa: PLC0415

        logit, label = columns["train_logit"].numpy(), columns["noisy_label"].numpy()
        p = columns["train_logit"].double().softmax(1).numpy()
        precision = BinaryRisk(
            risk_occurrence=lambda label, predicted: predicted.ravel() == label.ravel(),
            risk_condition=lambda _, predicted: ~np.isnan(predicted.ravel()),
            higher_is_better=True,
        )

        def accepted(rows: np.ndarray) -> np.ndarray:
            one = MultiClassificationLTTController(
                lambda x: x, [precision], [1 - risk], confidence_level=CONFIDENCE, classes=np.arange(p.shape[1])
            )
            one.calibrate(p[rows], label[rows])
            valid = np.asarray(one.valid_predict_params)
            return np.asarray(p.max(1) >= (valid.min() if len(valid) else np.inf))

        return nothing, lambda: Draws(logit, label).measured(accepted, risk)

    return contender


def set_rows() -> list[Row]:
    """Prediction sets of coverage 0.9."""
    float32 = "from float32 probabilities, the peer's quantile is rounded"
    top = "the most likely class of ours scores 0, so that certain images do not raise the quantile"
    raps, saps = {"penalty": PENALTY["raps"], "kreg": FREE_RANKS}, {"weight": PENALTY["saps"]}
    listed = [
        ("lac", "torchcp", torchcp_sets("LAC"), float32),
        ("aps", "torchcp", torchcp_sets("APS", randomized=False), top),
        ("raps", "torchcp", torchcp_sets("RAPS", randomized=False, **raps), top),
        # Without drawing at the boundary, its calibration scores are others.
        ("saps", "torchcp", torchcp_sets("SAPS", **saps), "the peer draws lots at the boundary"),
        ("lac", "mapie", mapie_sets("lac"), ""),
        ("aps", "mapie", mapie_sets("aps"), "MAPIE draws lots at the boundary"),
        ("raps", "mapie", mapie_sets("raps"), "MAPIE chooses the penalty on a fifth of the images, and draws lots"),
    ]
    rows = [
        Row(f"sets, {name}", peer, our_sets(name), theirs, kind="Prediction sets", why=why)
        for name, peer, theirs, why in listed
    ]
    parts = {
        "sets, lac of every class": (our_sets("lac", class_wise=True), "ClassConditionalPredictor", float32),
        "sets, lac of clusters of classes": (
            our_sets("lac", clusters=10),
            "ClusteredPredictor",
            "the peer chooses how many clusters, and which images make them, by lot",
        ),
    }
    return rows + [
        Row(what, "torchcp", ours, torchcp_sets("LAC", predictor), kind="Prediction sets", why=why)
        for what, (ours, predictor, why) in parts.items()
    ]


def guarantee_rows() -> list[Row]:
    """At three risks, for two networks on CIFAR-10."""
    why = "MAPIE corrects for 100 fixed thresholds, ours tests the images' own in sequence"
    return [
        Row(
            f"{what}, risk {100 * risk:g} %, ResNet-{depth}",
            "mapie",
            our_guarantee(risk, temperature=what == "guard"),
            mapie_guarantee(risk),
            columns=f"votes{depth}",
            kind="Guarantees",
            why=why,
        )
        for depth in (20, 56)
        for risk in (0.01, 0.05, 0.1)
        for what in ("accept", "guard")
    ]
