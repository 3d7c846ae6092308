"""Rows of prediction sets and guarantees: TorchCP's and MAPIE's."""

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import abstention
import numpy as np
import torch
from _peers_data import Columns
from _peers_row import Contender, Row, Side, nothing

import dubito
from dubito.errors import GuardError
from dubito.guard.conformal import PredictionSets
from dubito.guard.set_scores import FREE_RANKS, PENALTY

COVERAGE = 0.9
CONFIDENCE = 0.95
ALLOWED = 1 - CONFIDENCE
"""The share of draws in which a guarantee may be broken."""
LARGE_RISK = 0.05
DRAWS, DRAWN = 500, 1000
"""Calibration sets, and images of each."""
GRID = np.concatenate([1 - np.logspace(-6, -2, 100), np.linspace(0.98, 0, 99)])
"""Thresholds that MAPIE tests in sequence."""
Accepted = Callable[[np.ndarray], np.ndarray]
"""Which images of the population are accepted, by the rows that a calibration set consists of."""


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
        if "torchcp" not in sys.modules and (spec := importlib.util.find_spec("torchcp")) is not None:
            sys.modules["torchcp"] = importlib.util.module_from_spec(spec)
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


def uncertainty_sets(name: str, **settings: Any) -> Side:
    """torch-uncertainty's, without a temperature, as the others."""

    def contender(columns: Columns) -> Contender:
        from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415
        from torch_uncertainty import post_processing  # noqa: PLC0415

        make = getattr(post_processing, f"ConformalCls{name}")
        one = make(alpha=1 - COVERAGE, model=torch.nn.Identity(), enable_ts=False, **settings)
        loader = DataLoader(TensorDataset(columns["train_logit"], columns["train_label"]), batch_size=2048)
        logit, label = columns["logit"], columns["label"]
        return lambda: one.fit(loader), lambda: {"inside": one(logit) > 0, "label": label}

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
                """Nothing is learned."""
                return self

            def __sklearn_is_fitted__(self) -> bool:
                return True

            def predict_proba(self, x: np.ndarray) -> np.ndarray:
                """In float64, so that rows sum to one."""
                return np.asarray(torch.from_numpy(x).double().softmax(1))

            def predict(self, x: np.ndarray) -> np.ndarray:
                """The most likely class."""
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

    def measured(self, accepted: Accepted, risk: float) -> dict[str, float]:
        """The share of draws with more errors than the risk, and the mean share of images that is accepted."""
        wrong = self.logit.argmax(1) != self.label
        broken, coverage = 0, 0.0
        for seed in range(self.draws):
            inside = accepted(np.random.default_rng(seed).integers(len(wrong), size=self.rows))
            broken += bool(inside.any() and wrong[inside].mean() > risk)
            coverage += float(inside.mean())
        return {"violations": broken / self.draws, "kept_coverage": coverage / self.draws}


def drawn(risk: float, procedure: Callable[[np.ndarray, np.ndarray, float], Accepted]) -> Side:
    """Violations and coverage of a procedure, which gets the logits and labels of the population, and the risk."""

    def contender(columns: Columns) -> Contender:
        logit, label = columns["train_logit"].numpy(), columns["noisy_label"].numpy()
        accepted = procedure(logit, label, risk)
        return nothing, lambda: Draws(logit, label).measured(accepted, risk)

    return contender


def our_threshold(logit: np.ndarray, label: np.ndarray, risk: float) -> Accepted:
    """The test behind `Guard.fit`, of max-probabilities."""
    p, wrong = abstention.probabilities(logit), logit.argmax(1) != label
    return lambda rows: np.asarray(p >= -abstention.ours(-p[rows], wrong[rows], risk, CONFIDENCE))


def our_guard(logit: np.ndarray, label: np.ndarray, risk: float) -> Accepted:
    """`Guard.fit` with its defaults, which decides on the whole population."""
    table = dubito.Table(logit=torch.from_numpy(logit), label=torch.from_numpy(label))

    def accepted(rows: np.ndarray) -> np.ndarray:
        calibration = table.rows(torch.from_numpy(rows))
        try:
            guard = dubito.Guard.fit(None, calibration, risk=risk, confidence=CONFIDENCE, sets=False)
        except GuardError:
            return np.zeros(len(table), dtype=bool)
        return guard.decide(table).accept.numpy()

    return accepted


def mapie_threshold(logit: np.ndarray, label: np.ndarray, risk: float) -> Accepted:
    """By default: 100 thresholds, with Holm's correction."""
    return controlled(logit, label, risk)


def mapie_sequence(logit: np.ndarray, label: np.ndarray, risk: float) -> Accepted:
    """From the strictest threshold on, without a correction, on the finer grid."""
    return controlled(logit, label, risk, fwer_method="fixed_sequence", list_predict_params=GRID)


def controlled(logit: np.ndarray, label: np.ndarray, risk: float, **settings: Any) -> Accepted:
    """One risk for all classes: where it does not abstain, the prediction is right."""
    p = torch.from_numpy(logit).double().softmax(1).numpy()
    most = p.max(1)
    return lambda rows: np.asarray(most >= lowest(p[rows], label[rows], risk, **settings))


