"""Rows of scores: pytorch-ood's detectors, and nearest neighbours."""

from typing import Any

import numpy as np
import torch
from _peers_data import Columns
from _peers_row import Contender, Row, Side, nothing, score

import dubito
from dubito.scores import make_score

FEATURES, BOTH = ("feature",), ("feature", "logit")
OOD = "pytorch-ood"


def logits_detector(name: str, *, fits: bool = False, **settings: Any) -> Side:
    """One of pytorch-ood's that reads logits."""

    def contender(columns: Columns) -> Contender:
        from pytorch_ood import detector  # noqa: PLC0415

        one, logit = getattr(detector, name)(None, **settings), columns["logit"]
        if not fits:
            return nothing, lambda: one.predict_logits(logit).numpy()
        train, label = columns["train_logit"], columns["train_label"]
        return lambda: one.fit_logits(train, label), lambda: one.predict_logits(logit).numpy()

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
    """Lower scores are stranger there."""
    from cleanlab.outlier import OutOfDistribution  # noqa: PLC0415

    one = OutOfDistribution({"k": 10})
    train, feature = columns["train_feature"].numpy(), columns["feature"].numpy()
    return lambda: one.fit(features=train, verbose=False), lambda: -one.score(features=feature)


def score_rows() -> list[Row]:
    """Every score that both have."""
    logit, wide = ("logit",), {"fits": BOTH}
    of = features_detector
    pairs: list[tuple[str, Side, Side, float, str]] = [
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
        (
            "mahalanobis_pp",
            score("mahalanobis_pp", *FEATURES, fits=("feature", "label")),
            of("Mahalanobis", unit=True),
            0.01,
            "pytorch-ood does not divide the scatter by the number of rows: another scale, the same order",
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
    rows = [Row(what, OOD, ours, theirs, share=share, why=why) for what, ours, theirs, share, why in pairs]
    full = {"covariance": "full", "max_iterations": 0, "regularisation": 1e-6}
    return [
        *rows,
        Row("grad_norm", OOD, score("grad_norm", *BOTH), gradient_detector, share=0.01),
        Row(
            "layer_mahalanobis",
            OOD,
            our_layers,
            their_layers,
            share=0.01,
            why="ours puts the layers on one scale, by images that the Gaussians have not seen",
        ),
        Row(
            "density",
            OOD,
            score("density", *FEATURES, fits=("feature", "label"), **full),
            of("GMM"),
            columns="small",
        ),
    ]


def neighbour_rows() -> list[Row]:
    """The tenth neighbour, exactly."""
    ours = score("neighbours", *FEATURES, fits=FEATURES, k=10)
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
    ]
