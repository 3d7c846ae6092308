"""The collapse monitor: by hand, against the functions it rests on, in words, and where it cannot tell."""

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.explain import sub_ensembles as partitions_file
from dubito.explain.collapse import EnsembleDiagnosis, diagnose_ensemble, times
from dubito.metrics import MemberStream, auroc, chain_rule, decompose, partitioned, sub_ensembles
from dubito.table import Provenance, Table
from dubito.table.views import ensemble

QUICK = {"resamples": 40}
LOG2 = math.log(2)


def sure(*classes: int, n: int = 6) -> Table:
    """Members that are all but certain of one class each, the same for every image."""
    logits = 60 * torch.nn.functional.one_hot(torch.tensor(classes), 3).double()
    return Table(members_logit=logits.expand(n, -1, -1).clone(), name="mine")


def drawn(n: int = 60, m: int = 6, *, noise: float = 1.0, seed: int = 0, scale: float = 3.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, 1, 4, generator=draw) + noise * torch.randn(n, m, 4, generator=draw)


def table(n: int = 60, m: int = 6, *, name: str = "mine", **options) -> Table:
    return Table(members_logit=drawn(n, m, **options), name=name)


def made_by(models: str) -> Table:
    """Joined from one table a model."""
    logits = drawn(20, 2)
    joined = ensemble(
        [Table(logit=logits[:, place], provenance=Provenance(weights=model)) for place, model in enumerate(models)]
    )
    joined.name = "mine" if models == "ab" else "other"
    return joined


def summed_up(logits: Tensor, *, between: bool = True) -> Table:
    """As a probe writes it."""
    sizes = [size for _, size in sub_ensembles(logits.shape[1])][1:]
    stream = MemberStream(sizes=sizes)
    stream.add(logits)
    columns = {"dropout": stream.summary().float()} | ({"dropout_between": stream.between().float()} if between else {})
    return Table(**columns)


def information(result: EnsembleDiagnosis) -> list[float]:
    return [level.information.value for level in result.ensembles[0].levels]


def test_neighbours_that_belong_together_do_not_collapse():
    result = diagnose_ensemble(sure(0, 0, 1, 1), partitions=0, **QUICK)
    (one,) = result.ensembles
    assert information(result) == pytest.approx([LOG2, LOG2], abs=1e-12)
    assert [level.share.value for level in one.levels] == pytest.approx([1.0, 1.0])
    assert (one.kind, one.order) == ("none", "neighbours, in their stored order")
    assert result.verdict == (
        "No collapse: MI hardly falls from 1 to 2 (1.0x; averaging alone explains 3.0x). Members of a sub-"
        "ensemble are alike, and sub-ensembles differ: one member of each would be nearly as informative."
    )


def test_pairs_of_opposites_agree_and_nothing_is_left():
    result = diagnose_ensemble(sure(0, 1, 0, 1), partitions=0, **QUICK)
    (one,) = result.ensembles
    assert information(result) == pytest.approx([LOG2, 0.0], abs=1e-12)
    assert (one.kind, one.levels[1].fall.value, one.decay) == ("collapse", math.inf, None)
    assert result.verdict == (
        "Pairs of your members agree; MI falls to nothing from 1 to 2 (averaging alone explains 3.0x): "
        "use the inner level (all 4 members at once)."
    )
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["ensembles"][0]["levels"][1]["fall"] == {
        "value": None, "low": None, "high": None, "confidence": 0.95
    }  # fmt: skip


def test_random_partitions_average_over_both():
    # Of the three ways to pair A, A, B, B, one keeps log 2 and two keep nothing: log 2 / 3, which is what averaging
    # alone leaves: (4 - 2) / (2 x 3) of log 2.
    result = diagnose_ensemble(sure(0, 0, 1, 1), partitions=300, **QUICK)
    level = result.ensembles[0].levels[1]
    assert level.expected == pytest.approx(LOG2 / 3, abs=1e-12)
    assert level.spread == pytest.approx(LOG2 * math.sqrt(2) / 3, abs=0.02)  # log 2 one time in three
    assert level.information.value == pytest.approx(LOG2 / 3, abs=0.06)
    assert result.ensembles[0].order == "300 random partitions of each size, averaged"