def lowest(p: np.ndarray, label: np.ndarray, risk: float, **settings: Any) -> float:
    """MAPIE's lowest valid threshold; infinity where there is none."""
    from mapie.risk_control import BinaryRisk, MultiClassificationLTTController  # noqa: PLC0415

    right = BinaryRisk(
        risk_occurrence=lambda label, predicted: predicted.ravel() == label.ravel(),
        risk_condition=lambda _, predicted: ~np.isnan(predicted.ravel()),
        higher_is_better=True,
    )
    one = MultiClassificationLTTController(
        lambda x: x, [right], [1 - risk], confidence_level=CONFIDENCE, classes=np.arange(p.shape[1]), **settings
    )
    one.calibrate(p, label)
    valid = np.asarray(one.valid_predict_params)
    return float(valid.min()) if len(valid) else np.inf


def our_large_guard(columns: Columns) -> Contender:
    """`Guard.fit`, and its decisions about other images."""
    train, table, label = columns.train("logit", "label"), columns.test("logit"), columns["label"]
    guards: list[dubito.Guard] = []

    def decided() -> dict[str, float]:
        return kept(guards[0].decide(table).accept, columns["logit"], label)

    return lambda: guards.append(dubito.Guard.fit(None, train, risk=LARGE_RISK, sets=False)), decided


def mapie_large_guard(columns: Columns) -> Contender:
    """MAPIE in sequence, and its decisions about other images."""
    train, train_label = columns["train_logit"], columns["train_label"].numpy()
    logit, label = columns["logit"], columns["label"]
    thresholds: list[float] = []
    settings = {"fwer_method": "fixed_sequence", "list_predict_params": GRID}

    def fit() -> None:
        thresholds.append(lowest(train.double().softmax(1).numpy(), train_label, LARGE_RISK, **settings))

    def decided() -> dict[str, float]:
        return kept(logit.double().softmax(1).max(1).values >= thresholds[0], logit, label)

    return fit, decided


def kept(accept: torch.Tensor, logit: torch.Tensor, label: torch.Tensor) -> dict[str, float]:
    """The share of images that is accepted, and how many of these are wrong."""
    wrong = logit.argmax(1) != label
    return {"kept_coverage": float(accept.double().mean()), "error": float(wrong[accept].double().mean())}


def sets_rows() -> Iterator[Row]:
    """Prediction sets of coverage 0.9."""
    rounded = "from float32 probabilities, the peer's quantile is rounded"
    top = "the most likely class of ours scores 0, so that certain images do not raise the quantile"
    lots = "the peer draws lots at the boundary"
    penalty = "the peer chooses the penalty on a fifth of the images, and draws lots at the boundary"
    quantile = (
        "the peer interpolates the quantile, without the correction for few images, and adds the most likely class"
    )
    raps, saps = {"penalty": PENALTY["raps"], "kreg": FREE_RANKS}, {"weight": PENALTY["saps"]}
    plain = {"randomized": False}
    for what, peer, ours, theirs, why in (
        ("lac", "torchcp", our_sets("lac"), torchcp_sets("LAC"), rounded),
        ("aps", "torchcp", our_sets("aps"), torchcp_sets("APS", **plain), top),
        ("raps", "torchcp", our_sets("raps"), torchcp_sets("RAPS", **plain, **raps), top),
        # Without drawing at the boundary, its calibration scores are others.
        ("saps", "torchcp", our_sets("saps"), torchcp_sets("SAPS", **saps), lots),
        ("lac", "mapie", our_sets("lac"), mapie_sets("lac"), ""),
        ("aps", "mapie", our_sets("aps"), mapie_sets("aps"), lots),
        ("raps", "mapie", our_sets("raps"), mapie_sets("raps"), penalty),
        ("lac", "torch-uncertainty", our_sets("lac"), uncertainty_sets("THR"), quantile),
        ("aps", "torch-uncertainty", our_sets("aps"), uncertainty_sets("APS", **plain), top),
        (
            "lac of every class",
            "torchcp",
            our_sets("lac", class_wise=True),
            torchcp_sets("LAC", "ClassConditionalPredictor"),
            rounded,
        ),
        (
            "lac of clusters of classes",
            "torchcp",
            our_sets("lac", clusters=10),
            torchcp_sets("LAC", "ClusteredPredictor"),
            "the peer chooses how many clusters, and which images make them, by lot",
        ),
    ):
        yield Row(f"sets, {what}", peer, ours, theirs, kind="Prediction sets", why=why)


def guarantee_rows() -> Iterator[Row]:
    """At three risks, for three networks; and the time of a guard of a thousand classes."""
    fixed = "MAPIE corrects for 100 fixed thresholds, ours tests the images' own in sequence"
    tested = "MAPIE tests fixed thresholds, ours the images' own"
    more = "a guard also selects a score, and compares images with those of its calibration"
    for columns, network in {"votes20": "ResNet-20", "votes56": "ResNet-56", "photos": "EfficientNet-Lite0"}.items():
        for risk in (0.01, 0.05, 0.1):
            ours, guard, place = drawn(risk, our_threshold), drawn(risk, our_guard), f"{100 * risk:g} %, {network}"
            peers, sequence = drawn(risk, mapie_threshold), drawn(risk, mapie_sequence)
            shown = {"columns": columns, "kind": "Guarantees"}
            yield Row(f"threshold, risk {place}", "mapie", ours, peers, why=fixed, **shown)
            yield Row(f"threshold, risk {place}, sequence", "mapie", ours, sequence, why=tested, **shown)
            if columns != "photos":  # 500 guards of a thousand classes take minutes
                yield Row(
                    f"guard, risk {place}, sequence", "mapie", guard, sequence, why=more, same_work=False, **shown
                )
    yield Row(
        "guard of a thousand classes",
        "mapie",
        our_large_guard,
        mapie_large_guard,
        kind="Guarantees",
        why=more,
        same_work=False,
    )
