"""What all calibration methods have in common."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.calibration import METHODS, Calibration, load_calibration, make_calibration, save_calibration
from dubito.errors import (
    ArtefactError,
    MissingColumnError,
    NotFittedError,
    TableError,
    UnknownNameError,
    ValueRangeError,
)
from dubito.evaluate import compare
from dubito.guard import Guard
from dubito.metrics import accuracy, nll
from dubito.scores import Energy, Entropy, MaxLogit, MaxProbability, Neighbours, Temperature
from dubito.table import Provenance, Table, concat
from dubito.threads import torch_threads
from tests.calibration.samples import sample

FAST = {
    "vector": {"deviation": 0.3},
    "dirichlet": {"deviation": 0.3, "off_diagonal": 0.1},
    "matrix": {"deviation": 0.3, "off_diagonal": 0.1},
}
each = pytest.mark.parametrize("name", METHODS)


def made(name: str) -> Calibration:
    return make_calibration(name, **FAST.get(name, {}))


@each
def test_probabilities_are_positive_and_sum_to_one(name):
    method = made(name).fit(sample(seed=1))
    log_p = method.log_probability(sample(300, seed=2).logit)
    assert log_p.isfinite().all()
    assert torch.allclose(log_p.exp().sum(1), torch.ones(300, dtype=torch.float64), atol=1e-12)
    extreme = method.log_probability(torch.tensor([[1e4, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert extreme.isfinite().all()
    assert torch.allclose(extreme.exp().sum(1), torch.ones(2, dtype=torch.float64), atol=1e-12)


@each
def test_an_overconfident_model_becomes_more_likely(name):
    table, test = sample(2000, seed=3), sample(2000, seed=4)
    calibrated = made(name).fit(table).apply(test)
    assert nll(calibrated.logit, test.label) < nll(test.logit, test.label) - 0.1


@each
def test_predictions_are_kept_where_it_is_promised(name):
    method = made(name).fit(sample(seed=5))
    test = sample(1000, seed=6)
    kept = torch.equal(method.apply(test).logit.argmax(1), test.logit.argmax(1))
    assert kept or not method.keeps_predictions
    assert method.keeps_predictions == (name in ("temperature", "histogram", "isotonic", "venn_abers"))
    if method.keeps_predictions:
        assert accuracy(method.apply(test).logit, test.label) == accuracy(test.logit, test.label)


@each
def test_the_order_of_rows_does_not_matter(name):
    table, order = sample(200, seed=7), torch.randperm(200, generator=torch.Generator().manual_seed(0))
    test = sample(50, seed=8).logit
    one, two = (made(name).fit(each).log_probability(test) for each in (table, table.rows(order)))
    assert torch.allclose(one, two, atol=1e-5)
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    fitted = made(name).fit(table)
    assert torch.equal(fitted.log_probability(test[shuffled]), fitted.log_probability(test)[shuffled])


@each
def test_one_class_among_the_labels(name):
    table = sample(60, seed=9)
    table = table.extended(label=torch.zeros(60, dtype=torch.long))
    calibrated = made(name).fit(table).apply(table)
    assert calibrated.logit.isfinite().all()
    assert nll(calibrated.logit, table.label) < nll(table.logit, table.label)


@each
def test_a_single_row(name):
    table = Table(logit=[[1.0, 0.0, 0.5]], label=[0])
    if name in ("temperature", "vector", "matrix", "dirichlet"):
        with pytest.raises(ValueRangeError, match="grows without end"):
            made(name).fit(table)
    else:
        p = made(name).fit(table).probability(table)
        assert p.sum().item() == pytest.approx(1, abs=1e-6)
        assert p.argmax() == 0


@each
def test_equal_rows_stay_equal(name):
    table = Table(logit=[[1.0, 0.0, 0.0]] * 6 + [[0.0, 0.0, 2.0]] * 3, label=[0, 0, 0, 0, 1, 2, 2, 2, 1])
    p = made(name).fit(table).probability(table)
    assert torch.equal(p[:6], p[:1].expand(6, 3))
    assert torch.equal(p[6:], p[6:7].expand(3, 3))


@each
def test_a_calibrated_table_is_a_table(name):
    table = sample(300, seed=10)
    table = Table(logit=table.logit.float(), label=table.label, loss=torch.zeros(300), feature=torch.ones(300, 2))
    method = made(name).fit(table)
    calibrated = method.apply(table)
    assert calibrated.columns == ("logit", "label", "feature")
    assert calibrated.logit.dtype == torch.float32
    rows = torch.tensor([5, 2, 299])
    assert torch.equal(calibrated.rows(rows).logit, calibrated.logit[rows])
    assert torch.allclose(calibrated.logit.log_softmax(1).double(), method.log_probability(table.logit), atol=1e-5)
    assert torch.allclose(calibrated.logit.softmax(1), method.probability(table))
    assert len(calibrated.rows(slice(0, 0)).logit) == 0
    assert MaxProbability().score(calibrated).allclose(-method.probability(table).amax(1).double(), atol=1e-6)


@each
def test_scores_of_the_size_of_logits_take_scaled_logits_and_refuse_log_probabilities(name):
    table = sample(300, seed=12)
    method = made(name).fit(table)
    calibrated = method.apply(table)
    if name in ("temperature", "vector", "matrix"):
        expected = -method.calibrated(table.logit).logsumexp(1)
        assert Energy().score(calibrated).numpy() == pytest.approx(expected.numpy(), abs=1e-5)
        return
    for score in (Energy(), MaxLogit(), Temperature(Energy()).fit(calibrated)):
        with pytest.raises(TableError, match=rf"{score.name}.score needs logits before the softmax"):
            score.score(calibrated)
    left_out = compare(calibrated, resamples=2).left_out
    assert {"energy", "max_logit"} <= left_out.keys()
    assert "log-probabilities" in left_out["energy"]


@each
def test_saved_and_loaded(name, tmp_path):
    table = sample(200, seed=11)
    table.provenance = Provenance(model="net", weights="ab12")
    method = made(name).fit(table)
    loaded = load_calibration(save_calibration(method, tmp_path / "saved"))
    assert loaded == method
    assert loaded.provenance_ == table.provenance
    assert torch.equal(loaded.apply(table).logit, method.apply(table).logit)
    assert loaded.parameters == method.parameters


def test_settings_of_infinity_are_saved(tmp_path):
    method = make_calibration("vector", deviation=float("inf")).fit(sample())
    assert load_calibration(save_calibration(method, tmp_path)).deviation == float("inf")


def test_damaged_and_other_folders_are_refused(tmp_path):
    with pytest.raises(ArtefactError, match="no calibration in"):
        load_calibration(tmp_path / "nothing")
    save_calibration(made("temperature").fit(sample()), tmp_path)
    file = tmp_path / "calibration.safetensors"
    file.write_bytes(file.read_bytes().replace(b'\\"classes\\": 4', b'\\"classes\\": 5'))
    with pytest.raises(ArtefactError, match="checksum"):
        load_calibration(tmp_path)
    with pytest.raises(NotFittedError, match="has not been fitted"):
        save_calibration(made("temperature"), tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean vector"):
        make_calibration("vektor")
    with pytest.raises(ValueRangeError, match="does not take these settings"):
        make_calibration("temperature", bins=3)


@each
def test_what_cannot_have_been_learned_is_not_loaded(name, tmp_path):
    """Whoever can change the file can seal it again, so its hash is no reason to trust it."""
    wrong = (torch.Tensor.half, lambda value: value[:-1], lambda value: value * float("nan"))
    for part in made(name).learned:
        for damage in wrong:
            method = made(name).fit(sample())
            value = getattr(method, part)
            setattr(method, part, damage(value) if isinstance(value, torch.Tensor) else -value)
            with pytest.raises(
                ArtefactError, match=rf"cannot be read \((what {name} has|{part} is not what {name} learns)"
            ):
                load_calibration(save_calibration(method, tmp_path / "saved"))


@each
def test_wrong_inputs_are_refused(name):
    method, table = made(name), sample(100)
    with pytest.raises(NotFittedError, match=f"{name}.apply was called before fit"):
        method.apply(table)
    with pytest.raises(MissingColumnError, match="label"):
        method.fit(table.select("logit"))
    broken = table.logit.clone()
    broken[3, 1] = torch.nan
    with pytest.raises(ValueRangeError, match="NaN"):
        method.fit(table.extended(logit=broken))
    with pytest.raises(TableError, match="needs labelled rows"):
        method.fit(table.rows(slice(0, 0)))
    with pytest.raises(TableError, match="at least 2 classes"):
        method.fit(Table(logit=[[1.0], [2.0]], label=[0, 0]))
    method.fit(table)
    with pytest.raises(ValueRangeError, match="NaN"):
        method.probability(table.extended(logit=broken))
    with pytest.raises(TableError, match="has 3 classes"):
        method.apply(Table(logit=table.logit[:, :3]))


def test_a_failed_fit_leaves_nothing_behind():
    method = made("isotonic").fit(sample())
    with pytest.raises(TableError):
        method.fit(sample().rows(slice(0, 0)))
    with pytest.raises(NotFittedError):
        method.apply(sample())


@pytest.mark.parametrize(("rows", "inside"), [(1000, 1), (60_000, 2)])
def test_small_tables_are_fitted_with_one_thread_and_the_number_is_restored(rows, inside, monkeypatch):
    seen = []

    def fail(*_):
        seen.append(torch.get_num_threads())
        raise TableError("stop")

    monkeypatch.setattr(METHODS["matrix"], "learn", fail)
    with torch_threads(2):
        with pytest.raises(TableError, match="stop"):
            make_calibration("matrix").fit(sample(rows, 5))
        assert torch.get_num_threads() == 2
    assert seen == [inside]


def test_another_model_is_refused():
    table = sample()
    table.provenance = Provenance(weights="ab12")
    method = made("temperature").fit(table)
    table.provenance = Provenance(weights="cd34")
    with pytest.raises(TableError, match="must come from one model"):
        method.apply(table)


@given(
    st.lists(st.lists(st.sampled_from([-3.0, 0.0, 0.0, 1.0, 4.0]), min_size=3, max_size=3), min_size=2, max_size=12),
    st.sampled_from(["histogram", "isotonic", "venn_abers", "class_wise_isotonic"]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=25)
def test_any_small_table_has_proper_probabilities(logits, name, random):
    table = Table(logit=logits, label=[random.randrange(3) for _ in logits])
    method = made(name).fit(table)
    log_p = method.log_probability(table.logit)
    assert log_p.isfinite().all()
    assert np.allclose(log_p.exp().sum(1), 1)
    if method.keeps_predictions:
        assert torch.equal(log_p.float().argmax(1), table.logit.argmax(1))


def test_a_calibrated_table_says_so_and_what_was_fitted_on_other_logits_refuses_it():
    table = sample()
    table.provenance = Provenance(weights="ab12")
    method, other = made("temperature").fit(table), made("temperature").fit(sample(seed=1))
    calibrated = method.apply(table)
    assert calibrated.provenance.calibration == method.apply(table).provenance.calibration  # it does not depend on time
    assert calibrated.provenance.calibration.startswith("temperature ")
    assert calibrated.provenance.calibration != other.apply(table).provenance.calibration
    assert Provenance.from_json(calibrated.provenance.to_json(), "here") == calibrated.provenance
    assert table.provenance.calibration is None
    with pytest.raises(TableError, match="its logits are calibrated differently"):
        Temperature().fit(table).score(calibrated)
    with pytest.raises(TableError, match=r"temperature \w+ there, none here"):
        method.apply(calibrated)  # twice
    with pytest.raises(TableError, match="Apply the same calibration to both"):
        concat([table, calibrated])
    assert len(Temperature().fit(calibrated).score(calibrated)) == len(table)
    assert len(Entropy().score(calibrated)) == len(table)


def test_arrays_of_an_unknown_model_record_their_calibration_too():
    table = sample()
    method = made("temperature").fit(table)
    calibrated = method.apply(table)
    with pytest.raises(TableError, match=r"temperature \w+ there, none here.*Apply the same calibration to both"):
        method.apply(calibrated)
    with pytest.raises(TableError, match="its logits are calibrated differently"):
        Temperature().fit(table).score(calibrated)
    guard, of_calibrated = (Guard.fit(None, one, risk=0.5, confidence=0.8) for one in (table, calibrated))
    with pytest.raises(TableError, match="its logits are calibrated differently"):
        guard(calibrated)
    with pytest.raises(TableError, match="its logits are calibrated differently"):
        of_calibrated(table)
    assert len(of_calibrated(calibrated)) == len(table)


def test_what_reads_features_alone_takes_calibrated_tables():
    table = sample()
    table = Table(logit=table.logit, label=table.label, feature=table.logit[:, :2], provenance=Provenance(weights="ab"))
    calibrated = made("temperature").fit(table).apply(table)
    neighbours = Neighbours().fit(table)
    assert torch.equal(neighbours.score(calibrated), neighbours.score(table))
    assert len(concat([table.select("feature"), calibrated.select("feature")])) == 2 * len(table)


def test_two_calibrations_after_each_other_are_both_recorded():
    table = sample()
    table.provenance = Provenance(weights="ab12")
    once = made("temperature").fit(table).apply(table)
    twice = made("isotonic").fit(once).apply(once)
    assert twice.provenance.calibration.startswith(f"{once.provenance.calibration} + isotonic ")


def test_a_guard_of_calibrated_logits_takes_tables_calibrated_alike():
    table = sample(1000)
    table.provenance = Provenance(weights="ab12")
    method = made("temperature").fit(sample(seed=3))
    method.provenance_ = table.provenance
    guard = Guard.fit(None, method.apply(table), coverage=0.8, scores="entropy")
    fresh = sample(50, seed=4)
    fresh.provenance = table.provenance
    assert len(guard.decide(method.apply(fresh)).accept) == 50
    with pytest.raises(TableError, match="its logits are calibrated differently"):
        guard.decide(fresh)
