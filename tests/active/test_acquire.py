"""Picks and loops: every strategy, edges, and a loop that is killed and goes on."""

import csv
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import dubito
from dubito import Acquire, Table
from dubito.active import LinearTrainer
from dubito.choices import Strategy
from dubito.errors import ArtefactError, DubitoWarning, MissingColumnError, TableError, ValueRangeError

STRATEGIES = get_args(Strategy)
pytestmark = pytest.mark.usefixtures("one_thread")


def images(n: int = 120, seed: int = 0) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (n,), generator=draw)
    feature = 2 * torch.eye(3, 6)[label] + torch.randn(n, 6, generator=draw)
    return Table(
        feature=feature,
        logit=feature[:, :3],
        members_logit=feature[:, None, :3] + torch.randn(n, 4, 3, generator=draw),
        label=label,
        id=[f"photo, {i}" for i in range(n)],
    )


def written(folder: Path) -> list[dict[str, str]]:
    with (folder / "picks.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_picks_are_new_distinct_and_repeatable(strategy):
    table, labelled = images(), list(range(0, 40, 2))
    picks = Acquire(strategy, seed=5).pick(table, 20, labelled=labelled)
    assert len(set(picks.rows.tolist())) == 20
    assert not set(picks.rows.tolist()) & set(labelled)
    assert picks.ids == [f"photo, {row}" for row in picks.rows]
    again = Acquire(strategy, seed=5).pick(table, 20, labelled=torch.tensor(labelled))
    assert again.rows.tolist() == picks.rows.tolist()


@pytest.mark.parametrize("strategy", ["random", "softmax", "power", "softrank", "seeding"])
def test_another_round_or_seed_draws_others(strategy):
    table, one = images(), Acquire(strategy)
    first = one.pick(table, 20).rows.tolist()
    assert one.pick(table, 20, round=1).rows.tolist() != first
    assert Acquire(strategy, seed=1).pick(table, 20).rows.tolist() != first


def test_top_goes_by_any_score_and_bald_by_mutual_information():
    table = images()
    energy = dubito.Energy().score(table)
    assert Acquire("top", dubito.Energy()).pick(table, 3).rows.tolist() == energy.topk(3).indices.tolist()
    information = dubito.MutualInformation().score(table)
    picks = Acquire("bald").pick(table, 3)
    assert picks.rows.tolist() == information.topk(3).indices.tolist()
    assert picks.u == pytest.approx(information.topk(3).values.numpy())
    u = np.arange(120.0)
    assert Acquire("top").pick(table, 2, u=u, labelled=[119]).rows.tolist() == [118, 117]


def test_a_score_that_learns_is_fitted_on_the_labelled_rows_and_left_as_it_was():
    table, score = images(), dubito.Neighbours(k=1)
    picks = Acquire("top", score).pick(table, 3, labelled=range(10))
    expected = dubito.Neighbours(k=1).fit(table.rows(range(10))).score(table)
    assert picks.u == pytest.approx(expected[picks.rows].numpy())
    assert not score.is_fitted


@pytest.mark.parametrize("score", [dubito.Neighbours(), dubito.Temperature()])
def test_a_score_that_learns_needs_labelled_rows(score):
    message = (
        rf"{score.name} learns .* no rows of table in memory are labelled\. Pass labelled=\.\.\., or a fitted score"
    )
    with pytest.raises(TableError, match=message):
        Acquire("top", score).pick(images(), 3)
    fitted = deepcopy(score).fit(images(seed=1))
    assert len(Acquire("top", fitted).pick(images(), 3)) == 3


def test_by_default_images_are_drawn_by_their_entropy():
    """As u^beta: a sure image is as good as never drawn, and no two rounds are alike."""
    table = Table(logit=[[0.0, 0.0]] * 20 + [[60.0, 0.0]] * 20)
    drawn = [Acquire().pick(table, 5, round=i).rows.tolist() for i in range(4)]
    assert max(map(max, drawn)) < 20
    assert len({tuple(rows) for rows in drawn}) == 4
    assert Acquire().strategy == "power"
    with pytest.raises(ValueRangeError, match=r"are not negative; .* Choose 'softrank'"):
        Acquire(score=dubito.Energy()).pick(table, 5)


def test_more_picks_than_the_pool_takes_all_and_says_so():
    table = images(10)
    with pytest.warns(DubitoWarning, match="count is 20, but only 8 of the 10 images of table in memory are not"):
        picks = Acquire("top").pick(table, 20, labelled=[0, 1])
    assert sorted(picks.rows.tolist()) == list(range(2, 10))
    with pytest.warns(DubitoWarning, match="0 of the 10"):
        assert len(Acquire("core_set").pick(table, 1, labelled=range(10))) == 0


def test_what_cannot_be_requested_is_refused():
    table = images(10)
    with pytest.raises(TableError, match="acquire: table needs at least 1 row"):
        Acquire().pick(table.rows([]), 1)
    with pytest.raises(ValueRangeError, match=r"count must be a whole number, at least 1; got 0\. 100 are usual"):
        Acquire().pick(table, 0)
    with pytest.raises(ValueRangeError, match="acquire: score 'u': 1 of 10 values are NaN"):
        Acquire().pick(table, 1, u=[float("nan"), *range(9)])
    with pytest.raises(
        TableError,
        match=r"must be a slice, a mask of 10 booleans or indices below 10; got torch.int64 of shape \(1,\), up to 10",
    ):
        Acquire().pick(table, 1, labelled=[10])
    with pytest.raises(TableError, match=r"got torch.bool of shape \(3,\)"):
        Acquire().pick(table, 1, labelled=torch.ones(3, dtype=torch.bool))
    with pytest.raises(MissingColumnError, match=r"mutual_information\.score needs column 'members'"):
        Acquire("bald").pick(table.select("logit"), 1)
    with pytest.raises(MissingColumnError, match="strategy 'core_set' needs column 'feature'"):
        Acquire("core_set").pick(table.select("logit"), 1)
    with pytest.raises(ValueRangeError, match=r"beta must be a number, above 0; got nan"):
        Acquire("power", beta=float("nan"))
    with pytest.raises(ValueRangeError, match=r"'bald' uses the mutual information .* takes no score; got energy"):
        Acquire("bald", dubito.Energy())
    with pytest.raises(ValueRangeError, match=r"'batch_bald' .* takes no uncertainties; got some"):
        Acquire("batch_bald").pick(table, 1, u=np.zeros(10))


def test_csv_has_id_round_u_and_rank(tmp_path):
    table = images()
    path = Acquire("top").pick(table, 3, round=2).to_csv(tmp_path / "new" / "picks.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    u = dubito.Entropy().score(table)
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert {row["round"] for row in rows} == {"2"}
    assert [float(row["u"]) for row in rows] == u.topk(3).values.tolist()
    assert rows[0]["id"] == f"photo, {int(u.argmax())}"
    assert Acquire("random").pick(table, 1).records()[0]["u"] is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_learns(strategy):
    result = Acquire(strategy).run(images(), rounds=3, count=10, start=6, test=images(100, 1))
    assert [labelled for labelled, _ in result.curve] == [6, 16, 26, 36]
    assert result.curve[-1][1] > 0.6
    assert len(set(result.labelled.tolist())) == 36
    assert "36" in str(result)


def test_a_loop_over_files_whose_names_are_not_utf8():
    table = images(12).extended(id=[f"{i}\udcff.jpg" for i in range(12)])
    result = Acquire("top").run(table, rounds=1, count=3, start=6)
    assert all(name.endswith("\udcff.jpg") for name in result.rounds[0].picks.ids)


def test_a_loop_ends_when_nothing_is_left(tmp_path):
    calls = []

    def trainer(table, rows):
        calls.append(len(rows))
        return dubito.Margin()

    options = {"rounds": 9, "count": 8, "start": 6, "trainer": trainer, "to": tmp_path}
    result = Acquire("top").run(images(20), **options)
    assert Acquire("top").run(images(20), **options).to_dict() == result.to_dict()
    assert calls == [6, 14, 20]  # and is not trained again
    assert [labelled for labelled, _ in result.curve] == [6, 14, 20]
    assert result.rounds[-1].picks is None
    assert result.rounds[-1].accuracy is None


@pytest.mark.parametrize(
    "answer",
    [
        lambda table, rows: dubito.Margin(),
        lambda table, rows: dubito.Margin().score(table),
        lambda table, rows: dubito.Margin().score(table).tolist(),
        lambda table, rows: table.extended(logit=table.logit * 2),
    ],
    ids=["score", "array", "list", "table"],
)
def test_a_trainer_may_return_a_score_uncertainties_or_a_table(answer):
    table, seen = images(), []

    def trainer(pool, rows):
        seen.append(rows.tolist())
        return answer(pool, rows)

    result = Acquire("top").run(table, rounds=2, count=5, start=[7, 3], trainer=trainer, test=table)
    assert seen[0] == [3, 7]
    assert len(seen) == 3
    assert seen[1] == sorted([3, 7, *result.rounds[0].picks.rows.tolist()])


class Forgetful:
    def extend(self, table):
        table.extended(logit=table.logit)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda table: table.rows([0, 1, 2]), r"the pool with other columns or .*; got a table of 3 rows\. End it"),
        (
            lambda table: table.rows(list(range(119, -1, -1))),
            "got a table with other ids, or in another order",
        ),
        (lambda table: None, r"must return a Score, uncertainties \(120,\), .*; got None\. End it with return"),
        (lambda table: table.logit, r"got Tensor of shape \(120, 3\)\. .* return pool\.extended\(logit=\.\.\.\)"),
        (lambda table: {"accuracy": 0.9}, r"; got dict\. End it"),
        (lambda table: [0.5] * 7, r"; got list of shape \(7,\)\. End it"),
        (lambda table: "done", r"; got str\. End it"),
        (lambda table: Forgetful(), r"extend\(table\) of Forgetful, .*, must return a table; got NoneType"),
    ],
)
def test_a_trainer_that_returns_something_else_is_refused(answer, message):
    with pytest.raises(TableError, match=message):
        Acquire("top").run(images(), rounds=1, count=1, start=2, trainer=lambda table, rows: answer(table))


