"""Outputs: forms, saturation, dead features and single classes by hand; and what a module's own output reveals."""

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.audit.audit import audit
from dubito.audit.finding import NotChecked
from dubito.audit.outputs import (
    check_features,
    check_one_class,
    check_saturation,
    form_of,
    understand,
)
from dubito.errors import ModelError, RefusedInputsError
from tests.audit.drawn import draw, numbers

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Refuses(nn.Module):
    """Takes inputs of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_forms():
    logits = draw(20, 5)
    assert form_of(logits) is None
    assert form_of(logits.softmax(-1)) == "probabilities"
    assert form_of(logits.log_softmax(-1)) == "log_probabilities"
    assert form_of(torch.nn.functional.normalize(logits.abs(), p=2, dim=1)) is None
    one_off = logits.softmax(-1)
    one_off[3] = logits[3]
    assert form_of(one_off) is None


def test_saturation_counts_ones_and_ties():
    sure = torch.tensor([[40.0, 0, 0]]).repeat(3, 1)
    unsure = torch.tensor([[float(k) / 10, 0, 0] for k in range(7)])
    [finding] = check_saturation(torch.cat([sure, unsure]))
    assert finding.evidence["exactly_one"] == pytest.approx(0.3)
    assert finding.evidence["tied"] == pytest.approx(0.3)
    assert finding.evidence["exactly_one_in_float64"] == pytest.approx(0.3)
    assert finding.severity == "wrong"
    assert check_saturation(torch.cat([sure[:1], unsure])) == []  # one image alone keeps its rank
    assert isinstance(check_saturation(torch.zeros(0, 3)), NotChecked)


def test_ties_in_float32_alone_are_suspicious():
    """A logit 20 above the others: 1 - p = 4e-9, which float32 cannot distinguish from one, and float64 can."""
    sure = 20 + draw(40, 1).abs()
    logit = torch.cat([torch.cat([sure, draw(60, 1)]), torch.zeros(100, 2)], 1)
    [finding] = check_saturation(logit)
    assert finding.severity == "suspicious"
    assert finding.evidence["exactly_one"] == pytest.approx(0.4)
    assert finding.evidence["exactly_one_in_float64"] == 0
    assert "exactly 1 in float32 for 40.0 % of the images (in float64 for 0.0 %)" in finding.what
    logit[:4] *= 3  # four of a hundred in float64, too
    assert check_saturation(logit)[0].severity == "suspicious"
    logit[:5, 0] = 60.0
    assert check_saturation(logit)[0].severity == "wrong"


@pytest.mark.parametrize(("n", "severity"), [(199, "note"), (200, "wrong")])
def test_zeros_of_few_images_may_be_rare_and_raise_no_alarm(n, severity):
    feature = draw(n, 10)
    feature[:, :6] = 0
    [finding] = check_features(feature)
    assert finding.severity == severity
    assert finding.evidence["zero"] == 6
    assert ("rarely active rather than dead; 200 images would show which" in finding.what) == (severity == "note")


def test_constants_that_are_not_zero_raise_an_alarm_with_few_images():
    feature = draw(30, 10)
    feature[:, :6] = 0
    feature[:, 6] = 1.5
    assert check_features(feature)[0].severity == "suspicious"  # one of ten, the zeros do not count
    feature[:, :6] = -2
    assert check_features(feature)[0].severity == "wrong"


def test_features_need_enough_images_to_be_called_dead():
    assert check_features(torch.zeros(10, 4)) == NotChecked("needs 20 images; got 10")
    feature = draw(30, 200)
    assert check_features(feature) == []
    feature[:, 5] = 0
    assert check_features(feature) == []  # one of 200 is below one in a hundred
    feature[:, 17] = 2.5
    [finding] = check_features(feature)
    assert finding.evidence["columns"] == [5, 17]
    assert finding.evidence["zero"] == 1


def test_one_class_is_only_suspicious_without_labels():
    logit = torch.tensor([[0.0, 1.0]]).repeat(25, 1)
    assert check_one_class(logit, None)[0].severity == "suspicious"
    assert check_one_class(logit, numbers(25, 2))[0].severity == "wrong"
    assert check_one_class(logit, torch.ones(25, dtype=torch.long)) == []


def test_one_class_is_judged_by_how_much_labels_differ_and_not_by_what_they_are():
    """Labels that count from one are another check's: here 10 of 200 differ from the rest, whatever the rest is."""
    logit = torch.tensor([[1.0, 0.0, 0.0]]).repeat(200, 1)
    labels = torch.ones(200, dtype=torch.long)
    labels[:10] = 2
    [finding] = check_one_class(logit, labels)
    assert finding.severity == "suspicious"
    assert finding.evidence == {"class": 0, "images": 200, "other_labels": 10}


def test_a_module_that_refuses_its_inputs_is_reported_once():
    with pytest.raises(RefusedInputsError) as error:
        understand(dubito.wrap(Refuses(), name="mine"), X)
    assert str(error.value).startswith("mine cannot take inputs of shape (n, 6) (RuntimeError: ")
    assert isinstance(error.value.__cause__, RuntimeError)
    assert error.value.__context__ is error.value.__cause__  # the module was not run again
    with pytest.raises(ModelError, match=r"Refuses cannot take inputs of shape \(n, 3, 8, 8\)"):
        audit(dubito.wrap(Refuses()), torch.zeros(4, 3, 8, 8))


def test_a_model_that_can_be_read_is_taken_as_it_is():
    model = dubito.wrap(nn.Linear(6, 3))
    assert understand(model, X) == (model, [])


@pytest.mark.parametrize(("form", "then"), [("probabilities", torch.softmax), ("log_probabilities", torch.log_softmax)])
def test_a_softmax_is_found_and_undone(form, then):
    class Ends(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return then(super().forward(x), -1)

    module = Ends(6, 3)
    model, findings = understand(dubito.wrap(module), X)
    assert [finding.evidence["form"] for finding in findings] == [form]
    with torch.no_grad():
        logits = model.logits(model.features(X))
        assert torch.allclose(logits, nn.functional.linear(X, module.weight, module.bias), atol=1e-6)


def test_what_is_no_logit_nor_probability_is_refused_as_the_model_does():
    with pytest.raises(ModelError, match="its logits differ from those of its last linear layer"):
        understand(dubito.wrap(nn.Sequential(nn.Linear(6, 3), nn.Sigmoid())), X)
