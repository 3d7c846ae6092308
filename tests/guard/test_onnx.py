"""The exported graph against PyTorch: logits, uncertainty and acceptance, for batches of any size."""

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ArtefactError, GuardError
from dubito.guard import Guard
from dubito.guard.combination import Combination, quantiles
from dubito.guard.onnx import WRITABLE, GuardModule, as_graph
from dubito.guard.thresholds import NO_LIMIT
from dubito.models.wrap import WrappedClassifier
from dubito.scores import (
    ASH,
    DEUP,
    FDBD,
    GEN,
    NCI,
    SCALE,
    VBLL,
    Density,
    Energy,
    Entropy,
    GradNorm,
    KLMatching,
    Laplace,
    LastLayerGradient,
    Mahalanobis,
    MahalanobisPP,
    Margin,
    MaxLogit,
    MaxProbability,
    MentalModel,
    Neighbours,
    NNGuide,
    Prototypes,
    ReAct,
    REGrad,
    Residual,
    ScaledEntropy,
    Temperature,
    ViM,
)
from dubito.table import Table
from dubito.types import Score

from .world import inputs, labelled, network

pytestmark = pytest.mark.usefixtures("one_thread")

WRITTEN = [
    MaxProbability(),
    Entropy(),
    ScaledEntropy(0.3),
    Margin(),
    MaxLogit(),
    Energy(2.0),
    Temperature(Entropy()),
    GradNorm(),
    GradNorm(bias=True),
    LastLayerGradient("root"),
    MentalModel(),
    Mahalanobis(),
    Mahalanobis(relative=True),
    MahalanobisPP(),
    MahalanobisPP(0.5, relative=True),
    Prototypes(),
    NNGuide(k=3),
    Laplace(),
    Laplace("diagonal"),
    VBLL(epochs=60),
    DEUP(width=4, depth=1, recipe=dubito.heads.Recipe(loss="log_l2", rows=2000)),
    DEUP(["density"], "entropy", width=4, depth=1, recipe=dubito.heads.Recipe(loss="l2", rows=2000)),
    Neighbours(k=3),
    GEN(top=3),
    KLMatching(),
    Residual(),
    ViM(alpha=2.0),
    FDBD(),
    NCI(),
    ReAct(),
    SCALE(),
    ASH(0.5),
    Density(2, start="free"),
    Density(2, "tied", start="free"),
    Density(2, "diagonal", "log", start="free"),
    dubito.UncertaintyHead(width=4, depth=1, recipe=dubito.heads.Recipe(rows=2000)),
]


class AllScores(nn.Module):
    """Features and logits to one output per score."""

    def __init__(self, scores: list[Score]) -> None:
        super().__init__()
        owners = nn.ModuleList(nn.Module() for _ in scores)  # each may add networks of its own
        self.owners = owners
        self.written = [as_graph(one.name, one, owner) for one, owner in zip(scores, owners, strict=True)]

    def forward(self, z: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one(z, logits) for one in self.written)


@pytest.fixture(scope="module")
def model() -> WrappedClassifier:
    return network()


