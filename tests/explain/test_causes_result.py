"""A diagnosis as text, as sentences and as JSON."""

import json

import pytest
import torch

from dubito.explain._balanced import points
from dubito.explain.causes import diagnose
from dubito.explain.causes_result import Diagnosis
from dubito.table import Table
from tests.explain.blobs import DOUBTFUL, QUICK, SURE, First, example


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return example()


def test_words(found):
    words = found.findings()
    assert list(words) == ["far", "near", "mean"]
    assert len(words["far"]) == 4
    assert words["far"][0].startswith("The entropy misses ")
    assert "No score on these features can repair it" in words["near"][3]
    assert "of mine and" in words["near"][1]  # of caches/mine, the folder alone
    text = str(found)
    assert text.startswith("AUROC of foreign images against mine (200 images, accuracy ")
    for part in ("A max p", "D density", "2 extrapolation", "95% interval", "over draws", "fitted on train (400 rows)"):
        assert part in text


def test_words_where_cooling_hurts():
    known = Table(feature=torch.rand(30, 1), logit=[SURE] * 30)
    found = diagnose(known, Table(feature=torch.rand(30, 1), logit=[DOUBTFUL] * 30), density=First(), **QUICK)
    verdict, saturation, extrapolation, overlap = found.findings()["ood"]
    assert verdict == "There is little to explain: the entropy misses 0.0 points of AUROC."
    assert "-100.0 [-100.0, -100.0] points, negative. Cooling makes it worse: it lets all small logits" in saturation
    assert "make up for what cooling lost. Against the entropy itself, the density brings -" in extrapolation
    assert "The density is a worse guide than the entropy" in extrapolation
    assert (
        "more training images (train=..., --train CACHE) or another covariance (--covariance); in Py" in extrapolation
    )
    assert "`max_probability` misses 0.0 points only, so overlap is at most that." in overlap
    thousand = torch.zeros(30, 1000)
    thousand[:, 0] = 12
    raised = torch.full((30, 1000), -40.0)
    raised[:, :2] = 0
    found = diagnose(
        Table(feature=known.feature, logit=thousand),
        Table(feature=known.feature + 2, logit=raised),
        density=First(),
        **QUICK,
    )
    assert "0.1 x logits flatten the softmax of 1000 classes" in found.findings()["ood"][1]


def test_words_where_nothing_can_be_told():
    draw = torch.Generator().manual_seed(0)
    known = Table(feature=5 + torch.rand(60, 1), logit=[SURE] * 60)
    mixed = [DOUBTFUL] * 45 + [[4.0, 0.0, 0.0]] * 15  # three quarters more uncertain than the known, one quarter less
    foreign = Table(feature=torch.rand(60, 1, generator=draw), logit=mixed)
    verdict, _, extrapolation, _ = diagnose(known, foreign, density=First(), **QUICK).findings()["ood"]
    # C = 0 as well as D: nothing is there to be made up for.
    assert verdict == (
        "The entropy misses 25.0 points of AUROC. Neither cooling nor the density does better, so the causes cannot be "
        "told apart."
    )
    assert "make up for" not in extrapolation


def test_words_where_saturation_or_the_density_rules():
    # Entropy and cool turned around: known DOUBTFUL, foreign SURE. So C - B = 1.
    known = Table(feature=torch.rand(30, 1), logit=[DOUBTFUL] * 30)
    foreign = Table(feature=torch.rand(30, 1), logit=[SURE] * 30)
    found = diagnose(known, foreign, density=First(), **QUICK)["ood"]
    assert (found.ranked[0], found.dominant) == ("saturation", "saturation")
    words = diagnose(known, foreign, density=First(), **QUICK).findings()["ood"]
    assert (
        "The largest part is saturation, 100.0 [100.0, 100.0]; it is ahead of extrapolation and overlap t" in words[0]
    )
    assert "The score `scaled_entropy`, the entropy of 0.1 x logits, gets these points back" in words[1]
    # Known and foreign alike in logits, apart in features: all is extrapolation.
    apart = Table(feature=torch.rand(30, 1) + 5, logit=[DOUBTFUL] * 30)
    words = diagnose(known, apart, density=First(), **QUICK).findings()["ood"]
    assert "The largest part is extrapolation with aleatoric overlap, 50.0 [50.0, 50.0]" in words[0]
    assert "The score `density` gets these points back" in words[2]
    assert words[3] == (
        "Feature overlap costs next to nothing, 0.0 [0.0, 0.0] points: the features tell ood from known."
    )
    # And with features that lie closer than the known ones.
    closer = Table(feature=torch.rand(30, 1) - 5, logit=[DOUBTFUL] * 30)
    words = diagnose(known, closer, density=First(), **QUICK).findings()["ood"]
    assert "The largest part is extrapolation and overlap together, 50.0 [50.0, 50.0]" in words[0]
    assert "so overlap is at most that" in words[3]
    assert "D is even below 50 %" in words[3]


def test_a_lead_by_chance_is_called_so():
    # B = C = D = 1/2 but for chance: saturation and extrapolation are both about zero, overlap one half.
    draw = torch.Generator().manual_seed(0)
    known, foreign = (
        Table(feature=torch.rand(40, 1, generator=draw), logit=torch.randn(40, 3, generator=draw)) for _ in range(2)
    )
    found = diagnose(known, foreign, density=First(), **QUICK)
    assert found["ood"].dominant == "overlap"
    assert "Saturation costs nothing that could be told from zero" in found.findings()["ood"][1]
    # D - C and 1 - D are both 1/4 where D = 3/4 and C = 1/2.
    known = Table(feature=torch.arange(40.0)[:, None], logit=[DOUBTFUL] * 40)
    half = torch.cat([torch.full((20, 1), 99.0), torch.arange(0.5, 40, 2)[:, None]])
    found = diagnose(known, Table(feature=half, logit=[DOUBTFUL] * 40), density=First(), **QUICK)
    assert found["ood"].dominant is None
    assert found.findings()["ood"][0].endswith(": within the interval, so neither can be called the main cause.")


def test_json(found):
    plain = json.loads(json.dumps(found.to_json()))
    assert list(plain["sets"]) == ["far", "near", "mean"]
    assert plain["sets"]["far"]["causes"]["overlap"]["value"] == found["far"].causes["overlap"].value
    assert (plain["known"], plain["known_rows"], plain["classes"], plain["draws"]) == ("mine", 200, 4, 5)
    assert plain["findings"] == found.findings()
    assert points(-0.0004) == "0.0"
