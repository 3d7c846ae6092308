"""A model is left as it was, whatever its forward pass writes; one that changes by itself or was trained is noticed."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito.errors import ModelError, NondeterministicModelWarning

X = torch.linspace(-1, 1, 48).view(8, 6)


class Writing(nn.Module):
    """Writes in one of many ways, for batches of at least `rows` images."""

    def __init__(self, how: str, rows: int = 1) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))
        self.how, self.rows = how, rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) >= self.rows:
            self.write()
        z = self.body(x).relu() + self.seen
        if self.how == "error" and len(x) >= self.rows:
            raise ValueError("in the middle")
        return self.fc(z)

    def write(self) -> None:
        if self.how in ("buffer", "error"):
            self.seen += 1
        elif self.how == "parameter":
            self.body.weight.mul_(1.5)
        elif self.how == "data":
            self.body.weight.data.mul_(1.5)
        elif self.how == "memory":  # as in EEGNet: a limit on the norm
            self.body.weight.data = torch.renorm(self.body.weight.data, p=2, dim=0, maxnorm=0.1)
        elif self.how == "object":
            self.body.weight = nn.Parameter(self.body.weight * 2)
        elif self.how == "mode":
            self.train()


def state(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (id(one), one.data_ptr(), one.detach().clone().numpy().tobytes()) for name, one in tensors.items()
    } | {f"mode of {name}": part.training for name, part in module.named_modules()}


@pytest.mark.parametrize("how", ["buffer", "parameter", "data", "memory", "object", "mode"])
def test_whatever_a_pass_writes_is_put_back(how):
    module = Writing(how)
    module.fc.eval()
    before, model = state(module), dubito.wrap(module)
    first = model.features(X)
    assert all(torch.equal(model.features(X), first) for _ in range(3))
    assert state(module) == before


@pytest.mark.parametrize("how", ["buffer", "parameter", "memory", "object", "error"])
def test_also_what_is_written_for_larger_batches_alone_or_before_an_error(how):
    module = Writing(how, rows=4)
    before, model = state(module), dubito.wrap(module)
    for rows in (1, 2, 3, 2):
        model.features(X[:rows])
    for _ in range(2):
        if how == "error":
            with pytest.raises(ModelError, match="in the middle"):
                model.features(X)
        else:
            model.features(X)
        assert state(module) == before
    with torch.no_grad():
        module.body.weight.add_(1)  # what the user writes stays
    before = state(module)
    model.features(X[:2])
    assert state(module) == before


def test_a_large_parameter_that_is_written_late_is_an_error_once():
    module = Writing("parameter", rows=4)
    module.body, module.seen = nn.Linear(6, 2**15), torch.zeros(2**15)
    module.fc, model = nn.Linear(2**15, 3), dubito.wrap(module)
    model.features(X[:2])
    with pytest.raises(
        ModelError, match=r"Writing: its forward pass wrote into 'body\.weight'.* Load its weights again"
    ):
        model.features(X)
    after = state(module)
    model.features(X)
    assert state(module) == after


@pytest.mark.parametrize("old", [True, False], ids=["hook", "parametrization"])
def test_spectral_norm_in_train_mode_stands_still(old):
    norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    module = nn.Sequential(norm(nn.Linear(6, 5)), nn.ReLU(), norm(nn.Linear(5, 3))).train()
    before = {name: one.clone() for name, one in module.named_buffers()}
    for model in (dubito.wrap(module), dubito.wrap(module, head="2")):
        model.features(X)
        model.fingerprint()
        assert all(torch.equal(one, before[name]) for name, one in module.named_buffers())


class LateStatistics(nn.Module):
    """Batch normalisation that switches itself to training for larger batches."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.fc, self.how = nn.BatchNorm1d(6), nn.Linear(6, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mode":
            self.norm.train(len(x) >= 4)
            return self.fc(self.norm(x))
        norm = self.norm
        return self.fc(F.batch_norm(x, norm.running_mean, norm.running_var, training=len(x) >= 4))


@pytest.mark.parametrize("how", ["mode", "function"])
def test_statistics_that_larger_batches_update_are_put_back(how):
    module = LateStatistics(how).eval()
    before, model = state(module), dubito.wrap(module)
    model.features(torch.randn(2, 6))  # the first pass writes nothing
    model.features(torch.randn(8, 6))
    model.features(torch.randn(8, 6))
    assert state(module) == before


def test_statistics_of_training_between_two_passes_stay():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    model = dubito.wrap(module)
    model.features(torch.randn(8, 6))
    module.train()(torch.randn(20, 6) * 5)
    after = state(module.eval())
    model.features(torch.randn(8, 6))
    assert state(module) == after