def test_a_trainer_may_spoil_the_rows_that_it_is_given():
    def trainer(table, rows):
        rows += 50
        return dubito.Margin()

    result = Acquire("top").run(images(), rounds=2, count=5, start=[7, 3], trainer=trainer)
    assert len(set(result.labelled.tolist())) == 12


def test_a_loop_never_trains_on_images_without_label_whoever_trains():
    nothing = images().extended(label=torch.full((120,), -1))
    with pytest.raises(TableError, match=r"acquire: 2 of 2 rows of"):
        Acquire().run(nothing, rounds=1, count=1, start=2, trainer=lambda table, rows: dubito.Margin())
    # A trainer that keeps its labels elsewhere.
    bare = nothing.select("logit", "id")
    result = Acquire("top").run(bare, rounds=1, count=1, start=2, trainer=lambda table, rows: dubito.Margin())
    assert len(result.labelled) == 3


def test_a_loop_waits_for_labels_and_goes_on_when_they_are_there(tmp_path):
    """A pool of which only the first rows are labelled, as people have it."""
    whole = images()
    partly = whole.extended(label=torch.where(torch.arange(120) < 10, whole.label, -1))
    options = {"rounds": 2, "count": 5, "start": range(10), "to": tmp_path}
    with pytest.raises(
        TableError, match=r"5 of 15 rows of .* have no label yet \(-1\): 'photo, .* and 2 more. Label them"
    ) as caught:
        Acquire("top").run(partly, **options)
    where = f"They are in {tmp_path / 'picks.csv'}: fill in its column label."
    assert str(caught.value).endswith(f"run the same call again. {where}")
    requested = [int(row["id"].split()[1]) for row in written(tmp_path)]
    label = partly.label.clone()
    label[requested] = whole.label[requested]
    with pytest.raises(TableError, match="5 of 20 rows of"):
        Acquire("top").run(partly.extended(label=label), **options)
    result = Acquire("top").run(whole, **options)
    assert result.labelled.tolist()[10:15] == requested
    assert len(result.labelled) == 20


