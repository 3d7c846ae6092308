"""What a model's own module says, where the model itself cannot be read."""

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.audit.audit import audit
from dubito.audit.understand import understood
from dubito.errors import ModelError, RefusedInputsError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Refuses(nn.Module):
    """Takes inputs of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_module_that_refuses_its_inputs_is_told_once():
    with pytest.raises(RefusedInputsError) as error:
        understood(dubito.wrap(Refuses(), name="mine"), X)
    assert str(error.value).startswith("mine cannot take inputs of shape (n, 6) (RuntimeError: ")
    assert isinstance(error.value.__cause__, RuntimeError)
    assert error.value.__context__ is error.value.__cause__  # the module was not asked again
    with pytest.raises(ModelError, match=r"Refuses cannot take inputs of shape \(n, 3, 8, 8\)"):
        audit(dubito.wrap(Refuses()), torch.zeros(4, 3, 8, 8))


def test_a_model_that_can_be_read_is_taken_as_it_is():
    model = dubito.wrap(nn.Linear(6, 3))
    assert understood(model, X).model is model
    assert understood(model, X).findings == ()


@pytest.mark.parametrize(("form", "then"), [("probabilities", torch.softmax), ("log_probabilities", torch.log_softmax)])
def test_a_softmax_is_found_and_undone(form, then):
    class Ends(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return then(super().forward(x), -1)

    module = Ends(6, 3)
    found = understood(dubito.wrap(module), X)
    assert [finding.evidence["form"] for finding in found.findings] == [form]
    with torch.no_grad():
        logits = found.model.logits(found.model.features(X))
        assert torch.allclose(logits, nn.functional.linear(X, module.weight, module.bias), atol=1e-6)


def test_what_is_no_logit_nor_probability_is_refused_as_the_model_does():
    with pytest.raises(ModelError, match="its logits differ from those of its last linear layer"):
        understood(dubito.wrap(nn.Sequential(nn.Linear(6, 3), nn.Sigmoid())), X)
