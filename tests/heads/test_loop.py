"""Training a head: it learns what can be learned, ends the same however it got there, and says when it cannot."""

import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from tests.heads.conftest import learnable, train_head
from torch import nn

from dubito import metrics
from dubito.errors import ArtefactError, ConstantHeadWarning, MissingColumnError, TableError, ValueRangeError
from dubito.heads import loop
from dubito.heads.loop import STATE, make_optimizer, optimizer_tensors, restore_optimizer, set_lr
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe
from dubito.heads.stream import Stream, dropped
from dubito.storage import read_tensors, write_tensors
from dubito.table import Provenance, Table

SHORT = Recipe(batch=20, rows=2_000)
"""100 steps on 400 rows."""
SMALL = {"width": 16, "depth": 1}
OPTIMIZERS = ["adamw", "adam", "sgd", "lion"]


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@torch.no_grad()
def predicted(trained, table: Table) -> torch.Tensor:
    return trained.head.module(table.feature)


def same(one, other) -> bool:
    pairs = zip(one.head.module.parameters(), other.head.module.parameters(), strict=True)
    return one.histories == other.histories and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_ranking_head_orders_images_that_it_has_not_seen():
    trained = train_head(learnable(1000), recipe=Recipe(rows=40_000, lr=3e-3), width=64)
    unseen = learnable(500, seed=9)
    assert spearmanr(predicted(trained, unseen), unseen.loss).statistic > 0.9


def test_an_l2_head_predicts_the_loss_itself():
    trained = train_head(learnable(1000), recipe=Recipe(loss="l2", rows=60_000, lr=3e-3), width=64)
    unseen = learnable(500, seed=9)
    error = (predicted(trained, unseen) - unseen.loss).square().mean()
    assert error < 0.02 * unseen.loss.var()


@pytest.mark.parametrize("loss", ["l1", "log_l2", "variance_nll"])
def test_the_other_direct_losses_predict_it_too(loss):
    trained = train_head(learnable(1000), recipe=Recipe(loss=loss, rows=40_000, lr=3e-3), width=64)
    unseen = learnable(500, seed=9)
    u = predicted(trained, unseen)
    assert spearmanr(u, unseen.loss).statistic > 0.9
    assert u.mean().item() == pytest.approx(unseen.loss.mean().item(), rel=0.2)


def test_a_head_can_learn_without_labels():
    feature = learnable(600).feature
    table = Table(feature=feature, logit=3 * feature[:, :3])
    trained = train_head(table, recipe=Recipe(target="expected", rows=40_000, lr=3e-3), width=64)
    entropy = torch.distributions.Categorical(logits=3 * feature[:, :3]).entropy()
    assert spearmanr(predicted(trained, table), entropy).statistic > 0.9


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 3e-3), ("adam", 3e-3), ("sgd", 0.3), ("lion", 1e-3)])
def test_every_optimizer_and_schedule_lowers_the_loss(optimizer, schedule, lr):
    recipe = replace(SHORT, optimizer=optimizer, schedule=schedule, lr=lr, warmup_lr=0.0)
    history = train_head(learnable(), recipe=recipe, **SMALL).histories[0]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]


