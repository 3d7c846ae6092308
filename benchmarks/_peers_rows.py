"""What benchmarks/peers.py compares: for every row, the same thing computed by dubito and by a peer.

A contender takes the columns and returns what is timed: a function that fits, and one that scores, which returns an
array with one number per row, or figures by name. What it does before is not timed.
"""

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

import dubito
from dubito import metrics
from dubito.calibration import VennAbers
from dubito.guard.conformal import PredictionSets
from dubito.guard.set_scores import FREE_RANKS, PENALTY
from dubito.scores import make_score

Contender = tuple[Callable[[], object], Callable[[], Any]]
COVERAGE = 0.9
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Row:
    """One thing that two libraries do.

    Attributes:
        what: The thing.
        peer: The other library, as PyPI calls it.
        ours: What dubito does.
        theirs: What the peer does.
        share: Which share of the rows is scored, where the peer could not score them all.
        columns: Which data: "large", "small" (10 classes) or "votes20", "votes56".
        why: Why answers differ, where they do.
    """

    what: str
    peer: str
    ours: Callable[[Columns], Contender]
    theirs: Callable[[Columns], Contender]
    share: float = 1
    columns: str = "large"
    why: str = ""

    @property
    def name(self) -> str:
        """One for each."""
        return f"{self.what} ({self.peer})"


def nothing() -> None:
    """For what has nothing to fit."""


# Scores against pytorch-ood.


def score(name: str, *needs: str, fits: tuple[str, ...] = (), **settings: Any) -> Callable[[Columns], Contender]:
    """A registered score of ours."""

    def contender(columns: Columns) -> Contender:
        one, table = make_score(name, **settings), columns.test(*needs)
        train = columns.train(*fits) if fits else None
        return (lambda: one.fit(train)) if train is not None else nothing, lambda: one.score(table).numpy()

    return contender


def logits_detector(name: str, *, fits: bool = False, **settings: Any) -> Callable[[Columns], Contender]:
    """One of pytorch-ood's that reads logits."""

    def contender(columns: Columns) -> Contender:
        from pytorch_ood import detector  # noqa: PLC0415

        one, logit = getattr(detector, name)(None, **settings), columns["logit"]
        if not fits:
            return nothing, lambda: one.predict_logits(logit).numpy()
        train, label = columns["train_logit"], columns["train_label"]
        return lambda: one.fit_logits(train, label), lambda: one.predict_logits(logit).numpy()

    return contender


