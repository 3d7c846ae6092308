"""Explicit ensembles: the columns are those of the pure functions, and members that do not fit are refused."""

import weakref
from dataclasses import dataclass, field, fields
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import softmax
from torch import nn

import dubito
from dubito.errors import CheckpointError, ModelError, StaleCacheError, TableError, ValueRangeError
from dubito.metrics.information import chain_rule, decompose, partitioned, sub_ensembles, variation_ratio
from dubito.metrics.streaming import SUMMARY
from dubito.probes import EnsembleProbe, Members, Views
from dubito.types import Probe

X = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABEL = torch.arange(7) % 3


def network(seed: int, classes: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    module = nn.Sequential(*layers, nn.Linear(6, classes))
    with torch.no_grad():
        module[-1].weight *= 6  # members that disagree
    return module


def model(seed: int, classes: int = 3, size: int = 8, names: list[str] | None = None):
    transform = dubito.Preprocess((size, size))
    return dubito.wrap(network(seed, classes), transform=transform, classes=names, name=f"net {seed}")


@pytest.fixture(scope="module")
def models(one_thread):
    return [model(seed) for seed in range(6)]


def member_logits(models) -> np.ndarray:
    """What the modules themselves say, (m, n, c), in float64."""
    with torch.no_grad():
        return softmax(np.stack([one.module.eval()(X).double().numpy() for one in models]), axis=-1)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(-1)


def test_the_summary_against_numpy(models):
    p = member_logits(models)
    summary = Members(models).run(models[0], X, None)["members"].double().numpy()
    message = dict(zip(SUMMARY, summary.T, strict=True))
    total, aleatoric = entropy(p.mean(0)), entropy(p).mean(0)
    votes = np.stack([(p.argmax(-1) == c).sum(0) for c in range(3)])
    np.testing.assert_allclose(message["members"], 6)
    np.testing.assert_allclose(message["total"], total, rtol=1e-5)
    np.testing.assert_allclose(message["aleatoric"], aleatoric, rtol=1e-5)
    np.testing.assert_allclose(message["epistemic"], total - aleatoric, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(message["variation"], 1 - votes.max(0) / 6, rtol=1e-6)
    np.testing.assert_allclose(message["predicted"], p.mean(0).argmax(-1))
    np.testing.assert_allclose(message["confidence"], p.mean(0).max(-1), rtol=1e-5)
    assert (message["epistemic"] > 1e-3).all()
    assert torch.allclose(decompose(p).epistemic, torch.tensor(message["epistemic"]), rtol=1e-4, atol=1e-7)
    assert torch.allclose(variation_ratio(p), torch.tensor(message["variation"]))


def test_the_loss_is_that_of_the_mean_probability(models):
    columns = Members(models).run(models[0], X, LABEL)
    expected = -np.log(member_logits(models).mean(0)[range(7), LABEL])
    np.testing.assert_allclose(columns["members_loss"].numpy(), expected, rtol=1e-5)
    for other in (None, torch.rand(7, 3), LABEL.float(), LABEL > 0):  # no labels, or targets that are no classes
        assert "members_loss" not in Members(models).run(models[0], X, other)
    with pytest.raises(TableError, match=r"the labels must be classes from 0 to 2; got 0 to 3\."):
        Members(models).run(models[0], X, torch.tensor([0, 1, 2, 3, 0, 0, 0]))


def test_every_partition_against_the_chain_rule(models):
    columns = Members(models).run(models[0], X, None)
    assert sub_ensembles(6) == ((6, 1), (3, 2), (2, 3))
    for place, size in enumerate((2, 3)):
        parts = chain_rule(partitioned(member_logits(models), size))
        between = columns["members_between"][:, place].double()
        torch.testing.assert_close(between, parts.between, rtol=1e-4, atol=1e-6)
        within = columns["members"][:, SUMMARY.index("epistemic")].double() - between
        torch.testing.assert_close(within, parts.within, rtol=1e-4, atol=1e-6)
    assert "members_between" not in Members(models[:5]).run(models[0], X, None)  # five have no sub-ensembles


def test_logits_only_on_request(models):
    assert set(Members(models[:4]).run(models[0], X, LABEL)) == {"members", "members_between", "members_loss"}
    kept = Members(models[:4], keep="logits").run(models[0], X, None)["members_logit"]
    assert (kept.shape, kept.dtype) == ((7, 4, 3), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(kept[:, 2], models[2].module(X))


def test_the_extracted_model_is_a_member_only_if_it_is_listed(models):
    others = Members(models[1:4], keep="logits").run(models[0], X, None)
    with torch.no_grad():
        own = models[0].module(X)
    assert not any(torch.allclose(others["members_logit"][:, place], own) for place in range(3))


def test_temperature_divides_before_the_summary(models):
    cool = Members(models, temperature=4.0, keep="logits").run(models[0], X, None)
    plain = Members(models, keep="logits").run(models[0], X, None)
    assert torch.equal(cool["members_logit"], plain["members_logit"])
    expected = decompose((plain["members_logit"] / 4).softmax(-1).transpose(0, 1)).epistemic
    torch.testing.assert_close(cool["members"][:, 3].double(), expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueRangeError, match=r"temperature must be a number, above 0; got 0\.0"):
        Members(models, temperature=0.0)


def test_identical_members_do_not_disagree(models):
    summary = Members([models[0]] * 3).run(models[0], X, None)["members"]
    assert summary[:, SUMMARY.index("epistemic")].abs().max() < 1e-6
    assert summary[:, SUMMARY.index("variation")].eq(0).all()


def test_modules_are_left_as_they_were(models):
    models[1].module.train()
    state = {key: value.clone() for key, value in models[1].module.state_dict().items()}
    Members(models).run(models[0], X, None)
    assert models[1].module.training
    assert all(torch.equal(value, state[key]) for key, value in models[1].module.state_dict().items())
    models[1].module.eval()


def test_one_member_or_none(models):
    for members, got in (([], "none"), (models[:1], "1"), (models[0], "1")):
        with pytest.raises(ModelError) as error:
            Members(members)
        assert str(error.value) == (
            f"members: an ensemble has at least two members; got {got}. With one model, use its tiles "
            f"(probes.Tiles()), dropout (probes.Dropout()) or views of the image (probes.Views())."
        )


def test_members_that_are_no_classifiers(models):
    with pytest.raises(ModelError, match=r"members, place 1: model must .* dubito.load or dubito.wrap; got Sequential"):
        Members([models[0], network(1)])


def test_members_of_other_classes(models):
    with pytest.raises(
        ModelError, match=r"members: member 1 \(net 9\) has other classes than net 0: 5 there, 3 here\. Members"
    ):
        Members([models[0], model(9, classes=5)]).run(models[0], X, None)
    one, two = model(0, names=["cat", "dog", "owl"]), model(1, names=["cat", "owl", "dog"])
    with pytest.raises(
        ModelError, match=r"member 1 \(net 1\) has other classes than net 0: class 1 is 'owl' there and 'dog' here\."
    ):
        Members([one, two]).run(one, X, None)
    assert Members([one, model(1)]).run(one, X, None)  # names that nobody knows may be the same


def test_members_with_another_transform_are_sent_to_tables(models):
    with pytest.raises(ModelError) as error:
        Members([models[0], model(9, size=12)]).run(models[0], X, None)
    assert str(error.value) == (
        "members: member 1 (net 9) has another transform than net 0, which is extracted: size=[12, 12] there, [8, 8] "
        "here. Extract each model with its own transform, and join the tables: dubito.ensemble([table_a, ...])."
    )


def test_what_may_be_kept(models):
    with pytest.raises(ValueRangeError, match="keep must be one of summary, logits; got 'all'"):
        Members.__init__.__wrapped__(Members.__new__(Members), models, keep="all")  # past the type checks of the tests


@pytest.fixture
def files(tmp_path):
    """The weights of three networks, in three kinds of file."""
    save_file(network(10).state_dict(), tmp_path / "a.safetensors")
    torch.save(network(11).state_dict(), tmp_path / "b.pt")
    torch.save({"state_dict": {f"module.{key}": v for key, v in network(12).state_dict().items()}}, tmp_path / "c.pth")
    return [tmp_path / "a.safetensors", tmp_path / "b.pt", str(tmp_path / "c.pth")]


def test_checkpoints(models, files):
    probe = Members.checkpoints(models[0], files, keep="logits")
    assert (probe.name, len(probe), probe.price) == ("checkpoints", 3, "3 forward passes")
    columns = probe.run(models[0], X, LABEL)
    assert set(columns) == {"checkpoints", "checkpoints_loss", "checkpoints_logit"}
    for place, seed in enumerate((10, 11, 12)):
        with torch.no_grad():
            torch.testing.assert_close(columns["checkpoints_logit"][:, place], network(seed).eval()(X))


def test_settings_of_checkpoints_are_those_of_every_ensemble(models, files):
    shown = [name for name, one in signature(Members.checkpoints).parameters.items() if one.kind is one.KEYWORD_ONLY]
    assert shown == [each.name for each in fields(EnsembleProbe) if each.init]
    probe = Members.checkpoints(models[0], files, keep="logits", temperature=2.0, variance=True)
    assert (probe.keep, probe.temperature, probe.variance) == ("logits", 2.0, True)


def test_checkpoints_that_are_not_safe_or_do_not_fit(models, files, tmp_path):
    torch.save({**network(0).state_dict(), "args": np.random.default_rng(0)}, tmp_path / "objects.pt")
    with pytest.raises(CheckpointError, match="holds Python objects besides tensors"):
        Members.checkpoints(models[0], [files[0], tmp_path / "objects.pt"])
    save_file(network(0, classes=4).state_dict(), tmp_path / "wide.safetensors")
    with pytest.raises(CheckpointError, match="does not fit Sequential: 2 of another shape"):
        Members.checkpoints(models[0], [files[0], tmp_path / "wide.safetensors"])
    with pytest.raises(ModelError, match="checkpoints: an ensemble has at least two members; got 1"):
        Members.checkpoints(models[0], files[:1])
    with pytest.raises(ModelError, match=r"checkpoints: paths must be a list of files; got 'weights.pt'"):
        Members.checkpoints(models[0], "weights.pt")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_objects_beside_the_weights_of_a_member_are_never_executed(models, files, tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "objects.pt"
    torch.save({"state_dict": network(0).state_dict(), "args": Bomb(marker)}, path)
    members = Members.checkpoints(models[0], [files[1], path]).settings()["members"]
    assert members[1] == models[0].fingerprint()["weights"]
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # it would have gone off


def test_identity_knows_every_weight(models, files):
    settings = Members(models).settings()
    assert settings["members"] == [one.fingerprint()["weights"] for one in models]
    assert (settings["keep"], settings["temperature"]) == ("summary", 1.0)
    three = Members.checkpoints(models[0], files).settings()["members"]
    assert len(set(three)) == 3
    assert Members(models[::-1]).settings() != settings
    assert Members(models[:5]).settings() != settings
    other = dubito.wrap(models[1].module, transform=models[1].transform, head="5", output="probabilities")
    assert Members([models[0], other]).settings()["members"] == [
        settings["members"][0],
        f"{settings['members'][1]} 5 probabilities",
    ]


def test_columns_of_a_cache(models, tmp_path):
    pixels = torch.randint(0, 256, (9, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    labels, folder = torch.arange(9) % 3, tmp_path / "cache"
    probes = [Members(models, keep="logits"), Views()]
    table = dubito.extract(
        models[0], pixels, folder, labels=labels, probes=probes, shard_size=4, batch_size=3, progress=False
    )
    assert table.shape("members") == (9, len(SUMMARY))
    assert table.shape("members_logit") == (9, 6, 3)
    assert table.shape("views_between") == (9, 2)
    torch.testing.assert_close(table.whole("members_logit")[:, 0], table.logit)
    again = dubito.extract(
        models[0], pixels, folder, labels=labels, probes=[Members(models, keep="logits")], shard_size=4
    )
    assert torch.equal(again.whole("members"), table.whole("members"))
    with pytest.raises(StaleCacheError, match=r"the settings of the members probe \(members=\["):
        dubito.extract(
            models[0], pixels, folder, labels=labels, probes=[Members(models[:5], keep="logits")], shard_size=4
        )


def test_its_words(models):
    assert repr(Members(models)) == "Members(members: 6 members, keep='summary', temperature=1)"
    assert (Members.name, Members.price) == ("members", "1 forward pass per member")
    assert isinstance(Members(models), Probe)


@dataclass(frozen=True)
class Ready(EnsembleProbe):
    """Members whose logits (m, n, c) are there, and counted as long as they live."""

    ready: torch.Tensor
    alive: list = field(default_factory=list)
    counts: list = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ready)

    def check(self, model, x) -> None: ...

    def logits(self, model, x):
        for one in self.ready:
            logits = one.clone()
            self.alive.append(weakref.ref(logits))
            yield logits
            del logits
            self.counts.append(sum(one() is not None for one in self.alive))


def test_twenty_four_members_in_every_partition():
    logits = 2 * torch.randn(24, 7, 5, generator=torch.Generator().manual_seed(0))
    columns = Ready(logits).run(model(0), X, None)
    assert [f"{count} x {size}" for count, size in sub_ensembles(24)] == [
        *("24 x 1", "12 x 2", "8 x 3", "6 x 4", "4 x 6", "3 x 8", "2 x 12")  # those of the paper's Figure 2
    ]
    assert columns["members_between"].shape == (7, 6)
    for place, size in enumerate((2, 3, 4, 6, 8, 12)):
        parts = chain_rule(partitioned(logits.softmax(-1), size))
        torch.testing.assert_close(columns["members_between"][:, place].double(), parts.between, rtol=1e-5, atol=1e-6)
    assert bool((columns["members_between"].mean(0).diff() < 0).all())  # larger sub-ensembles are more alike


def test_answers_are_not_kept():
    logits = torch.randn(6, 7, 3, generator=torch.Generator().manual_seed(0))
    for keep, most in (("summary", 1), ("logits", 6)):
        probe = Ready(logits, keep=keep)
        probe.run(model(0), X, LABEL)
        assert max(probe.counts) == most  # one is in the loop that has just used it