def test_a_loop_can_start_without_any_label(tmp_path):
    whole = images()
    options = {"rounds": 2, "count": 5, "start": 10}
    nothing = whole.extended(label=torch.full((120,), -1))
    with pytest.raises(TableError, match="10 of 10 rows of") as caught:
        Acquire("power").run(nothing, **options, to=tmp_path)
    assert f"They are in {tmp_path / 'picks.csv'}: " in str(caught.value)
    expected = Acquire("power").run(whole, **options)
    begun = written(tmp_path)
    assert [row["id"] for row in begun] == [f"photo, {row}" for row in expected.start]
    assert {(row["round"], row["u"]) for row in begun} == {("", "")}
    assert [row["rank"] for row in begun] == [str(rank) for rank in range(1, 11)]
    label = torch.full((120,), -1)
    label[expected.start] = whole.label[expected.start]
    with pytest.raises(TableError, match="5 of 15 rows of"):
        Acquire("power").run(whole.extended(label=label), **options, to=tmp_path)
    assert [row["id"] for row in written(tmp_path)] == expected.rounds[0].picks.ids
    assert Acquire("power").run(whole, **options, to=tmp_path).to_dict() == expected.to_dict()
    assert expected.to_csv(tmp_path / "other.csv").read_bytes() == (tmp_path / "picks.csv").read_bytes()


