"""Rows of scores: pytorch-ood's detectors, and nearest neighbours."""

from typing import Any

import numpy as np
import torch
from _peers_data import Columns
from _peers_row import Contender, Row, Side, nothing, score

import dubito
from dubito.scores import make_score

FEATURES, BOTH = ("feature",), ("feature", "logit")


def logits_detector(name: str, *, fits: bool = False, **settings: Any) -> Side:
    """One of pytorch-ood's that reads logits."""

    def contender(columns: Columns) -> Contender:
        from pytorch_ood import detector  # noqa: PLC0415

        one, logit = getattr(detector, name)(None, **settings), columns["logit"]
        if not fits:
            return nothing, lambda: one.predict_logits(logit).detach().numpy()
        train, label = columns["train_logit"], columns["train_label"]
        return lambda: one.fit_logits(train, label), lambda: one.predict_logits(logit).detach().numpy()

    return contender


def features_detector(name: str, *, head: bool = False, unit: bool = False, **settings: Any) -> Side:
    """One of pytorch-ood's that reads features, of length one if `unit`, and maybe the last layer."""

    def contender(columns: Columns) -> Contender:
        from pytorch_ood import detector  # noqa: PLC0415

        options = {**settings, "head": columns.head} if head else dict(settings)
        if name == "ViM":
            options |= {"w": columns.head.weight, "b": columns.head.bias, "d": min(512, columns.head.in_features // 2)}
        one = getattr(detector, name)(None, **options)
        train, label, feature = columns["train_feature"], columns["train_label"], columns["feature"]
        if unit:
            normalise = torch.nn.functional.normalize
            return lambda: one.fit_features(normalise(train), label), lambda: one.predict_features(
                normalise(feature)
            ).numpy()
        return lambda: one.fit_features(train, label), lambda: one.predict_features(feature).numpy()

    return contender


def maps_detector(name: str, *, fits: bool = False, **settings: Any) -> Side:
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


def gradient_detector(columns: Columns) -> Contender:
    """Of the last layer's weights, by a gradient for every image."""
    from pytorch_ood.detector import GradNorm  # noqa: PLC0415

    one, feature = GradNorm(columns.head, lambda name: name == "weight").to("cpu"), columns["feature"]
    return nothing, lambda: one.predict(feature).numpy()


def our_layers(columns: Columns) -> Contender:
    """Classical distances (`power=0`), standardised and added up."""
    train = dubito.Table(layers=columns["train_feature"], label=columns["train_label"])
    table = dubito.Table(layers=columns["feature"])
    one = make_score("layer_mahalanobis", power=0.0, widths=widths(columns))
    return lambda: one.fit(train), lambda: one.score(table).numpy()


def their_layers(columns: Columns) -> Contender:
    """Distances added up as they are."""
    from pytorch_ood.detector import MultiMahalanobis  # noqa: PLC0415

    split = widths(columns)
    one = MultiMahalanobis([torch.nn.Identity() for _ in split])
    train, feature = (columns[name].split(split, dim=1) for name in ("train_feature", "feature"))
    label = columns["train_label"]
    return lambda: one.fit_structured(train, label), lambda: one.predict_structured(feature).numpy()


def widths(columns: Columns) -> list[int]:
    """The features as if they were those of four layers."""
    return [columns.head.in_features // 4] * 4


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
    """Its scores are lower for unusual images, so their sign is changed."""
    from cleanlab.outlier import OutOfDistribution  # noqa: PLC0415

    one = OutOfDistribution({"k": 10})
    train, feature = columns["train_feature"].numpy(), columns["feature"].numpy()
    return lambda: one.fit(features=train, verbose=False), lambda: -one.score(features=feature)


def pair(what: str, ours: Side, theirs: Side, share: float = 1, why: str = "", **settings: Any) -> Row:
    """A row against pytorch-ood."""
    return Row(what, "pytorch-ood", ours, theirs, share=share, why=why, **settings)


_LOGIT, _LABELLED, _WIDE = ("logit",), ("feature", "label"), {"fits": BOTH}
_SCALE = "pytorch-ood does not divide the scatter by the number of rows: another scale, the same order"
_FULL = {"covariance": "full", "max_iterations": 0, "regularisation": 1e-6}
SCORES = (
    pair("max_probability", score("max_probability", *_LOGIT), logits_detector("MaxSoftmax")),
    pair(
        "entropy",
        score("entropy", *_LOGIT),
        logits_detector("Entropy"),
        why="pytorch-ood clips probabilities at 1e-7 in float32, which changes the entropies of confident rows",
    ),
    pair("energy", score("energy", *_LOGIT), logits_detector("EnergyBased")),
    pair("max_logit", score("max_logit", *_LOGIT), logits_detector("MaxLogit")),
    pair(
        "temperature",
        score("temperature", *_LOGIT, fits=("logit", "label")),
        logits_detector("TemperatureScaling", fits=True),
        why="pytorch-ood stops after 50 small steps, before it has reached the best temperature",
    ),
    pair(
        "gen",
        score("gen", *_LOGIT),
        logits_detector("GEN", M=100),
        why="pytorch-ood takes the mean over the classes instead of the sum, and clips probabilities at 1e-7",
    ),
    pair("kl_matching", score("kl_matching", *_LOGIT, fits=_LOGIT), logits_detector("KLMatching", fits=True)),
    pair(
        "mahalanobis", score("mahalanobis", *FEATURES, fits=_LABELLED), features_detector("Mahalanobis"), 0.01, _SCALE
    ),
    pair(
        "relative mahalanobis",
        score("mahalanobis", *FEATURES, fits=_LABELLED, relative=True),
        features_detector("RMD"),
        0.01,
        _SCALE,
    ),
    pair(
        "mahalanobis_pp",
        score("mahalanobis_pp", *FEATURES, fits=_LABELLED),
        features_detector("Mahalanobis", unit=True),
        0.01,
        _SCALE,
    ),
    pair("neighbours", score("neighbours", *FEATURES, fits=FEATURES, k=50), features_detector("KNN", k=50), 0.1),
    pair(
        "vim",
        score("vim", *BOTH, **_WIDE),
        features_detector("ViM"),
        why="pytorch-ood's subspace and residuals are in float32",
    ),
    pair("fdbd", score("fdbd", *BOTH, **_WIDE), features_detector("fDBD", head=True)),
    pair("nci", score("nci", *BOTH, **_WIDE, alpha=1e-3), features_detector("NCI", head=True, alpha=1e-3)),
    pair("react", score("react", *FEATURES, **_WIDE), maps_detector("ReAct", fits=True)),
    pair("scale", score("scale", *BOTH, **_WIDE), maps_detector("SCALE", percentile=0.85)),
    pair("ash", score("ash", *FEATURES, **_WIDE), maps_detector("ASH", percentile=0.9)),
    pair(
        "nnguide",
        score("nnguide", *BOTH, **_WIDE, bank_size=None),
        features_detector("NNGuide", head=True),
        0.1,
        "where energies are not positive, ours are those of centred logits",
    ),
    pair("grad_norm", score("grad_norm", *BOTH), gradient_detector, 0.01),
    pair(
        "layer_mahalanobis",
        our_layers,
        their_layers,
        0.01,
        "ours puts the layers on one scale, by images that the Gaussians have not seen",
    ),
    pair("density", score("density", *FEATURES, fits=_LABELLED, **_FULL), features_detector("GMM"), columns="small"),
)
"""Every score that both have."""

_TENTH = score("neighbours", *FEATURES, fits=FEATURES, k=10)
NEIGHBOURS = (
    Row("10th neighbour", "faiss-cpu", _TENTH, faiss_flat, share=0.1, why="faiss rounds small distances to zero"),
    Row(
        "10 neighbours",
        "cleanlab",
        _TENTH,
        cleanlab_outliers,
        share=0.1,
        why="cleanlab averages over the ten neighbours, ours takes the tenth",
    ),
)
"""The tenth neighbour, exactly."""