class Random(nn.Module):
    """Draws in its forward pass, also in eval mode."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc, self.how = nn.Linear(6, 50), nn.Linear(50, 3), how

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x).relu()
        if self.how == "dropout":
            z = F.dropout(z, 0.5)  # training=True by default
        if self.how == "numpy":
            z = z + torch.tensor(np.random.rand(50), dtype=z.dtype)  # noqa: NPY002
        if self.how == "python":
            z = z * random.uniform(0.5, 1.5)  # noqa: S311
        if self.how == "rounding":
            z = z * (1 + 1e-6 * torch.rand(1))
        if self.how == "slightly":
            z = z * (1 + 0.03 * torch.rand(1))
        return self.fc(z)


def states():
    """Not Python's: the type checks of these tests draw from it."""
    numbers = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), numbers[1].tobytes(), numbers[2]


@pytest.mark.parametrize("how", ["dropout", "numpy", "python"])
def test_a_model_that_answers_at_random_is_refused(how, tmp_path):
    model, before = dubito.wrap(Random(how).eval(), name="mine"), states()
    refusal = "mine predicts something else in every pass: two passes over the same 4 images .* cache would hold noise"
    with pytest.raises(ModelError, match=refusal):
        dubito.extract(model, X, tmp_path / "cache", progress=False)
    assert states() == before


def test_extract_and_the_audit_draw_one_line_between_rounding_and_random_answers(tmp_path):
    refused = dubito.wrap(Random("slightly").eval(), name="mine")
    with pytest.raises(ModelError, match=r"mine predicts something else in every pass: .* differ by 0\.\d%"):
        dubito.extract(refused, X, tmp_path / "cache", progress=False)
    [issue] = [one for one in dubito.audit(refused, X, progress=False).issues if one.check.startswith("predictions")]
    assert issue.what.startswith("Even in eval mode, logits differ from pass to pass, by 0.")
    assert 1e-3 < issue.evidence["change_between_passes"] < 1e-2
    rounded = dubito.audit(dubito.wrap(Random("rounding").eval()), X, progress=False)
    assert "predictions that change by themselves" not in {one.check for one in rounded.issues}


def test_last_bits_are_a_warning(tmp_path):
    model, before = dubito.wrap(Random("rounding").eval(), name="mine"), states()
    with pytest.warns(NondeterministicModelWarning, match="mine predicts something else .* to the last bit"):
        table = dubito.extract(model, X, tmp_path / "cache", progress=False)
    assert len(table) == 8
    assert states() == before


def test_a_steady_model_costs_one_more_batch(tmp_path):
    class Counted(Random):
        images = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.images += len(x)
            return super().forward(x)

    model, before = dubito.wrap(Counted("").train()), states()
    model.features(X)
    Counted.images = 0
    dubito.extract(model, X.repeat(10, 1), tmp_path / "cache", batch_size=8, workers=0, progress=False)
    assert Counted.images == 88
    assert states() == before


def fitted(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    model, x = dubito.wrap(module, name="mine"), torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    label = model.logits(model.features(x)).argmax(1)
    table = dubito.extract(model, x, tmp_path / "cache", labels=label, progress=False)
    return module, x, dubito.Guard.fit(model, table, risk=0.2, scores="entropy", sets=False, novel=0.0)


def add(module):
    with torch.no_grad():
        module[0].weight.add_(0.01)


def step(module):
    module.train()
    F.cross_entropy(module(torch.randn(20, 6)), torch.zeros(20, dtype=torch.long)).backward()
    torch.optim.AdamW(module.parameters(), lr=0.01).step()
    module.eval()


def data(module):
    module[3].weight.data.mul_(1.01)


def data_of_one_bias(module):
    module[0].bias.data.add_(0.01)


def statistics(module):
    module.train()(torch.randn(20, 6))
    module.eval()


def activation(module):
    module[2] = nn.GELU()


@pytest.mark.parametrize(
    "change", [add, step, data, data_of_one_bias, statistics, activation], ids=lambda one: one.__name__
)
def test_a_guard_notices_that_its_model_was_trained_further(change, tmp_path):
    module, x, guard = fitted(tmp_path)
    guard.save(tmp_path / "guard")
    loaded = dubito.Guard.load(tmp_path / "guard", guard.model)
    assert guard(x[:5]).to_dict() == loaded(x[:5]).to_dict()
    change(module)
    for one in (guard, loaded):
        with pytest.raises(ModelError, match="guard: mine has changed since the guard was fitted or loaded"):
            one(x[:5])


def test_a_guard_hashes_weights_only_where_something_has_changed(tmp_path, monkeypatch):
    module, x, guard = fitted(tmp_path)
    counted = []
    fingerprint = type(guard.model).fingerprint
    monkeypatch.setattr(type(guard.model), "fingerprint", lambda model: counted.append(1) or fingerprint(model))
    for _ in range(3):
        guard(x[:5])
    assert counted == []
    add(module)
    with torch.no_grad():
        module[0].weight.copy_(module[0].weight - 0.01 + 0.01)
    with pytest.raises(ModelError, match="has changed"):
        guard(x[:5])
    assert counted == [1]