def test_two_steps_by_hand():
    table = learnable(8)
    recipe = Recipe(batch=4, rows=8, episodes=2, warmup=1, warmup_lr=0.05, lr=0.4, weight_decay=0.5, final_lr=0.01)
    result = train_head(table, recipe=recipe, seed=3, **SMALL)
    head = HeadModule(8, seed=3, **SMALL)
    state = [(torch.zeros_like(one), torch.zeros_like(one)) for one in head.parameters()]
    # The second episode is the first after the warm-up: the peak, 0.4 sqrt(4 / 256) = 0.05, as high as the start.
    rates, losses = [0.05, 0.05], []
    for step, (rows, targets) in enumerate(Stream(table.feature, table.loss, 4, 3).batches(0, 2), start=1):
        u = head(rows)
        sign = torch.where(targets[0::2] > targets[1::2], 1.0, -1.0)
        loss = F.relu(0.1 - sign * (u[0::2] - u[1::2])).mean()
        gradients = torch.autograd.grad(loss, list(head.parameters()))
        losses.append(loss.item())
        with torch.no_grad():
            for one, gradient, (m, v) in zip(head.parameters(), gradients, state, strict=True):
                m.mul_(0.8).add_(0.2 * gradient)
                v.mul_(0.95).add_(0.05 * gradient**2)
                one.mul_(1 - rates[step - 1] * 0.5 * (one.dim() > 1))
                one.sub_(rates[step - 1] * (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8))
    for ours, theirs in zip(result.head.module.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert [entry["loss"] for entry in result.histories[0]] == pytest.approx(losses, rel=1e-5)
    assert [entry["lr"] for entry in result.histories[0]] == pytest.approx(rates)
    assert (result.updates, result.head.trained_["rows_seen"]) == (2, 8)


@pytest.mark.parametrize(("n", "batch"), [(101, 7), (9, 4), (2, 2), (3, 2), (50, 49), (10, 64)])
def test_odd_sizes(n, batch):
    trained = train_head(learnable(n), recipe=Recipe(batch=batch, rows=5 * n), **SMALL)
    assert all(bool(one.isfinite().all()) for one in trained.head.module.parameters())
    assert (
        trained.head.trained_["rows_seen"] <= (5 * n + batch) * (batch + 1) / batch
    )  # a single row left over joins another batch


def test_history():
    trained = train_head(learnable(), recipe=SHORT, held_out=learnable(100, seed=1), **SMALL)
    assert [entry["step"] for entry in trained.histories[0]] == list(range(5, 101, 5))
    assert all(entry.keys() == {"step", "lr", "loss", "r_auroc", "order"} for entry in trained.histories[0])
    assert trained.head.trained_["rows_seen"] == 2_000
    assert not trained.head.module.training


def test_what_is_held_out_is_measured_as_the_metric_does():
    held_out = learnable(200, seed=1)
    trained = train_head(learnable(), recipe=SHORT, held_out=held_out, **SMALL)
    u = predicted(trained, held_out)
    assert trained.histories[0][-1]["r_auroc"] == metrics.r_auroc(u, held_out.feature, held_out.label)


def test_what_is_held_out_is_not_learned_from():
    alone = train_head(learnable(), recipe=SHORT, **SMALL)
    watched = train_head(learnable(), recipe=SHORT, held_out=learnable(60, seed=1), **SMALL)
    assert torch.equal(predicted(alone, learnable()), predicted(watched, learnable()))


def test_the_bar_counts_rows_and_shows_how_far_it_has_come(monkeypatch):
    message = {}

    @contextmanager
    def bar(title, total, **options):
        message.update(title=title, total=total, **options, rows=options["done"], notes=[])

        def advance(count, note=None):
            message["rows"] += count
            message["notes"] += [note] if note is not None else []

        yield advance

    monkeypatch.setattr(loop, "bar", bar)
    recipe = Recipe(batch=20, rows=1_000)
    trained = train_head(learnable(105), recipe=recipe, held_out=learnable(50, seed=1), progress=True, seed=4, **SMALL)
    # 50 steps: eight passes of 20, 20, 20, 20, 20 and 5 rows, and two more batches.
    assert (message["total"], message["rows"], trained.head.trained_["rows_seen"]) == (880, 880, 880)
    assert (message["title"], message["unit"], message["done"], message["show"]) == ("train seed 4", "rows", 0, True)
    assert len(message["notes"]) == len(trained.histories[0])
    assert re.fullmatch(r"loss \d\.\d{4}  R-AUROC \d\.\d{4}  order \d\.\d{4}", message["notes"][-1])


def test_seeds_differ_and_repeat():
    table = learnable()
    one, again, other = (train_head(table, recipe=SHORT, seed=seed, **SMALL) for seed in (1, 1, 2))
    assert same(one, again)
    assert not torch.equal(predicted(one, table), predicted(other, table))


def test_nothing_outside_is_changed():
    table = learnable()
    before = {name: table.whole(name).clone() for name in table.columns}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train_head(table, recipe=SHORT, held_out=learnable(60, seed=1), **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert all(torch.equal(table.whole(name), before[name]) for name in before)


class Stopped(Exception):
    """Instead of a kill."""


@pytest.mark.parametrize(
    ("optimizer", "at"), [("adamw", 1), ("adamw", 37), ("adamw", 99), ("adam", 37), ("sgd", 37), ("lion", 37)]
)
def test_stopped_and_called_again_it_ends_with_the_same_bits(tmp_path, monkeypatch, optimizer, at):
    arguments = {"recipe": replace(SHORT, optimizer=optimizer), "held_out": learnable(60, seed=1), **SMALL}
    undisturbed = train_head(learnable(), folder=tmp_path / "undisturbed", **arguments)
    step = loop.Run._step

    def stopping(self, *rest):
        if self.step == at:
            raise Stopped
        return step(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_SECONDS_BETWEEN_STATES", -1.0)
        patch.setattr(loop.Run, "_step", stopping)
        with pytest.raises(Stopped):
            train_head(learnable(), folder=tmp_path / "stopped", **arguments)
    resumed = train_head(learnable(), folder=tmp_path / "stopped", **arguments)
    assert same(resumed, undisturbed)
    assert (tmp_path / "stopped" / STATE).read_bytes() == (tmp_path / "undisturbed" / STATE).read_bytes()


def test_a_finished_training_is_not_done_again(tmp_path, monkeypatch):
    first = train_head(learnable(), recipe=SHORT, folder=tmp_path / "deep" / "folder", **SMALL)
    monkeypatch.setattr(loop.Run, "_step", None)
    assert same(train_head(learnable(), recipe=SHORT, folder=tmp_path / "deep" / "folder", **SMALL), first)


def test_another_training_in_the_folder_is_refused(tmp_path):
    def again(text, table=None, held_out=None, **changes):
        arguments = {"recipe": SHORT, "seed": 1, **SMALL, **changes}
        with pytest.raises(ArtefactError, match="holds another training: ") as error:
            train_head(table or learnable(), folder=tmp_path, held_out=held_out, **arguments)
        assert text in str(error.value)

    train_head(learnable(), recipe=SHORT, folder=tmp_path, **SMALL)
    again("training: the recipe (lr=0.001 there, 0.5 here). Train", recipe=replace(SHORT, lr=0.5))
    again("training: the seed (1 there, 2 here). Train", seed=2)
    again("training: the head's width (16 there, 17 here). Train", width=17)
    again("training: the head's depth (1 there, 0 here). Train", depth=0)
    again("training: the losses (", table=learnable(seed=5))
    again("the number of rows (400 there, 401 here)", table=learnable(401))
    again("the width of the features (8 there, 9 here)", table=learnable(d=9))
    moved = Table(
        provenance=Provenance(weights="another"), **{name: learnable().whole(name) for name in ("feature", "loss")}
    )
    again(f"training: the model that made the table (none there, {moved.model_id[:8]} here). Train", table=moved)
    again("training: the held-out images (none there, ", held_out=learnable(30))


def test_two_trainings_at_once_are_refused(tmp_path, monkeypatch):
    step = loop.Run._step

    def meanwhile(self, *rest):
        with pytest.raises(ArtefactError, match=r"^another process is writing into '.*'\. Wait until it has ended, or"):
            train_head(learnable(), recipe=SHORT, folder=tmp_path, **SMALL)
        return step(self, *rest)

    monkeypatch.setattr(loop.Run, "_step", meanwhile)
    trained = train_head(learnable(), recipe=replace(SHORT, rows=60), folder=tmp_path, **SMALL)
    assert trained.updates == 3


def test_a_damaged_state_is_reported(tmp_path):
    train_head(learnable(), recipe=SHORT, folder=tmp_path, **SMALL)
    path = tmp_path / STATE
    tensors, notes = read_tensors(path)
    for changes in ({"step": "x"}, {"history": None}, {"identity": 3}):
        write_tensors(path, tensors, notes | changes)
        refused_state(path)
    write_tensors(path, {"other": torch.zeros(1)}, notes)
    refused_state(path)
    path.write_bytes(b"nothing")
    refused_state(path)


def refused_state(path):
    message = rf"(?s)^'{re.escape(str(path))}' cannot be read \(.*\)\. Delete it to train from the beginning\.$"
    with pytest.raises(ArtefactError, match=message):
        train_head(learnable(), recipe=SHORT, folder=path.parent, **SMALL)


def test_a_head_that_starts_at_zero_does_not_learn():
    held_out = learnable(100, seed=1)
    with pytest.warns(
        ConstantHeadWarning, match=r"^the trained head returns 0\.\d+ for every image: it has not learned"
    ):
        trained = train_head(learnable(), recipe=replace(SHORT, init="zero"), held_out=held_out, width=16)
    u = predicted(trained, learnable())
    assert float(u.max() - u.min()) == 0
    assert (trained.histories[0][-1]["r_auroc"], trained.histories[0][-1]["order"]) == (0.5, 0.5)


def test_features_that_say_nothing_make_a_constant_head():
    table = Table(feature=torch.ones(40, 3), loss=torch.rand(40, generator=torch.Generator().manual_seed(0)))
    with pytest.warns(ConstantHeadWarning, match="for every image: it has not learned anything"):
        train_head(table, recipe=SHORT, **SMALL)


def test_divergence_is_reported():
    recipe = Recipe(loss="l2", optimizer="sgd", lr=1e6, warmup_lr=1e6, batch=20, rows=2_000)
    with pytest.raises(ValueRangeError) as error:
        train_head(learnable(), recipe=recipe, **SMALL)
    assert str(error.value).startswith("head.fit: the training loss became ")
    assert str(error.value).endswith(", so the head has diverged. Lower the recipe's lr (1000000.0).")


def test_what_is_missing_or_does_not_fit():
    with pytest.raises(MissingColumnError, match=r"^head.fit needs column 'feature'; table in memory has loss"):
        train_head(Table(loss=[1.0, 2.0]))
    with pytest.raises(MissingColumnError, match=r"^held_out needs column 'feature'; table in memory has label"):
        train_head(learnable(), recipe=SHORT, held_out=Table(label=[1, 2]))
    with pytest.raises(TableError) as error:
        train_head(learnable(), recipe=SHORT, held_out=learnable(50, d=9))
    assert str(error.value) == (
        "head.fit: column 'feature' of held_out (table in memory) must be 8 wide, as in table in memory; got 9. "
        "Extract both with the same model."
    )
    ours = Table(name="ours", provenance=Provenance(weights="aa"), feature=learnable().feature, loss=learnable().loss)
    theirs = Table(
        name="theirs", provenance=Provenance(weights="bb"), feature=learnable().feature, loss=learnable().loss
    )
    with pytest.raises(TableError) as error:
        train_head(ours, recipe=SHORT, held_out=theirs)
    assert str(error.value) == (
        "head.fit: held_out (theirs) and ours must come from one model with one transform; the first comes from "
        "another: its weights differ (bb there, aa here): the backbone was fine-tuned or is another one. Extract both "
        "with the same model."
    )


_MEMORY = """
import os
import resource
import sys
from pathlib import Path

import torch

from dubito.cache.shards import shard_at, sharded_column, write_shard
from dubito.heads import stream
from dubito.heads import Recipe, UncertaintyHead
from dubito.table import Table

torch.set_num_threads(1)
stream._BUFFER_ROWS = 4096


def peak(count):
    folder = Path(sys.argv[1])
    columns = {"feature": torch.randn(512, 512), "loss": torch.rand(512)}
    first = write_shard(folder, "forward", 0, columns, {})
    paths = [folder / f"{count}-{index}" / first.name for index in range(count)]  # a shard must keep its name
    for path in paths:
        path.parent.mkdir()
        os.link(first.path, path)
    shards = [(shard_at(path), 512) for path in paths]
    table = Table(feature=sharded_column(shards, "feature", (512,)), loss=sharded_column(shards, "loss"))
    UncertaintyHead(width=16, recipe=Recipe(batch=256, rows=len(table))).train(table)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


print(-peak(40) + peak(300))
"""


def test_memory_does_not_grow_with_the_table(tmp_path):
    pytest.importorskip("resource")
    command = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    grown = subprocess.run(command, capture_output=True, check=True, text=True, timeout=120).stdout
    assert float(grown) < 60  # megabytes; the larger table has 260 more


def test_dropout_changes_the_course_and_is_as_repeatable(tmp_path):
    table = Table(feature=torch.rand(200, 8), loss=torch.rand(200))
    plain, thin, again = (
        train_head(table, recipe=Recipe(dropout=share, rows=2000, batch=100), width=16).head.module.state_dict()
        for share in (0.0, 0.5, 0.5)
    )
    key = "layers.0.weight"
    assert torch.equal(thin[key], again[key])
    assert not torch.equal(thin[key], plain[key])


def test_dropout_keeps_the_mean_of_a_feature():
    # What is kept is scaled by 1 / (1 - 0.8) = 5.
    thinned = dropped(torch.ones(2000, 50), 0.8, 0, 0)
    assert sorted(set(thinned.flatten().tolist())) == [0.0, pytest.approx(5.0)]
    assert thinned.mean().item() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(dropped(torch.ones(2000, 50), 0.8, 0, 1), thinned)


def test_a_state_of_other_features_is_refused(tmp_path):
    first, second = (Table(feature=torch.randn(100, 4), loss=torch.linspace(0, 1, 100)) for _ in range(2))
    train_head(first, recipe=SHORT, folder=tmp_path, **SMALL)
    with pytest.raises(ArtefactError, match="holds another training: the features"):
        train_head(second, recipe=SHORT, folder=tmp_path, **SMALL)


def test_what_is_trained_on_cannot_be_held_out():
    table = Table(feature=torch.randn(100, 4), loss=torch.rand(100), label=torch.arange(100) % 3)
    with pytest.raises(TableError, match="is trained on and cannot be held out"):
        train_head(table, recipe=SHORT, held_out=table, **SMALL)


def linear() -> nn.Linear:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
        layer.bias.fill_(0.5)
    return layer


def test_two_steps_of_adamw_by_hand():
    recipe = Recipe(lr=0.1, weight_decay=0.25, betas=(0.8, 0.95))
    layer = linear()
    optimizer = make_optimizer(layer, recipe)
    gradients = [(torch.tensor([[0.3, -0.4]]), torch.tensor([2.0])), (torch.tensor([[-0.1, 0.2]]), torch.tensor([1.0]))]
    expected = {"weight": torch.tensor([[1.0, -2.0]]).double(), "bias": torch.tensor([0.5]).double()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step, pair in enumerate(gradients, start=1):
        layer.weight.grad, layer.bias.grad = pair
        optimizer.step()
        for name, gradient in zip(("weight", "bias"), pair, strict=True):
            g = gradient.double()
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            m, v = first[name] / (1 - 0.8**step), second[name] / (1 - 0.95**step)
            decay = 0.25 if name == "weight" else 0.0
            expected[name] = expected[name] * (1 - 0.1 * decay) - 0.1 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(layer.weight.double(), expected["weight"], rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.bias.double(), expected["bias"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decay", [0.5, 0.0])
def test_without_a_gradient_decay_alone_moves_matrices_and_nothing_moves_biases(name, decay):
    layer = linear()
    optimizer = make_optimizer(layer, Recipe(optimizer=name, lr=0.1, weight_decay=decay))
    layer.weight.grad, layer.bias.grad = torch.zeros(1, 2), torch.zeros(1)
    optimizer.step()
    assert layer.bias.tolist() == [0.5]
    assert (layer.weight.tolist() == [[1.0, -2.0]]) == (decay == 0)
    assert layer.weight.detach().abs().sum().item() <= 3
    assert layer.weight.detach().sign().tolist() == [[1, -1]]


def test_every_parameter_of_a_head_is_in_one_group():
    head = HeadModule(3, width=4)
    matrices, vectors = make_optimizer(head, Recipe()).param_groups
    assert [tuple(one.shape) for one in matrices["params"]] == [(4, 3), (4, 4), (1, 4)]
    assert [tuple(one.shape) for one in vectors["params"]] == [(4,), (4,), (1,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (1e-4, 0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_learning_rate_is_set_in_all_groups(name):
    optimizer = make_optimizer(linear(), Recipe(optimizer=name))
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def steps(head: HeadModule, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        head(rows).square().mean().backward()
        set_lr(optimizer, 0.01 / (1 + step))
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_put_back_it_goes_on_with_the_same_bits(name):
    recipe = Recipe(optimizer=name)
    whole = HeadModule(3, width=4)
    optimizer = make_optimizer(whole, recipe)
    steps(whole, optimizer, 0, 6)

    begun = HeadModule(3, width=4)
    before = make_optimizer(begun, recipe)
    steps(begun, before, 0, 3)
    kept = {key: value.clone() for key, value in optimizer_tensors(before).items()}
    again = HeadModule(3, width=4, seed=9)
    again.load_state_dict(begun.state_dict())
    after = make_optimizer(again, recipe)
    restore_optimizer(after, kept)
    steps(again, after, 3, 6)

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True))
    ours, theirs = optimizer_tensors(after), optimizer_tensors(optimizer)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