def test_without_a_folder_the_images_to_label_are_named():
    nothing = images().extended(label=torch.full((120,), -1))
    with pytest.raises(TableError, match=r"\(-1\): 'photo, 4', 'photo, 7'. Label them, and run the same call again\.$"):
        Acquire().run(nothing, rounds=1, count=1, start=[7, 4])


def test_a_loop_that_waits_for_its_first_labels_keeps_its_start_and_may_change_the_rest(tmp_path):
    nothing = images().extended(label=torch.full((120,), -1))
    with pytest.raises(TableError, match="10 of 10 rows of"):
        Acquire("top").run(nothing, rounds=1, count=5, start=10, to=tmp_path)
    before = (tmp_path / "picks.csv").read_bytes()
    with pytest.raises(ArtefactError, match=r"another loop; these arguments differ: start\. Use"):
        Acquire("top").run(nothing, rounds=1, count=5, start=8, to=tmp_path)
    with pytest.raises(ArtefactError, match=r"another loop; these arguments differ: pool\. Use another"):
        Acquire("top").run(images(seed=1), rounds=1, count=5, start=10, to=tmp_path)
    assert (tmp_path / "picks.csv").read_bytes() == before
    result = Acquire("random").run(images(), rounds=1, count=4, start=10, to=tmp_path)
    assert result.to_dict() == Acquire("random").run(images(), rounds=1, count=4, start=10).to_dict()


def test_a_first_choice_that_fails_can_be_mended_in_the_same_folder(tmp_path):
    options = {"rounds": 1, "count": 3, "start": 5, "trainer": lambda table, rows: dubito.Energy(), "to": tmp_path}
    with pytest.raises(ValueRangeError, match="Choose 'softrank', which uses the order alone"):
        Acquire().run(images(), **options)
    assert len(Acquire("softrank").run(images(), **options).labelled) == 8


def test_a_loop_without_a_start_leaves_the_folder_free(tmp_path):
    with pytest.raises(TableError, match=r"at least one labelled row; got none\. Begin with start=10 or more"):
        Acquire().run(images(), rounds=1, count=3, start=0, to=tmp_path)
    assert len(Acquire().run(images(), rounds=1, count=3, start=10, to=tmp_path).labelled) == 13


def test_a_csv_that_cannot_be_written_is_reported(tmp_path):
    with pytest.raises(ArtefactError, match=r"cannot be saved .*\(Is a directory\)\. Choose another place"):
        Acquire().pick(images(10), 1).to_csv(tmp_path)


class Stop(Exception):
    pass


@pytest.mark.parametrize("strategy", ["batch_bald", "power", "seeding"])
def test_a_loop_that_stops_goes_on_and_ends_the_same(strategy, tmp_path):
    options = {"rounds": 4, "count": 5, "start": 6, "test": images(50, 1)}
    whole = Acquire(strategy).run(images(), **options)
    calls = []

    class Stopping:
        def __call__(self, table, rows):
            calls.append(len(rows))
            if len(calls) == 3:
                raise Stop
            return LinearTrainer(members=20)(table, rows)

    trainer = Stopping()
    with pytest.raises(Stop):
        Acquire(strategy).run(images(), **options, trainer=trainer, to=tmp_path)
    assert len((tmp_path / "picks.csv").read_text().splitlines()) == 11
    result = Acquire(strategy).run(images(), **options, trainer=trainer, to=tmp_path)
    assert calls == [6, 11, 16, 16, 21, 26]  # the two rounds that were done are not done again
    again = Acquire(strategy).run(images(), **options, trainer=trainer, to=tmp_path)
    assert len(calls) == 6
    assert again.to_dict() == result.to_dict()
    if strategy == "batch_bald":  # the same trainer as in the whole loop
        assert result.to_dict() == whole.to_dict()