@pytest.fixture(scope="module")
def table(model: WrappedClassifier, tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("onnx") / "cache"
    table = labelled(dubito.extract(model, inputs(500), folder, workers=0, progress=False))
    return table.extended(loss=dubito.metrics.nll_per_row(table.logit, table.label))


@pytest.mark.parametrize("score", WRITTEN, ids=lambda score: f"{score.name}-{getattr(score, 'covariance', '')}")
def test_every_score_that_can_be_written_is_the_same(model: WrappedClassifier, table: Table, score: Score) -> None:
    guard = Guard.fit(model, table, coverage=0.7, scores={"one": score})
    x = inputs(40, seed=5)
    logits, u, accept, z, weight, bias = GuardModule(guard, x)(x)
    result = guard(x)
    assert logits.numpy() == pytest.approx(guard.predict(x).logit.numpy(), abs=1e-5)
    assert u.detach().numpy() == pytest.approx(result.uncertainty.numpy(), abs=1e-4)
    assert torch.equal(accept, result.accept)
    assert 0 < int(accept.sum()) < 40
    assert torch.equal(logits, nn.functional.linear(z, weight, bias))


def test_the_list_of_scores_that_can_be_written_is_complete() -> None:
    assert {score.name for score in WRITTEN} == set(WRITABLE)


def test_every_score_that_can_be_written_runs_in_onnxruntime(table: Table, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    fitted = [copy.deepcopy(score).fit(table) for score in WRITTEN]
    sizes = ({0: torch.export.Dim("n")},) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        example = (table.feature[:2], table.logit[:2])
        graph = torch.export.export(AllScores(fitted), example, dynamic_shapes=sizes, strict=False)
        program = torch.onnx.export(graph, input_names=["z", "logits"], dynamic_shapes=sizes, verbose=False)
    program.save(tmp_path / "scores.onnx")
    session = runtime.InferenceSession(str(tmp_path / "scores.onnx"))
    dead = Table(feature=torch.zeros(1, 8), logit=table.logit[:1])  # no unit answers: a feature without a direction
    for rows in (table, table.rows(slice(3, 4)), dead):
        outputs = session.run(None, {"z": rows.feature.numpy(), "logits": rows.logit.numpy()})
        for score, u in zip(fitted, outputs, strict=True):
            expected = score.score(rows).numpy()
            assert u.dtype == np.float64
            assert u == pytest.approx(expected, rel=1e-5, abs=1e-5 * np.abs(expected).mean()), score


def test_the_file_agrees_with_pytorch(model: WrappedClassifier, table: Table, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    guard = Guard.fit(model, table, risk=0.2)
    # Several scores and the gate.
    others = (MaxProbability(), GradNorm(), Mahalanobis().fit(table), MentalModel().fit(table), Neighbours().fit(table))
    guard.selection.scores |= {score.name: score for score in others}
    guard.selection.reference_quantiles = {
        name: quantiles(score.score(table), name) for name, score in guard.selection.scores.items()
    }
    guard.selection.combination = Combination({"density": 0.2} | {score.name: 0.2 for score in others}, {})
    guard.threshold = guard.threshold._replace(value=0.5)
    session = runtime.InferenceSession(str(guard.export_onnx(tmp_path / "deep" / "guard.onnx", inputs(2))))
    assert [one.name for one in session.get_outputs()][:3] == ["logits", "uncertainty", "accept"]
    message = session.get_modelmeta().custom_metadata_map
    assert message["dubito.guarantee"].endswith("at most 20 % of those accepted are wrong (confidence 95 %).")
    assert json.loads(message["dubito.threshold"]) == 0.5
    assert json.loads(message["dubito.classes"]) == ["ant", "bee", "cat", "dog", "eel"]
    assert json.loads(message["dubito.transform"]) == model.transform.describe()
    assert json.loads(message["dubito.model"])["model"] == "tiny"
    for n in (1, 3, 50):
        x = inputs(n, seed=9)
        logits, u, accept = session.run(["logits", "uncertainty", "accept"], {"input": x.numpy()})
        result = guard(x)
        assert logits == pytest.approx(guard.predict(x).logit.numpy(), abs=1e-4)
        assert u == pytest.approx(result.uncertainty.numpy(), abs=1e-4)
        assert np.array_equal(accept, result.accept.numpy())
    assert 0 < result.accept.sum() < 50


def test_the_model_is_left_as_it_was(model: WrappedClassifier, table: Table) -> None:
    guard = Guard.fit(model, table, coverage=0.7, scores=["entropy"])
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    exported = GuardModule(guard, inputs(2))
    exported(inputs(2))
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.module.modules())
    assert exported.backbone is not model.module


@pytest.mark.parametrize("score", [REGrad(layers="uniform"), GradNorm("gradient")], ids=lambda score: score.name)
def test_scores_that_cannot_be_written_are_named(model: WrappedClassifier, table: Table, score: Score) -> None:
    gradients = table.extended(gradient=torch.rand(len(table), 3), gradient_uniform=torch.rand(len(table), 3))
    guard = Guard.fit(model, gradients, coverage=0.7, scores={"all layers": score})
    with pytest.raises(
        GuardError,
        match=rf"score 'all layers' \({score.name}\) cannot be written as an ONNX graph. .*max_probability, .*, head\.",
    ):
        GuardModule(guard, inputs(2))


def test_without_a_model_or_an_input(model: WrappedClassifier, table: Table) -> None:
    guard = Guard.fit(None, table, coverage=0.7, scores=["entropy"])
    with pytest.raises(GuardError, match="needs the model"):
        GuardModule(guard)
    guard.model = model
    with pytest.raises(
        GuardError, match=r"the transform of .* makes no input of a picture \(this .*\)\. Pass example="
    ):
        GuardModule(guard)


def test_a_head_that_is_no_linear_layer_gives_logits_only(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = dubito.wrap(module)
    table = labelled(dubito.extract(model, inputs(800), tmp_path / "cache", workers=0, progress=False))
    x = inputs(6, seed=2)
    guard = Guard.fit(model, table, coverage=0.7, scores=["margin"], novel=0.0)
    assert GuardModule(guard, x)(x)[1].detach().numpy() == pytest.approx(guard(x).uncertainty.numpy(), abs=1e-5)
    session = runtime.InferenceSession(str(guard.export_onnx(tmp_path / "guard.onnx", inputs(2))))
    assert session.run(None, {"input": x.numpy()})[1] == pytest.approx(guard(x).uncertainty.numpy(), abs=1e-4)
    with pytest.raises(GuardError, match=r"not one plain nn.Linear.*and novel=0\."):
        GuardModule(Guard.fit(model, table, coverage=0.7, scores=["density"]), x)


def test_other_precisions_are_reported(tmp_path: Path) -> None:
    model = network()
    model = dubito.wrap(model.module.to(torch.bfloat16), name="short")
    table = labelled(dubito.extract(model, inputs(100), tmp_path / "cache", workers=0, progress=False))
    guard = Guard.fit(model, table, coverage=0.5, scores=["entropy"], novel=0.0)
    with pytest.raises(GuardError, match=r"short computes in bfloat16; only float32 .* Wrap module.float\(\)"):
        GuardModule(guard, inputs(2))


def test_examples_that_are_none(model: WrappedClassifier, table: Table, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    guard = Guard.fit(model, table, coverage=0.7, scores=["entropy"])
    with pytest.raises(GuardError, match=r"example: tiny cannot take inputs of shape \(n, 5, 6, 6\) \(RuntimeE"):
        guard.export_onnx(tmp_path / "guard.onnx", torch.zeros(2, 5, 6, 6))
    with pytest.raises(GuardError, match=r"example must be a tensor with a batch of finished inputs.*got \(4,\)"):
        guard.export_onnx(tmp_path / "guard.onnx", torch.zeros(4))
    with pytest.raises(ArtefactError, match="it is a folder"):
        guard.export_onnx(tmp_path, inputs(2))


def test_a_model_of_fixed_batches_is_reported_and_not_written_for_the_size_of_the_example(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(108, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x.view(len(x), -1))  # a number, not a dimension, to whoever traces it

    torch.manual_seed(0)
    model = dubito.wrap(Counting(), name="counting")
    table = labelled(dubito.extract(model, inputs(100), tmp_path / "cache", workers=0, progress=False))
    guard = Guard.fit(model, table, coverage=0.5, scores=["entropy"], novel=0.0)
    with pytest.raises(GuardError, match=r"counting cannot be written .* any size .* `len\(x\)` \(in place of x.shape"):
        guard.export_onnx(tmp_path / "guard.onnx", inputs(2))
    assert not (tmp_path / "guard.onnx").exists()


def test_a_model_that_chooses_its_way_is_reported_and_nothing_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")

    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(108, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = x.flatten(1)
            return self.last(2 * z if float(z.sum()) > 0 else z)

    torch.manual_seed(0)
    model = dubito.wrap(Chooser(), name="chooser")
    table = labelled(dubito.extract(model, inputs(100), tmp_path / "cache", workers=0, progress=False))
    guard = Guard.fit(model, table, coverage=0.5, scores=["entropy"])
    with pytest.raises(GuardError, match=r"chooser cannot be written as an ONNX graph .* look for `if`"):
        guard.export_onnx(tmp_path / "guard.onnx", inputs(2))
    assert not (tmp_path / "guard.onnx").exists()
    assert capfd.readouterr() == ("", "")


def test_thresholds_of_classes_and_missed_classes_are_in_the_graph(model: WrappedClassifier, table: Table) -> None:
    x = inputs(200, seed=5)
    frequent = int(table.label.mode().values)
    for settings in ({"per": "class"}, {"missed": {frequent: 0.3}}):
        guard = Guard.fit(model, table, 0.6, 0.6, scores=["entropy"], novel=0.0, sets=False, **settings)
        accept = GuardModule(guard, x)(x)[2]
        assert torch.equal(accept, guard(x).accept)
        assert int(accept.sum()) > 0


def test_a_file_knows_thresholds_of_classes_and_those_without_a_limit(
    model: WrappedClassifier, table: Table, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    frequent = int(table.label.mode().values)
    settings = {"per": "class", "missed": {frequent: 0.3}, "scores": ["entropy"], "sets": False}
    guard = Guard.fit(model, table, 0.6, 0.6, **settings)
    values = {one.value for one in guard.groups}
    assert -np.inf in values  # a class with too few images
    if NO_LIMIT not in values:
        guard.groups = (*guard.groups[:-1], guard.groups[-1]._replace(value=NO_LIMIT, reason=""))
    session = runtime.InferenceSession(str(guard.export_onnx(tmp_path / "guard.onnx", inputs(2))))
    x = inputs(200, seed=5)
    (accept,) = session.run(["accept"], {"input": x.numpy()})
    assert np.array_equal(accept, guard(x).accept.numpy())
    assert 0 < accept.sum() < 200
    saved = json.loads(session.get_modelmeta().custom_metadata_map["dubito.groups"])
    assert [one["value"] for one in saved] == [one.to_json()["value"] for one in guard.groups]


def test_groups_are_not_in_a_graph(model: WrappedClassifier, table: Table) -> None:
    grouped = table.extended(site=["a", "b"] * 250)
    guard = Guard.fit(model, grouped, 0.6, 0.6, per="site", scores=["entropy"], novel=0.0, sets=False)
    with pytest.raises(GuardError, match="a threshold for every group of 'site', which a graph of images does not"):
        GuardModule(guard, inputs(2))
