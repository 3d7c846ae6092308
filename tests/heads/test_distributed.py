"""Several processes train one head: they make the steps of one, whoever dies. Most of them are threads here."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tests.heads.conftest import learnable
from torch.distributed import HashStore

import dubito
from dubito.errors import EngineError, LostProcessError, TableError, ValueRangeError
from dubito.heads import distributed, stream, workers
from dubito.heads.distributed import Group, Processes, follow
from dubito.heads.loop import STATE
from dubito.heads.recipe import Recipe
from dubito.heads.score import UncertaintyHead
from dubito.heads.stream import Stream
from dubito.heads.workers import Workers, agreed_name, joined, launched, receive_column, send_column
from dubito.table import Table
from dubito.table.views import Computed, chosen_rows, concat

SHORT = Recipe(batch=30, rows=900)
"""30 steps, and so two passes and a half over 361 rows."""


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def in_threads(size: int, table: Table, settings: dict, tables: dict[int, Table] | None = None):
    """A training by threads that are connected as processes are; the outcome of each: a result or an error."""
    store = HashStore()

    def run(rank: int):
        group = Group(store, rank, size, host="127.0.0.1")
        own = (tables or {}).get(rank, table)
        if rank:
            return follow(group, own.column("feature"), own.name)
        together = Processes(size, group=group)
        try:
            training = UncertaintyHead(width=16, **settings).train(own, processes=together)
        except Exception as error:
            together.finish(error)
            raise
        together.finish(training)
        return training

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
        return [one.exception() or one.result() for one in running]


def weights(training) -> torch.Tensor:
    return training.head.weights_


@pytest.mark.parametrize(
    ("size", "recipe"),
    [
        (2, SHORT),
        (3, replace(SHORT, dropout=0.5, optimizer="sgd")),
        (2, replace(SHORT, loss="l2", batch=7, rows=210)),
        (5, replace(SHORT, batch=2, rows=60)),  # most processes have no row of a batch
    ],
)
@pytest.mark.parametrize("buffer", [65_536, 60])
def test_several_processes_make_the_steps_of_one(monkeypatch, size, recipe, buffer):
    monkeypatch.setattr(stream, "_BUFFER_ROWS", buffer)
    monkeypatch.setattr(stream, "_BLOCK", 4)
    table = learnable(361)
    alone = UncertaintyHead(width=16, recipe=recipe).train(table)
    first, *others = in_threads(size, table, {"recipe": recipe})
    torch.testing.assert_close(weights(first), weights(alone), rtol=1e-4, atol=1e-5)
    for entry, expected in zip(first.histories[0], alone.histories[0], strict=True):
        assert entry == pytest.approx(expected, rel=1e-3)
    again = in_threads(size, table, {"recipe": recipe})[0]
    assert torch.equal(weights(again), weights(first))
    assert again.histories == first.histories
    assert all(torch.equal(weights(other), weights(first)) for other in others)


def test_one_process_of_one_has_the_very_same_bits():
    # Nothing is summed in another order then.
    table = learnable(361)
    alone = UncertaintyHead(width=16, recipe=SHORT).train(table)
    assert torch.equal(weights(in_threads(1, table, {"recipe": SHORT})[0]), weights(alone))


@pytest.mark.parametrize("buffer", [65_536, 60])
def test_each_process_reads_its_own_rows_alone(monkeypatch, buffer):
    monkeypatch.setattr(stream, "_BUFFER_ROWS", buffer)
    monkeypatch.setattr(stream, "_BLOCK", 4)
    number = torch.arange(301.0)
    batches = list(Stream(number[:, None], number, 20, 1).batches(0, 15))  # one pass
    read = []

    def recorded(rows: slice) -> torch.Tensor:
        read.extend(range(rows.start, rows.stop))
        return number[rows, None]

    for rank in range(3):
        part = Stream(Computed((301, 1), recorded), number, 20, 1, rank=rank, processes=3)
        for (rows, losses), (own_rows, all_losses, own) in zip(batches, part.shares(0, 15), strict=True):
            assert torch.equal(all_losses, losses)
            assert torch.equal(own_rows, rows[own])
        assert part._space[0].shape[0] <= (302 if buffer > 301 else 61) / 3 + 1
    assert sorted(read) == list(range(301))


def test_an_error_of_any_process_is_the_error_of_process_0():
    table, broken = learnable(361), learnable(361)
    broken.feature[359, 3] = torch.nan  # in the part of process 2
    broken.name = "cache/broken"
    first, _, third = in_threads(3, broken, {"recipe": SHORT})
    for error in (first, third):
        assert isinstance(error, ValueRangeError)
        assert "features of cache/broken: 1 of" in str(error)
    first, second = in_threads(2, table, {"recipe": SHORT}, {1: learnable(361, seed=5)})
    assert str(first) == str(second)
    assert isinstance(first, TableError)
    assert "in that of process 1, other than in that of process 0: the features (" in str(first)


def test_an_error_of_process_0_is_the_error_of_all():
    outcomes = in_threads(3, learnable(361), {"recipe": replace(SHORT, lr=1e30, loss="l2")})
    assert len({str(error) for error in outcomes}) == 1
    assert isinstance(outcomes[2], ValueRangeError)
    assert "the head has diverged" in str(outcomes[2])


def test_an_error_of_process_0_within_a_step_is_the_error_of_all(monkeypatch):
    real, steps = Processes.backward, []

    def failing(self, module, rows, losses, own, loss_of):
        def loss(*arguments):
            steps.append(0)
            if len(steps) == 5:
                raise ValueRangeError("no such loss")
            return loss_of(*arguments)

        return real(self, module, rows, losses, own, loss)

    monkeypatch.setattr(Processes, "backward", failing)
    outcomes = in_threads(3, learnable(361), {"recipe": SHORT})
    assert [(type(error), str(error)) for error in outcomes] == [(ValueRangeError, "no such loss")] * 3


def test_what_is_no_error_of_dubito_is_reported_too(monkeypatch):
    real = distributed._follow

    def failing(group, *rest):
        if group.rank == 1:
            raise OverflowError("too much")
        return real(group, *rest)

    monkeypatch.setattr(distributed, "_follow", failing)
    first, second = in_threads(2, learnable(361), {"recipe": SHORT})
    assert type(first) is EngineError
    assert str(first) == "train: process 1 failed: OverflowError: too much. Its own output says where."
    assert type(second) is OverflowError


def test_processes_that_are_started_again_meet_although_old_keys_are_there(monkeypatch):
    store, names = HashStore(), []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(agreed_name, store, rank, 3) for rank in range(3)]
            names.append({one.result() for one in running})
    assert [len(one) for one in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3
    monkeypatch.setattr(workers, "_JOIN_SECONDS", 0.2)
    with pytest.raises(TimeoutError):  # the keys of processes 1 and 2 are there, but they are not
        agreed_name(store, 0, 3)


def test_torchrun_is_recognised(monkeypatch):
    assert launched() == (0, 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == (1, 2)
    assert joined(1) is None
    with pytest.raises(ValueRangeError, match="the number that torchrun has started, 2, or 1 to train in this one"):
        joined(3)
    with pytest.raises(ValueRangeError, match="processes"):
        joined(0)


def test_columns_reach_other_processes(tmp_path):
    table = learnable(50)
    column = concat([chosen_rows(table, torch.arange(40, 10, -1)), table]).column("feature")
    send_column(column, tmp_path, "table")
    assert (tmp_path / "features.pickle").stat().st_size < 4 * table.feature.numel()  # tensors are files
    received = receive_column(tmp_path)
    assert torch.equal(received[0:80], column[0:80])
    with pytest.raises(TableError, match=r"features of mine cannot be sent to other processes \(.*lambda"):
        send_column(Computed((50, 8), lambda rows: table.feature[rows]), tmp_path, "mine")


def test_workers_are_started_again_a_few_times_at_most(monkeypatch):
    starts = []

    def connect(self):
        starts.append(self)
        raise LostProcessError("train: a worker process could not be started. Use fewer.")

    monkeypatch.setattr(Workers, "connect", connect)
    with pytest.raises(LostProcessError, match="could not be started, although workers had been started again 3 times"):
        dubito.train(learnable(361), processes=2, progress=False)
    assert len(starts) == 4


def test_a_killed_worker_is_replaced_and_nothing_changes(tmp_path, monkeypatch):
    started, steps = [], []
    connect, backward = Workers.connect, Processes.backward

    def connected(self):
        group = connect(self)
        started.extend(self._all)
        return group

    def killing(self, *batch):
        steps.append(len(steps))
        if len(steps) == 50:  # the twentieth step of the second training
            started[-1].kill()
        return backward(self, *batch)

    monkeypatch.setattr(Workers, "connect", connected)
    monkeypatch.setattr(Processes, "backward", killing)
    table = learnable(361)
    arguments = {"recipe": SHORT, "width": 16, "held_out": learnable(40, seed=1), "progress": False}
    alone = dubito.train(table, **arguments)
    undisturbed, disturbed = (
        dubito.train(table, tmp_path / name, processes=2, **arguments) for name in ("undisturbed", "disturbed")
    )
    torch.testing.assert_close(weights(undisturbed), weights(alone), rtol=1e-4, atol=1e-5)
    assert disturbed.updates == 30
    states = [(tmp_path / name / "seed-1" / STATE).read_bytes() for name in ("undisturbed", "disturbed")]
    assert states[0] == states[1]
    assert len(started) == 3
    assert all(one.poll() is not None for one in started)


SCRIPT = """
import os, signal, sys, torch, dubito
from dubito.heads import distributed
from tests.heads.conftest import learnable
torch.set_num_threads(1)
backward, steps = distributed._summed, []
def killing(*arguments):
    steps.append(0)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" and len(steps) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return backward(*arguments)
distributed._summed = killing
recipe = dubito.heads.Recipe(batch=30, rows=900)
training = dubito.train(learnable(361), sys.argv[1], recipe=recipe, width=16, held_out=0.1)
total = float(training.head.weights_.double().sum())
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:  # a stdout that both share would mix their lines
    file.write(f"{training.updates} {total}")
"""


def test_torchrun_starts_a_training_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, "--max-restarts", "1", str(script), str(tmp_path / "heads")],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"heads-{rank}").read_text() for rank in range(2))
    assert first == second
    assert "exitcode: -9" in done.stderr
    alone = dubito.train(learnable(361), recipe=SHORT, width=16, held_out=0.1, progress=False)
    assert float(first.split()[1]) == pytest.approx(float(weights(alone).double().sum()), rel=1e-3)
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [".lock", "seed-1", "training.json"]