def test_a_killed_process_loses_no_round(tmp_path):
    code = """
import os, sys, torch, dubito
from dubito.active import LinearTrainer
draw = torch.Generator().manual_seed(0)
pool = dubito.Table(feature=torch.randn(100, 5, generator=draw), label=torch.randint(3, (100,), generator=draw))
class Trainer:
    def __call__(self, table, rows):
        return LinearTrainer()(table, rows) if len(rows) < 16 else os._exit(9)
dubito.Acquire("power").run(pool, rounds=3, count=5, start=6, trainer=Trainer(), to=sys.argv[1])
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert killed.returncode == 9, killed.stderr
    draw = torch.Generator().manual_seed(0)
    pool = Table(feature=torch.randn(100, 5, generator=draw), label=torch.randint(3, (100,), generator=draw))

    class Trainer:
        __qualname__ = "Trainer"

        def __call__(self, table, rows):
            assert len(rows) >= 16, "the first two rounds are done"
            return LinearTrainer()(table, rows)

    result = Acquire("power").run(pool, rounds=3, count=5, start=6, trainer=Trainer(), to=tmp_path)
    assert result.to_dict() == Acquire("power").run(pool, rounds=3, count=5, start=6).to_dict()


def test_a_finished_loop_can_be_prolonged(tmp_path):
    short = Acquire("power").run(images(), rounds=2, count=5, start=6, to=tmp_path)
    longer = Acquire("power").run(images(), rounds=3, count=5, start=6, to=tmp_path)
    assert longer.labelled.tolist()[:16] == short.labelled.tolist()
    assert longer.to_dict() == Acquire("power").run(images(), rounds=3, count=5, start=6).to_dict()
    again = Acquire("power").run(images(), rounds=2, count=5, start=6, to=tmp_path)
    assert (again.curve, again.labelled.tolist()) == (short.curve, short.labelled.tolist())


def test_another_loop_in_the_same_folder_is_refused(tmp_path):
    Acquire("top").run(images(), rounds=1, count=5, start=6, to=tmp_path)
    with pytest.raises(
        ArtefactError, match=r"holds another loop; these arguments differ: strategy\. Use another folder"
    ):
        Acquire("random").run(images(), rounds=1, count=5, start=6, to=tmp_path)
    with pytest.raises(ArtefactError, match="differ: pool, start"):
        Acquire("top").run(images(121), rounds=1, count=5, start=[*range(6)], to=tmp_path)
    with pytest.raises(ArtefactError, match=r"another loop; these arguments differ: beta, samples\. Use"):
        Acquire("top", beta=2.0, samples=9).run(images(), rounds=1, count=5, start=6, to=tmp_path)
    for damaged in ("{", "[]", '{"identity": 3, "rounds": []}'):
        (tmp_path / "acquisition.json").write_text(damaged)
        with pytest.raises(ArtefactError, match=r"cannot be read .* Delete it to start over"):
            Acquire("top").run(images(), rounds=1, count=5, start=6, to=tmp_path)


def test_json_is_plain():
    result = Acquire("core_set").run(images(30), rounds=1, count=2, start=3, test=images(20, 1))
    assert json.loads(json.dumps(result.to_dict()))["rounds"][0]["picks"]["u"] is None


def test_the_learning_curve_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = Acquire("top").run(images(60), rounds=2, count=5, start=10, test=images(30))
    ax = result.plot()
    (line,) = ax.get_lines()
    assert list(zip(*line.get_data(), strict=True)) == result.curve
    assert (ax.get_xlabel(), result.plot(ax) is ax) == ("labelled images", True)
    matplotlib.pyplot.close(ax.figure)


@pytest.mark.parametrize("rows", [[-1], torch.tensor([3, -2])])
def test_negative_rows_are_refused(rows):
    with pytest.raises(TableError, match=r"acquire: rows of .* must be indices from 0 to \d+; got a negative one"):
        Acquire("random").pick(images(), 2, labelled=rows)