def test_numbers_are_those_of_the_chain_rule():
    logits = drawn().double()
    result = diagnose_ensemble(Table(members_logit=logits), partitions=0, **QUICK).ensembles[0]
    p = logits.movedim(1, 0).softmax(-1)
    whole = decompose(p)
    assert result.total.value == pytest.approx(float(whole.total.mean()), abs=1e-12)
    assert result.aleatoric.value == pytest.approx(float(whole.aleatoric.mean()), abs=1e-12)
    assert [str(level) for level in result.levels] == ["6 x 1", "3 x 2", "2 x 3"]
    first = float(whole.epistemic.mean())
    for level in result.levels:
        between = float(chain_rule(partitioned(p, level.size)).between.mean())
        assert level.information.value == pytest.approx(between, abs=1e-12)
        assert level.share.value == pytest.approx(between / float(whole.total.mean()), abs=1e-12)
        assert level.fall.value == pytest.approx(first / between, rel=1e-12)
        assert level.expected == pytest.approx(first * (6 - level.size) / (level.size * 5), rel=1e-12)
        assert level.information.low < between < level.information.high
        rows = chain_rule(partitioned(p, level.size)).between
        assert torch.allclose(result.scores[level.size], rows, rtol=0, atol=1e-12)


def test_a_summary_reports_what_logits_tell_of_neighbours():
    logits = drawn()
    exact = diagnose_ensemble(Table(members_logit=logits), partitions=0, **QUICK)
    message = diagnose_ensemble(summed_up(logits), of="dropout", **QUICK)
    assert information(message) == pytest.approx(information(exact), abs=1e-6)
    assert message.ensembles[0].order == "neighbours, in their stored order"
    assert message.ensembles[0].total.value == pytest.approx(exact.ensembles[0].total.value, abs=1e-6)


def test_blocks_of_rows_do_not_matter(monkeypatch):
    whole = diagnose_ensemble(table(), **QUICK).to_dict()
    monkeypatch.setattr(partitions_file, "_NUMBERS_AT_ONCE", 7 * 6 * 4)
    blocks = diagnose_ensemble(table(), **QUICK).to_dict()
    numbers, others = (
        [[one for one in leaves(result) if isinstance(one, float) is kind] for result in (whole, blocks)]
        for kind in (True, False)
    )
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-12, abs=1e-15)  # the last digit may differ
    assert others[0] == others[1]


def leaves(value):
    """The values that a nested one consists of, in order."""
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def test_decay_of_members_that_differ_little_is_that_of_averaging():
    result = diagnose_ensemble(table(100, 12, noise=0.05), partitions=30, **QUICK).ensembles[0]
    assert result.decay is not None
    assert result.decay.exponent.value == pytest.approx(result.decay.expected, abs=0.05)
    # By numpy: the slope of log((12 - s) / 11 s) over log s.
    sizes = np.array([1, 2, 3, 4, 6])
    slope, start = np.polyfit(np.log(sizes), np.log((12 - sizes) / (11 * sizes)), 1)
    assert result.decay.expected == pytest.approx(-slope, rel=1e-9)
    assert result.decay.scale == pytest.approx(result.epistemic.value * math.exp(start), rel=0.05)
    assert result.kind == "collapse"


def test_intervals_are_bootstraps_of_images():
    same = diagnose_ensemble(sure(0, 1, 2, 0), resamples=10).ensembles[0].epistemic
    assert same.low == pytest.approx(same.high, abs=1e-12)  # all images alike
    subset, many = (diagnose_ensemble(table(n), resamples=300).ensembles[0].epistemic for n in (30, 480))
    assert 2 < (subset.high - subset.low) / (many.high - many.low) < 8  # about sqrt 16
    values = decompose(drawn(480).double().movedim(1, 0).softmax(-1)).epistemic
    assert many.high - many.low == pytest.approx(2 * 1.96 * float(values.std()) / math.sqrt(480), rel=0.2)
    assert (
        diagnose_ensemble(table(), seed=3, **QUICK).to_dict() == diagnose_ensemble(table(), seed=3, **QUICK).to_dict()
    )