def features_detector(name: str, *, head: bool = False, **settings: Any) -> Callable[[Columns], Contender]:
    """One of pytorch-ood's that reads features, and maybe the last layer."""

    def contender(columns: Columns) -> Contender:
        from pytorch_ood import detector  # noqa: PLC0415

        given = {**settings, "head": columns.head} if head else dict(settings)
        if name == "ViM":
            given |= {"w": columns.head.weight, "b": columns.head.bias, "d": min(512, columns.head.in_features // 2)}
        one = getattr(detector, name)(None, **given)
        train, label, feature = columns["train_feature"], columns["train_label"], columns["feature"]
        return lambda: one.fit_features(train, label), lambda: one.predict_features(feature).numpy()

    return contender


def maps_detector(name: str, *, fits: bool = False, **settings: Any) -> Callable[[Columns], Contender]:
    """One of pytorch-ood's that reads feature maps: of one place, which are features."""

    def contender(columns: Columns) -> Contender:
        from pytorch_ood import detector  # noqa: PLC0415

        layer = columns.head
        one = getattr(detector, name)(None, lambda maps: layer(maps.flatten(1)), **settings)
        maps = columns["feature"][..., None, None]
        predict = lambda: one.predict_feature_maps(maps).numpy()  # noqa: E731
        if not fits:
            return nothing, predict
        train, label = columns["train_feature"][..., None, None], columns["train_label"]
        return lambda: one.fit_feature_maps(train, label), predict

    return contender


# Metrics.


def figure(function: Callable[..., float], *names: str) -> Callable[[Columns], Contender]:
    """One number from columns."""

    def contender(columns: Columns) -> Contender:
        values = [columns[name] for name in names]
        return nothing, lambda: {"value": float(function(*values))}

    return contender


def sklearn_metric(name: str) -> Callable[[Columns], Contender]:
    """One of scikit-learn's, of scores and positives."""

    def contender(columns: Columns) -> Contender:
        from sklearn import metrics as theirs  # noqa: PLC0415

        u, positive = columns["million_score"].numpy(), columns["million_positive"].numpy()
        return nothing, lambda: {"value": float(getattr(theirs, name)(positive, u))}

    return contender


def torchmetrics_metric(name: str) -> Callable[[Columns], Contender]:
    """One of torchmetrics', of scores and positives."""

    def contender(columns: Columns) -> Contender:
        from torchmetrics.functional import classification as theirs  # noqa: PLC0415

        u, positive = columns["million_score"], columns["million_positive"].int()
        return nothing, lambda: {"value": float(getattr(theirs, name)(u, positive))}

    return contender


def torchmetrics_ece(columns: Columns) -> Contender:
    """Of probabilities, which are made from logits first."""
    from torchmetrics.functional.classification import multiclass_calibration_error  # noqa: PLC0415

    logit, label = columns["logit"], columns["label"]

    def measured() -> dict[str, float]:
        p = logit.softmax(1)
        return {"value": float(multiclass_calibration_error(p, label, num_classes=p.shape[1], n_bins=15))}

    return nothing, measured


def uncertainty_metric(
    name: str, *names: str, softmax: bool = False, **settings: Any
) -> Callable[[Columns], Contender]:
    """One of torch-uncertainty's, fed once."""

    def contender(columns: Columns) -> Contender:
        from torch_uncertainty.metrics import classification as theirs  # noqa: PLC0415

        values = [columns[one] for one in names]
        given = {key: (values[0].shape[1] if value == "classes" else value) for key, value in settings.items()}

        def measured() -> dict[str, float]:
            one = getattr(theirs, name)(**given)
            first = values[0].softmax(1) if softmax else values[0]
            one.update(first, *(value.int() if value.dtype == torch.bool else value for value in values[1:]))
            return {"value": float(one.compute())}

        return nothing, measured

    return contender


def curve(function: Callable[..., float]) -> Callable[[Columns], Contender]:
    """An area of ours, of logits and labels."""

    def contender(columns: Columns) -> Contender:
        table, logit, label = columns.test("logit"), columns["logit"], columns["label"]
        most = make_score("max_probability")
        return nothing, lambda: {"value": function(most.score(table), ~metrics.correct(logit, label))}

    return contender


def our_ece(logit: torch.Tensor, label: torch.Tensor) -> float:
    """From logits."""
    return metrics.ece(metrics.confidence(logit), metrics.correct(logit, label))


# Nearest neighbours.


def faiss_flat(columns: Columns) -> Contender:
    """The bare index, on normalised features."""
    import faiss  # noqa: PLC0415

    train, feature = (torch.nn.functional.normalize(columns[name]).numpy() for name in ("train_feature", "feature"))
    index = faiss.IndexFlatIP(train.shape[1])

    def distances() -> np.ndarray:
        similarity, _ = index.search(feature, 10)
        return np.sqrt(np.maximum(2 - 2 * similarity[:, -1], 0))

    return lambda: index.add(train), distances


def cleanlab_outliers(columns: Columns) -> Contender:
    """Lower scores are stranger there."""
    from cleanlab.outlier import OutOfDistribution  # noqa: PLC0415

    one = OutOfDistribution({"k": 10})
    train, feature = columns["train_feature"].numpy(), columns["feature"].numpy()
    return lambda: one.fit(features=train, verbose=False), lambda: -one.score(features=feature)


# Label issues.


def label_issues(columns: Columns) -> Contender:
    """Flags, and a ranking of all labels that is not timed."""
    table = dubito.Table(logit=columns["train_logit"], label=columns["noisy_label"])
    wrong = columns["wrong"].numpy()

    def found() -> dict[str, Any]:
        return {"rows": dubito.find_label_issues(table).rows, "wrong": wrong, "rank": ranked}

    def ranked() -> np.ndarray:
        probability = np.zeros(len(wrong))
        everything = dubito.find_label_issues(table, least=1e-300)
        probability[everything.rows] = everything.probability
        return probability

    return nothing, found


def confident_learning(columns: Columns) -> Contender:
    """In one process: those of its own take longer to start. From logits, as ours."""
    from cleanlab.filter import find_label_issues  # noqa: PLC0415
    from cleanlab.rank import get_label_quality_scores  # noqa: PLC0415

    logit = columns["train_logit"]
    label, wrong = columns["noisy_label"].numpy(), columns["wrong"].numpy()

    def found() -> dict[str, Any]:
        p = logit.softmax(1).numpy()
        rows = np.flatnonzero(find_label_issues(label, p, n_jobs=1))
        return {"rows": rows, "wrong": wrong, "rank": lambda: -get_label_quality_scores(label, p)}

    return nothing, found


# Prediction sets.


def our_sets(method: str) -> Callable[[Columns], Contender]:
    """Calibrated on one table, of another."""

    def contender(columns: Columns) -> Contender:
        sets = PredictionSets(COVERAGE, method)  # type: ignore[arg-type]
        train, table, label = columns.train("logit", "label"), columns.test("logit"), columns["label"]
        return lambda: sets.fit(train), lambda: {"inside": sets.sets(table), "label": label}

    return contender


def torchcp_sets(name: str, **settings: Any) -> Callable[[Columns], Contender]:
    """Calibrated on logits."""

    def contender(columns: Columns) -> Contender:
        # The package imports graphs and language models, and a loss that needs torchsort, which must be compiled;
        # prediction sets need none of them.
        if "torchcp" not in sys.modules and (found := importlib.util.find_spec("torchcp")) is not None:
            sys.modules["torchcp"] = importlib.util.module_from_spec(found)
        sys.modules["torchsort"] = types.SimpleNamespace(soft_rank=None, soft_sort=None)  # type: ignore[assignment]
        from torchcp.classification import score as scores  # noqa: PLC0415
        from torchcp.classification.predictor import SplitPredictor  # noqa: PLC0415

        one = SplitPredictor(getattr(scores, name)(**settings), alpha=1 - COVERAGE)
        train, train_label = columns["train_logit"], columns["train_label"]
        logit, label = columns["logit"], columns["label"]
        return (
            lambda: one.calculate_threshold(train, train_label, 1 - COVERAGE),
            lambda: {"inside": one.predict_with_logits(logit), "label": label},
        )

    return contender


def mapie_sets(name: str) -> Callable[[Columns], Contender]:
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


# A guarantee for what is accepted.


@dataclass(frozen=True)
class Draws:
    """Calibration sets, drawn with replacement from labelled images, which are the population (`abstention.py`)."""

    logit: np.ndarray
    label: np.ndarray
    draws: int = 500
    rows: int = 1000

    def measured(self, accepted: Callable[[np.ndarray], np.ndarray], risk: float) -> dict[str, float]:
        """The share of draws with more errors than the risk, and the mean share of images that is accepted."""
        wrong = self.logit.argmax(1) != self.label
        broken, coverage = 0, 0.0
        for seed in range(self.draws):
            inside = accepted(np.random.default_rng(seed).integers(len(wrong), size=self.rows))
            broken += bool(inside.any() and wrong[inside].mean() > risk)
            coverage += float(inside.mean())
        return {"violations": broken / self.draws, "coverage": coverage / self.draws}


def our_guarantee(risk: float, *, temperature: bool = False) -> Callable[[Columns], Contender]:
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


def mapie_guarantee(risk: float) -> Callable[[Columns], Contender]:
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


# Temperature scaling, Venn-Abers, and the Laplace approximation of the last layer.


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
        for block in feature.split(2048):
            jacobians, logits = one.backend.jacobians(block)
            p, covariance = logits.double().softmax(1), one.functional_variance(jacobians).double()
            spread = (p * covariance.diagonal(dim1=1, dim2=2)).sum(1)
            parts.append((spread - torch.einsum("nc,nck,nk->n", p, covariance, p)) / 2)
        return torch.cat(parts).detach().numpy()

    return fit, information


FEATURES, BOTH = ("feature",), ("feature", "logit")
OOD = "pytorch-ood"


def score_rows() -> list[Row]:
    """Every score that both have."""
    logit, wide = ("logit",), {"fits": BOTH}
    of = features_detector
    pairs: list[tuple[str, Callable[[Columns], Contender], Callable[[Columns], Contender], float, str]] = [
        ("max_probability", score("max_probability", *logit), logits_detector("MaxSoftmax"), 1, ""),
        (
            "entropy",
            score("entropy", *logit),
            logits_detector("Entropy"),
            1,
            "pytorch-ood clips probabilities at 1e-7 in float32, which changes the entropies of confident rows",
        ),
        ("energy", score("energy", *logit), logits_detector("EnergyBased"), 1, ""),
        ("max_logit", score("max_logit", *logit), logits_detector("MaxLogit"), 1, ""),
        (
            "gen",
            score("gen", *logit),
            logits_detector("GEN", M=100),
            1,
            "pytorch-ood takes the mean over the classes instead of the sum, and clips probabilities at 1e-7",
        ),
        ("kl_matching", score("kl_matching", *logit, fits=logit), logits_detector("KLMatching", fits=True), 1, ""),
        (
            "mahalanobis",
            score("mahalanobis", *FEATURES, fits=("feature", "label")),
            of("Mahalanobis"),
            0.01,
            "pytorch-ood does not divide the scatter by the number of rows: another scale, the same order",
        ),
        (
            "relative mahalanobis",
            score("mahalanobis", *FEATURES, fits=("feature", "label"), relative=True),
            of("RMD"),
            0.01,
            "pytorch-ood does not divide the scatters by the number of rows: another scale, the same order",
        ),
        ("neighbours", score("neighbours", *FEATURES, fits=FEATURES, k=50), of("KNN", k=50), 0.1, ""),
        ("vim", score("vim", *BOTH, **wide), of("ViM"), 1, ""),
        ("fdbd", score("fdbd", *BOTH, **wide), of("fDBD", head=True), 1, ""),
        ("nci", score("nci", *BOTH, **wide, alpha=1e-3), of("NCI", head=True, alpha=1e-3), 1, ""),
        ("react", score("react", *FEATURES, **wide), maps_detector("ReAct", fits=True), 1, ""),
        ("scale", score("scale", *BOTH, **wide), maps_detector("SCALE", percentile=0.85), 1, ""),
        ("ash", score("ash", *FEATURES, **wide), maps_detector("ASH", percentile=0.9), 1, ""),
        (
            "nnguide",
            score("nnguide", *BOTH, **wide, bank_size=None),
            of("NNGuide", head=True),
            0.1,
            "where energies are not positive, ours are those of centred logits",
        ),
    ]
    return [Row(what, OOD, ours, theirs, share=share, why=why) for what, ours, theirs, share, why in pairs]


def metric_rows() -> list[Row]:
    """On a million scores, or on logits."""
    million = ("million_score", "million_positive")
    tu, both = "torch-uncertainty", ("logit", "label")
    per_class = {"num_classes": "classes"}
    return [
        Row("AUROC", "scikit-learn", figure(metrics.auroc, *million), sklearn_metric("roc_auc_score")),
        Row("AUROC", "torchmetrics", figure(metrics.auroc, *million), torchmetrics_metric("binary_auroc")),
        Row(
            "average precision",
            "scikit-learn",
            figure(metrics.average_precision, *million),
            sklearn_metric("average_precision_score"),
        ),
        Row(
            "average precision",
            "torchmetrics",
            figure(metrics.average_precision, *million),
            torchmetrics_metric("binary_average_precision"),
        ),
        Row(
            "FPR at 95 % TPR",
            tu,
            figure(metrics.fpr_at_tpr, *million),
            uncertainty_metric("FPR95", *million, pos_label=1),
            why="the peer takes the threshold whose TPR is nearest to 95 %, ours the first that reaches it",
        ),
        Row(
            "AURC",
            tu,
            curve(metrics.aurc),
            uncertainty_metric("AURC", *both, softmax=True),
            why="the peer integrates by trapezoids, and leaves tied rows in the order that they happen to have",
        ),
        Row(
            "AUGRC",
            tu,
            curve(metrics.augrc),
            uncertainty_metric("AUGRC", *both, softmax=True),
            why="the peer starts its trapezoids at the first row, and leaves tied rows in the order that they have",
        ),
        Row("ECE", "torchmetrics", figure(our_ece, *both), torchmetrics_ece),
        Row(
            "Brier",
            tu,
            figure(metrics.brier, *both),
            uncertainty_metric("BrierScore", *both, softmax=True, **per_class),
        ),
        Row("NLL", tu, figure(metrics.nll, *both), uncertainty_metric("CategoricalNLL", *both, softmax=True)),
    ]


def other_rows() -> list[Row]:
    """Neighbours, label issues, sets, guarantees, temperature, Laplace."""
    ours = score("neighbours", *FEATURES, fits=FEATURES, k=10)
    float32 = "from float32 probabilities, the peer's quantile is rounded"
    empty = "the peer's sets lack the most likely class where it is certain; ours never do"
    return [
        Row("10th neighbour", "faiss-cpu", ours, faiss_flat, share=0.1, why="faiss rounds small distances to zero"),
        Row(
            "10 neighbours",
            "cleanlab",
            ours,
            cleanlab_outliers,
            share=0.1,
            why="cleanlab averages over the ten neighbours, ours takes the tenth",
        ),
        Row("label issues, many classes", "cleanlab", label_issues, confident_learning),
        Row("label issues, 10 classes", "cleanlab", label_issues, confident_learning, columns="small"),
        Row("label issues, CIFAR-10H, ResNet-20", "cleanlab", label_issues, confident_learning, columns="votes20"),
        Row("label issues, CIFAR-10H, ResNet-56", "cleanlab", label_issues, confident_learning, columns="votes56"),
        Row("sets, lac", "torchcp", our_sets("lac"), torchcp_sets("LAC"), why=float32),
        Row("sets, aps", "torchcp", our_sets("aps"), torchcp_sets("APS", randomized=False), why=empty),
        Row(
            "sets, raps",
            "torchcp",
            our_sets("raps"),
            torchcp_sets("RAPS", penalty=PENALTY["raps"], kreg=FREE_RANKS, randomized=False),
            why=empty,
        ),
        Row(
            "sets, saps",
            "torchcp",
            our_sets("saps"),
            torchcp_sets("SAPS", weight=PENALTY["saps"]),  # without lots, its calibration scores are others
            why="the peer draws lots at the boundary",
        ),
        Row("sets, lac", "mapie", our_sets("lac"), mapie_sets("lac")),
        Row("sets, aps", "mapie", our_sets("aps"), mapie_sets("aps"), why="MAPIE draws lots at the boundary"),
        *guarantee_rows(),
        Row("temperature", "torch-uncertainty", our_temperature, their_temperature),
        Row("Venn-Abers", "venn-abers", our_venn_abers, their_venn_abers),
        Row(
            "last-layer Laplace",
            "laplace-torch",
            score("laplace", *BOTH, fits=BOTH),
            their_laplace,
            columns="small",
            why="the peer makes the biases a block of their own; ours recovers the last layer from the columns",
        ),
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
            why=why,
        )
        for depth in (20, 56)
        for risk in (0.01, 0.05, 0.1)
        for what in ("accept", "guard")
    ]


def rows() -> list[Row]:
    """All of them."""
    return [*score_rows(), *metric_rows(), *other_rows()]
