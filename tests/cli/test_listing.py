"""`dubito list`: everything that is registered is listed."""

import pytest

from dubito import metrics
from dubito.scores.registry import SCORES

from .conftest import Run


def test_scores(run: Run) -> None:
    found = run("list", "scores", "--json").json["scores"]
    assert [entry["name"] for entry in found] == list(SCORES)
    entropy = found[list(SCORES).index("entropy")]
    assert entropy == {
        "name": "entropy",
        "kind": "total",
        "needs": ["logit"],
        "learns_from": [],
        "about": "The entropy of the predicted distribution.",
    }
    assert all(entry["about"] for entry in found)


def test_probes_and_metrics(run: Run) -> None:
    probes = {
        probe["name"]: (probe["price"], probe["about"]) for probe in run("list", "probes", "--json").json["probes"]
    }
    assert (
        probes.items()
        >= {
            "forward": ("1 forward pass", "Features and logits."),
            "before": ("1 forward pass", "Features before the last non-linearity, in the column `before`."),
            "gradient": (
                "1 forward pass, and 4 backward passes or as many as are asked for",
                "Gradient norms of every layer.",
            ),
            "members": (
                "1 forward pass a member",
                "What several members say of each image: models, checkpoints, dropout, views or noisy copies.",
            ),
        }.items()
    )
    found = run("list", "metrics", "--json").json["metrics"]
    assert {entry["name"] for entry in found} < set(metrics.__all__)
    assert "auroc" in {entry["name"] for entry in found}
    assert "Interval" not in {entry["name"] for entry in found}


@pytest.mark.parametrize("filter_", ["test_resnet", "timm:test_resn*", "TEST_RESNET"])
def test_models_by_filter(run: Run, filter_: str) -> None:
    found = run("list", "models", filter_, "--json").json["models"]
    if filter_.isupper():
        assert found == []
    else:
        assert {"name": "timm:test_resnet", "source": "timm"} in found
        assert all("test_resnet" in entry["name"] for entry in found)


def test_models_as_text(run: Run) -> None:
    answer = run("list", "models", "efficientnet_lite0")
    assert "pypi:efficientnet_lite0\n" in answer.out
    assert answer.out.endswith(" models\n")
    counts = run("list", "models").out
    assert "3 pypi:" in counts
    assert "torchvision:" in counts
    assert "dubito list models" in counts


def test_overview(run: Run) -> None:
    answer = run("list")
    assert answer.code == 0
    for text in ("scores", "entropy", "probes", "forward", "models", "timm:", "metrics", "auroc"):
        assert text in answer.out
    assert set(run("list", "--json").json) == {"filter", "scores", "heads", "probes", "models", "metrics", "notes"}


def test_an_unknown_kind_is_a_usage_error(run: Run) -> None:
    answer = run("list", "cats")
    assert answer.code == 2
    assert "'cats' is not one of" in answer.err