def test_ood_images():
    inside, ood = table(50), table(50, noise=3.0, seed=1, name="other")
    result = diagnose_ensemble(inside, ood=ood, partitions=0, **QUICK).ensembles[0]
    for level in result.levels:
        both = torch.cat([result.scores[level.size], result.ood_scores[level.size]])
        assert level.auroc is not None
        assert level.auroc.value == pytest.approx(auroc(both, torch.arange(100) >= 50), abs=1e-12)
        assert level.auroc_spread == 0.0  # one partition
    assert result.change is not None
    assert result.change.value == pytest.approx(result.levels[-1].auroc.value - result.levels[0].auroc.value, abs=1e-12)
    assert result.ood == "other"


def test_ood_images_of_the_same_members():
    inside, ood = made_by("ab"), made_by("ab")
    ood.name = "other"
    assert diagnose_ensemble(inside, ood=ood, **QUICK).ensembles[0].ood == "other"


def test_ood_images_must_have_the_same_settings():
    def made_at(rate: float) -> Table:
        return Table(
            name=f"at {rate}",
            members_logit=drawn(),
            provenance=Provenance(probes={"members": {"settings": {"rate": rate}}}),
        )

    with pytest.raises(
        TableError, match=r"'members' of at 0\.2 and of at 0\.1 must have .* differ in rate=0\.2 and rate=0"
    ):
        diagnose_ensemble(made_at(0.1), ood=made_at(0.2), **QUICK)
    assert diagnose_ensemble(made_at(0.1), ood=made_at(0.1), **QUICK).ensembles[0].ood == "at 0.1"


def test_one_ensemble_is_a_result_of_its_own():
    diagnosis = diagnose_ensemble(sure(0, 1, 0, 1), partitions=0, **QUICK)
    (one,) = diagnosis.ensembles
    assert one.records() == diagnosis.records()
    assert one.lines() == diagnosis.lines()
    assert one.to_dict()["findings"] == one.findings() == diagnosis.findings()
    assert one.title() in diagnosis.title()


def test_findings_about_ood_images():
    # Single members disagree about OOD images alone; 0, 1 | 0, 1 leaves pairs nothing to detect them by.
    inside, ood = sure(2, 2, 2, 2), sure(0, 1, 0, 1, n=12)
    ood.name = "other"
    result = diagnose_ensemble(ood, ood=inside, partitions=0, **QUICK)
    assert "0.0 % [0.0, 0.0] with single members, 50.0 % [50.0, 50.0] with 2 x 2, +50.0" in result.findings()[-1]
    varied = Table(members_logit=torch.cat([inside.whole("members_logit"), sure(0, 0, 1, 1).whole("members_logit")]))
    result = diagnose_ensemble(varied, ood=ood, partitions=0, **QUICK)
    # Half of the in-distribution images have MI of 0, half log 2, as all OOD ones: 1/2 + 1/4; pairs have 0.
    assert "AUROC of MI, other against table: 75.0 % [" in result.findings()[-1]
    assert result.findings()[-1].endswith("the outer level detects OOD images less well.")


def test_identical_members():
    logits = drawn(20, 1).expand(-1, 6, -1)
    for one in (Table(members_logit=logits, name="mine"), summed_up(logits)):
        result = diagnose_ensemble(one, of="members" if "members_logit" in one else "dropout", **QUICK)
        assert result.ensembles[0].kind == "same"
        assert result.findings() == [
            "Your members are the same model: they agree on all 20 images. Use members that were trained "
            "apart: with other seeds, data or architectures."
        ]


