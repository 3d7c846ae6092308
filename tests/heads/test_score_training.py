"""Several seeds in one run: what they reached, where they are, and that they go on after a stop."""

import json
import os
import re
import statistics
from datetime import datetime, timedelta, timezone

import matplotlib.pyplot as plt
import pytest
import torch

from dubito import metrics
from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads import Recipe, loop
from dubito.heads.checkpoint import read_config
from dubito.heads.score import Training, train
from dubito.scores import UncertaintyHead
from dubito.table import Table

RECIPE = Recipe(batch=20, rows=1_000)
SMALL = {"recipe": RECIPE, "width": 8, "depth": 1, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def table_of(n: int = 200, seed: int = 0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=generator)
    feature = torch.randn(n, 6, generator=generator)
    feature[:, 2:6] += 1.5 * torch.eye(4)[label]
    return Table(feature=feature, loss=feature[:, 0].exp(), label=label)


def test_several_seeds(tmp_path):
    held_out = table_of(100, seed=1)
    result = train(table_of(), tmp_path / "heads", seeds=(3, 1, 2), held_out=held_out, **SMALL)
    assert [head.seed for head in result.heads] == [3, 1, 2]
    assert result.folders == tuple(tmp_path / "heads" / f"seed-{seed}" for seed in (3, 1, 2))
    reached = []
    for head, history, folder in zip(result.heads, result.histories, result.folders, strict=True):
        u = head.score(held_out)
        reached.append(metrics.r_auroc(u, held_out.feature, held_out.label))
        assert history[-1]["r_auroc"] == pytest.approx(reached[-1], abs=1e-12)
        assert torch.equal(UncertaintyHead.from_pretrained(folder).score(held_out), u)
        alone = UncertaintyHead(width=8, depth=1, seed=head.seed, recipe=RECIPE).fit(table_of())
        assert torch.equal(alone.score(held_out), u)
    assert len(set(reached)) == 3
    median = statistics.median(reached)
    spread = max(max(reached) - median, median - min(reached))
    assert result.summary()["r_auroc"] == pytest.approx((median, spread))
    assert result.head is result.heads[reached.index(median)]
    assert re.match(r"3 heads\ntraining loss +0\.", str(result))
    assert result.facts()["held-out R-AUROC"] == f"{median:.4f} ± {spread:.4f}"
    assert [record["r_auroc"] for record in result.records()] == pytest.approx(reached)


def test_the_report(tmp_path):
    result = train(table_of(), tmp_path, seeds=(1, 2), **SMALL)
    report = json.loads((tmp_path / "training.json").read_text())
    ago = datetime.now(timezone.utc) - datetime.fromisoformat(report.pop("finished"))
    assert timedelta(0) <= ago < timedelta(minutes=5)
    assert report == json.loads(json.dumps(result.to_dict())) | {"folders": ["seed-1", "seed-2"]}
    assert report["seeds"] == [1, 2]
    assert result.folders == (tmp_path / "seed-1", tmp_path / "seed-2")
    assert report["summary"].keys() == {"loss"}
    assert [history[-1]["step"] for history in report["histories"]] == [50, 50]


def test_which_head_is_the_median_one():
    def of(*values: float, name: str = "r_auroc") -> Training:
        heads = tuple(UncertaintyHead(seed=seed) for seed in range(len(values)))
        return Training(heads, tuple([{"step": 1, "loss": 0.1}, {"loss": 0.1, name: value}] for value in values))

    assert of(0.7, 0.5, 0.6).head.seed == 2
    assert of(0.7, 0.5, 0.6, 0.8).head.seed == 0  # the better of 0.6 and 0.7
    assert of(0.9).head.seed == 0
    assert of(0.7, 0.5, 0.6, name="order").head.seed == 2
    assert of(0.7, 0.5, 0.6, name="other").head.seed == 0  # nothing held out: the first
    assert of(0.7, 0.5, 0.6).summary()["r_auroc"] == pytest.approx((0.6, 0.1))


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(table_of(), **SMALL)
    assert (result.folders, list(tmp_path.iterdir())) == ((), [])
    assert [head.seed for head in result.heads] == [1]
    assert re.match(r"1 head\ntraining loss +0\.", str(result))
    assert "No images were held out, so whether the head is better than max_probability" in str(result)


def test_called_again_it_goes_on(tmp_path, monkeypatch):
    undisturbed = train(table_of(), tmp_path / "undisturbed", seeds=(1, 2), **SMALL)
    step, done = loop.Run._step, []

    def counted(self, *rest):
        done.append(self.step)
        if len(done) == 80:  # in the second seed
            raise KeyboardInterrupt
        return step(self, *rest)

    monkeypatch.setattr(loop.Run, "_step", counted)
    with pytest.raises(KeyboardInterrupt):
        train(table_of(), tmp_path / "stopped", seeds=(1, 2), **SMALL)
    assert not (tmp_path / "stopped" / "training.json").exists()
    before = len(done)
    resumed = train(table_of(), tmp_path / "stopped", seeds=(1, 2), **SMALL)
    assert len(done) - before == 50  # the second seed only
    assert resumed.histories == undisturbed.histories
    for name in ("model.safetensors", "state.safetensors", "config.json"):
        for seed in ("seed-1", "seed-2"):
            ours, theirs = (tmp_path / place / seed / name for place in ("stopped", "undisturbed"))
            assert ours.read_bytes() == theirs.read_bytes()
    more = train(table_of(), tmp_path / "stopped", seeds=(1, 2, 3), **SMALL)
    assert len(more.heads) == 3


def test_the_time_is_new_if_and_only_if_a_seed_was_trained(tmp_path, monkeypatch):
    path, long_ago = tmp_path / "mine" / "training.json", "2001-01-01T00:00:00+00:00"
    train(table_of(), path.parent, seeds=(1, 2), **SMALL)
    report = json.loads(path.read_text()) | {"finished": long_ago}
    path.write_text(json.dumps(report))
    monkeypatch.chdir(tmp_path)
    for spelt in (path.parent, "mine", "./mine/", "../" + tmp_path.name + "/mine"):
        train(table_of(), spelt, seeds=(1, 2), **SMALL)
        assert json.loads(path.read_text()) == report
    train(table_of(), "mine", seeds=(2,), **SMALL)  # another report, nothing trained
    one = json.loads(path.read_text())
    assert (one["seeds"], one["folders"], one["finished"]) == ([2], ["seed-2"], long_ago)
    train(table_of(), "mine", seeds=(1, 2, 3), **SMALL)
    assert json.loads(path.read_text())["finished"] > long_ago


def test_the_time_is_new_if_a_finished_report_is_reached_again_by_training(tmp_path):
    train(table_of(), tmp_path, **SMALL)
    path = tmp_path / "training.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"finished": "2001-01-01T00:00:00+00:00"}))
    (tmp_path / "seed-1" / "state.safetensors").unlink()
    train(table_of(), tmp_path, **SMALL)
    again = json.loads(path.read_text())
    assert again.pop("finished") >= report.pop("finished")
    assert again == report


@pytest.mark.parametrize("lost", [None, {"seeds": [1]}, []], ids=["no report", "without a time", "not a report"])
def test_a_lost_time_is_that_of_the_last_state(tmp_path, lost):
    train(table_of(), tmp_path, seeds=(1, 2), **SMALL)
    path = tmp_path / "training.json"
    path.unlink() if lost is None else path.write_text(json.dumps(lost))
    os.utime(tmp_path / "seed-1" / "state.safetensors", (86_400, 86_400))
    os.utime(tmp_path / "seed-2" / "state.safetensors", (3_600, 3_600))
    train(table_of(), tmp_path, seeds=(1, 2), **SMALL)
    assert json.loads(path.read_text())["finished"] == "1970-01-02T00:00:00+00:00"


def test_two_trainings_at_once_are_refused(tmp_path, monkeypatch):
    step, refused = loop.Run._step, []

    def meanwhile(self, *rest):
        if not refused:
            with pytest.raises(ArtefactError) as error:
                train(table_of(), tmp_path, seeds=(2,), **SMALL)
            refused.append(str(error.value))
        return step(self, *rest)

    monkeypatch.setattr(loop.Run, "_step", meanwhile)
    train(table_of(), tmp_path, **SMALL)
    assert refused == [
        f"another process is writing into '{tmp_path}'. Wait until it has ended, or choose another folder."
    ]
    assert not (tmp_path / "seed-2").exists()
    train(table_of(), tmp_path, seeds=(2,), **SMALL)


def test_another_training_there_is_refused(tmp_path):
    train(table_of(), tmp_path, **SMALL)
    with pytest.raises(ArtefactError, match=r"seed-1' holds another training: the losses"):
        train(table_of(seed=4), tmp_path, **SMALL)


def test_a_share_is_held_out_by_photograph(monkeypatch):
    base = table_of(60)
    crops = Table(
        feature=base.feature.repeat(3, 1) + 0.01 * torch.randn(180, 6, generator=torch.Generator().manual_seed(0)),
        loss=base.loss.repeat(3),
        label=base.label.repeat(3),
        image_index=torch.arange(60).repeat(3),
        epoch=torch.arange(3).repeat_interleave(60),
    )
    seen = {}
    real = UncertaintyHead.train

    def watched(self, table, **options):
        seen["train"], seen["out"] = table, options["held_out"]
        return real(self, table, **options)

    monkeypatch.setattr(UncertaintyHead, "train", watched)
    result = train(crops, held_out=0.25, **SMALL)
    assert (len(seen["train"]), len(seen["out"])) == (135, 45)
    assert not set(seen["train"].whole("image_index").tolist()) & set(seen["out"].whole("image_index").tolist())
    assert result.head.trained_["table_rows"] == 135
    out = seen["out"].rows(slice(0, 15))  # the first epoch
    expected = metrics.r_auroc(result.head.score(out), out.feature, out.label)
    assert result.histories[0][-1]["r_auroc"] == pytest.approx(expected, abs=1e-12)


def test_what_the_config_says(tmp_path):
    about = {"licence": "MIT", "trained": {"corpus": "Noise."}, "dtype": "float16"}
    result = train(table_of(), tmp_path, **SMALL, **about)
    config = read_config(result.folders[0])
    assert (config.licence, config.dtype) == ("MIT", "float16")
    assert config.trained["corpus"] == "Noise."
    assert config.trained["rows_seen"] == 1_000


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_seeds_without_meaning(seeds):
    with pytest.raises(ValueRangeError) as error:
        train(table_of(), seeds=seeds)
    expected = f"at least one whole number, all different; got {list(seeds)}. Pass seeds=[1, 2, 3]."
    assert str(error.value) == f"train: seeds must be {expected}"


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_shares_without_meaning(share):
    with pytest.raises(ValueRangeError, match=rf"^train: held_out must be a number in \(0, 1\); got {share}\."):
        train(table_of(), held_out=share)


def test_a_mistyped_option_is_reported_before_training():
    with pytest.raises(TypeError, match="seed"):
        train(table_of(40), seed=5)


def test_the_folder_of_a_training_is_its_median_head(tmp_path):
    result = train(table_of(), tmp_path / "mine", seeds=(1, 2, 3), held_out=0.3, **SMALL)
    loaded = UncertaintyHead.from_pretrained(tmp_path / "mine")
    assert loaded.seed == result.head.seed
    assert torch.equal(loaded.weights_, result.head.weights_)


def test_learning_curves_of_all_seeds():
    training = train(table_of(), seeds=(1, 2), held_out=table_of(60, seed=1), **SMALL)
    ax = training.plot()
    assert ax.get_ylabel() == "held-out R-AUROC"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["seed 1", "seed 2"]
    for line, history in zip(ax.lines, training.histories, strict=True):
        assert line.get_xydata().tolist() == [[entry["step"], entry["r_auroc"]] for entry in history]
    plt.close(ax.figure)
    alone = train(table_of(), **SMALL)
    ax = alone.plot()
    assert (ax.get_ylabel(), ax.get_legend()) == ("training loss", None)
    assert training.plot(ax, figure="order") is ax
    assert ax.get_ylabel() == "held-out order"
    with pytest.raises(ValueRangeError, match=r"^Training.plot: figure must be one of r_auroc, order, loss; got 'x'\."):
        training.plot(figure="x")
    with pytest.raises(ValueRangeError, match=r"figure must be one of loss; got 'order'\."):  # nothing was held out
        alone.plot(figure="order")
    plt.close(ax.figure)


def test_a_training_in_a_store_is_that_on_the_disk(bucket, tmp_path):
    table, places = table_of(), (f"{bucket}/head", tmp_path / "head")
    updates = [train(table, place, **SMALL).updates for place in places]
    remote, local = (UncertaintyHead.from_pretrained(place).score(table) for place in places)
    assert torch.equal(remote, local)
    assert updates[0] == updates[1] > 0
    assert train(table, places[0], **SMALL).updates == 0  # its state is there