def test_certain_members_that_agree():
    result = diagnose_ensemble(sure(1, 1, 1, 1), **QUICK)
    assert result.ensembles[0].kind == "same"
    assert result.ensembles[0].levels[0].share.value == 0.0  # nothing of nothing
    assert json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_too_few_members_to_tell(members):
    result = diagnose_ensemble(table(m=members), **QUICK)
    assert (result.ensembles[0].kind, len(result.ensembles[0].levels)) == ("unknown", 1)
    assert result.verdict == (
        f"{members} members have no equal sub-ensembles of two or more, so whether MI collapses cannot be seen. "
        f"Use at least 4, an even number."
    )
    assert result.findings()[1].startswith("Of all uncertainty, ")


def test_a_summary_without_sub_ensembles():
    result = diagnose_ensemble(summed_up(drawn(), between=False), of="dropout", **QUICK)
    assert 'Keep the members\' logits (keep="logits") to split them.' in result.verdict


def test_a_partial_fall():
    # Two pairs: variance 3/2 between them and 1 inside. Members: 3/2 + 1/2 + 1; means of pairs: 3/2 + 1/2; fall 3/2.
    draw = torch.Generator().manual_seed(0)
    pairs = math.sqrt(1.5) * torch.randn(2000, 2, 4, generator=draw).repeat_interleave(2, dim=1)
    logits = 0.1 * (pairs + torch.randn(2000, 4, 4, generator=draw))
    result = diagnose_ensemble(Table(members_logit=logits), partitions=0, **QUICK).ensembles[0]
    assert result.levels[1].fall.value == pytest.approx(1.5, rel=0.05)
    assert result.kind == "partial"
    assert result.findings()[0] == (
        "MI falls 1.5x from 1 to 2, less than averaging would make it (averaging alone explains 3.0x): pairs keep "
        "differences of their own. Use all 4 members at once: nothing is lost there."
    )


def test_models_of_several_sizes():
    by_width = {width: table(noise=2.0 / width**0.5) for width in (4, 1, 16)}
    result = diagnose_ensemble(by_width, **QUICK)
    assert [one.key for one in result.ensembles] == [1.0, 4.0, 16.0]
    mi = [one.epistemic.value for one in result.ensembles]
    assert result.fall is not None
    assert result.decay is not None
    assert result.fall.value == pytest.approx(mi[0] / mi[2])
    assert result.decay.exponent.value == pytest.approx(-np.polyfit(np.log([1, 4, 16]), np.log(mi), 1)[0])
    assert result.verdict.startswith(f"Your larger models agree more: MI falls {mi[0] / mi[2]:.1f}x from 1 to 16 (MI ~")
    assert [line[0] for line in result.lines()] == ["models", *["1"] * 3, *["4"] * 3, *["16"] * 3]
    turned = diagnose_ensemble({1: by_width[16], 16: by_width[1]}, **QUICK)
    assert turned.verdict.startswith(f"Your larger models disagree more: MI grows {mi[0] / mi[2]:.1f}x from 1 to 16")
    flat = diagnose_ensemble({1: by_width[1], 2.5: by_width[1]}, **QUICK)
    assert flat.verdict.startswith("MI does not change beyond its interval from 1 to 2.5")
    ood = {width: table(seed=1, name="other") for width in by_width}
    assert all(one.change for one in diagnose_ensemble(by_width, ood=ood, **QUICK).ensembles)


def test_models_some_of_which_are_the_same():
    result = diagnose_ensemble({1: table(), 2: sure(0, 0, 0, 0, 0, 0, n=60)}, **QUICK)
    assert result.verdict == "Members of some of these ensembles are the same model, so nothing can be fitted."


def test_text():
    result = diagnose_ensemble(table(), ood=table(seed=1, noise=3.0, name="other"), **QUICK)
    lines = str(result).split("\n")
    assert (
        lines[0]
        == "Mutual information of 'members', 6 members, 60 images of mine; 5 random partitions of each size, averaged"
    )
    columns = "sub-ensembles MI (nats) share fall by averaging AUROC"
    assert " ".join(lines[1].split()) == columns
    assert lines[2].startswith(f"6 x 1          {result.ensembles[0].epistemic.value:.5f}")
    assert lines[-len(result.findings()) :] == result.findings()
    assert (times(4.04), times(12345.0), times(math.inf)) == ("4.0x", "1.23e+04x", "to nothing")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: diagnose_ensemble(table(m=1)), TableError,
         r"needs at least 2 members; mine has 1\. One model cannot disagree with itself: add models"),
        (lambda: diagnose_ensemble(Table(logit=torch.zeros(3, 2)), of="views"), MissingColumnError,
         r"diagnose_ensemble needs column 'views_logit' or 'views'; table in memory has logit\. Extract"),
        (lambda: diagnose_ensemble(table(1)), TableError, r"table needs at least 2 rows; mine has 1"),
        (lambda: diagnose_ensemble(Table(members_logit=torch.zeros(3, 2))), TableError,
         r"column 'members_logit' of table must be \(n, m, c\), logits of m members; got shape \(3, 2\)"),
        (lambda: diagnose_ensemble(Table(members=torch.zeros(3, 2))), TableError,
         r"column 'members' of table must be a summary \(n, 9\) of an ensemble: members, total, .*got shape \(3, 2\)"),
        (lambda: diagnose_ensemble(Table(members_logit=torch.full((3, 2, 2), math.nan))), ValueRangeError,
         r"column 'members_logit' of table"),
        (lambda: diagnose_ensemble(table(), ood=table(m=4, name="other")), TableError,
         r"other must have the same members as mine, 6; got 4\. Extract both with the same settings\."),
        (lambda: diagnose_ensemble(made_by("ab"), ood=made_by("ba")), TableError,
         r"ood \(other\) and mine must come from one model .*: member 0: its weights differ \(b there, a here\)"),
        (lambda: diagnose_ensemble(table(m=4), ood=Table(members_logit=torch.zeros(3, 4, 7), name="o")), TableError,
         r"o must have the same classes as mine, 4; got 7"),
        (lambda: diagnose_ensemble(table(), ood={1: table()}), TableError,
         r"ood must have a table for each of table, one; got 1. Extract"),
        (lambda: diagnose_ensemble({1: table()}), TableError,
         r"with 1: the number of models must be a number, at least 2; got 1"),
        (lambda: diagnose_ensemble({"a": table(), "b": table()}), TableError,
         r"with 'a', 'b': the size of the models must be a number, above 0; got 'a'. Pass"),
        (lambda: diagnose_ensemble({0: table(), 1: table()}), TableError,
         r"the size of the models must be a number, above 0; got 0"),
        (lambda: diagnose_ensemble({1: table(), 2: table()}, ood=table()), TableError,
         r"ood must have a table for each of table, 1, 2; got one"),
        (lambda: diagnose_ensemble({1: table(), 2: table()}, ood={1: table()}), TableError,
         r"1, 2; got 1\. Extract"),
        (lambda: diagnose_ensemble(table(), confidence=1.0), ValueRangeError,
         r"confidence must be a number in \(0, 1\); got 1\.0"),
        (lambda: diagnose_ensemble(table(), resamples=0), ValueRangeError, r"resamples must be .* at least 1; got 0"),
        (lambda: diagnose_ensemble(table(), partitions=-1), ValueRangeError,
         r"partitions must be a whole number, at least 0; got -1"),
        (lambda: diagnose_ensemble(table(), seed=-1), ValueRangeError,
         r"seed must be .* at least 0; got -1\. 0 is usual"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_plot_shows_a_line_per_ensemble():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 (optional)

    ax = diagnose_ensemble({1: table(), 4: table(noise=0.5)}, **QUICK).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["1", "4"]
    assert (ax.get_xscale(), ax.get_yscale(), len(ax.containers)) == ("log", "log", 2)
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3]
    plt.close(ax.figure)
