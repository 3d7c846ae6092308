"""One training by several processes, on one machine or on many: every step is that of the whole batch.

    B = B_0 + ... + B_w-1      a batch; process k has the rows B_k that it holds of the shuffle buffer (`heads.stream`)
    u_i = head(z_i)            each process for its own rows; process 0 collects those of all
    g_i = d loss(u) / d u_i    process 0, from the u of the whole batch: a ranking loss pairs any two of its rows
    G = sum_k sum_i∈B_k g_i d u_i / d weights    each process for its own rows, summed at process 0

G is the gradient of the loss of the whole batch, whatever w is: the number of processes changes the order of sums and
with it the last bits, as the number of threads does, and nothing else. For the same number, bits are the same in every
run. Process 0 alone has optimiser, history and files; it sends the weights to all before every step, so the others keep
nothing that could be lost. A worker that dies is replaced, and the training continues with the step that it was at.

Where processes come from is in `heads.workers`. They compute on the CPU, and talk by gloo.
"""

import contextlib
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dubito import errors
from dubito.cache.disk import differing_parts
from dubito.errors import DubitoError, EngineError, LostProcessError, TableError, first_words
from dubito.heads.losses import HeadLoss
from dubito.heads.module import HeadModule
from dubito.heads.stream import Stream, dropped
from dubito.table import Column
from dubito.types import Json

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

dist: Any = torch.distributed
"""Hardly typed, and almost empty in some builds of torch."""
_CONNECT_SECONDS, _JOIN_SECONDS, _ANSWER_SECONDS = 60.0, 300.0, 1800.0
_FAILURE = "failure"


@final
@dataclass(frozen=True)
class SharedTraining:
    """What every process must know of a training that is about to begin or to continue.

    Attributes:
        table: What the tables of all processes must agree in, by what errors call it.
        width: Width of the head's hidden layers.
        depth: Number of the head's hidden layers.
        batch: Rows per batch.
        seed: Seed of the order of rows and of dropout.
        dropout: Share of the features that is dropped.
        first: The next step.
        stop: The step before which the training ends.
    """

    table: Json
    width: int
    depth: int
    batch: int
    seed: int
    dropout: float
    first: int
    stop: int


@final
class Group:
    """Processes that are connected to each other; that of rank 0 leads.

    Args:
        store: Where they meet.
        rank: Which of them this one is.
        size: How many there are.
        host: Address to listen at; None is the one that this machine's name stands for.
    """

    def __init__(self, store: "Store", rank: int, size: int, *, host: str | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        with self._reached():
            if host is None:
                self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=_JOIN_SECONDS))
                return
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=_CONNECT_SECONDS)
            self._backend = dist.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill the tensor of every process with that of process 0."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=_ANSWER_SECONDS)
        with self._reached():
            self._backend.broadcast([tensor], options).wait()

    def reduce(self, tensor: Tensor) -> None:
        """Add the tensors of all processes up in that of process 0; the others hold partial sums afterwards."""
        options = dist.ReduceOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=_ANSWER_SECONDS)
        with self._reached():
            self._backend.reduce([tensor], options).wait()

    def share(self, message: Any = None) -> Any:
        """The message of process 0, in every process."""
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self.broadcast(size)
        if self.rank:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(data)
        return pickle.loads(data.numpy().tobytes()) if self.rank else message  # noqa: S301 (of process 0)

    def report(self, error: Exception) -> None:
        """Leave an error for the other processes, which raise it when they miss this one."""
        kind = type(error).__name__
        text = str(error) if isinstance(error, DubitoError) else f"{kind}: {first_words(error)}"
        with contextlib.suppress(RuntimeError):  # where the store has gone, so has process 0
            self._store.set(_FAILURE, json.dumps([kind, text, self.rank]))

    def close(self) -> None:
        """Leave: whoever waits for this process gets an error."""
        self._backend = None

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^.*?\] ", "", str(error), count=1).partition(". ")[0]  # without gloo's file and advice
            raise failure(self._store) or LostProcessError(
                f"train: a process of this training has ended or cannot be reached ({first_words(reason)}). Start all "
                f"processes again: the training continues from its last state."
            ) from error


def failure(store: "Store") -> DubitoError | None:
    """The error that another process has reported, if any."""
    try:
        if not store.check([_FAILURE]):
            return None
        kind, text, rank = json.loads(store.get(_FAILURE))
    except RuntimeError:  # it was in process 0, which has ended
        return None
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, DubitoError):
        return known(text)
    return EngineError(f"train: process {rank} failed: {text}. Its own output says where.")


@final
class Processes:
    """All processes of a training, as process 0 sees them.

    Args:
        size: How many there are.
        group: The connection, where there is one.
        start: Starts the others and connects to them, when a training begins, and again when one of them was lost.
        restarts: How often that may be.
    """

    def __init__(
        self,
        size: int,
        *,
        group: Group | None = None,
        start: Callable[[], Group] | None = None,
        restarts: int = 0,
    ) -> None:
        self.size, self._group, self._start, self._restarts = size, group, start, restarts
        self._module: HeadModule | None = None
        self._within_step = False

    def begin(self, training: SharedTraining, module: HeadModule) -> None:
        """Announce the training of a module; its steps follow."""
        if self._group is None and self._start is not None:
            self._group = self._start()
        self._connected.share(training)
        self._module = module

    @property
    def _connected(self) -> Group:
        if self._group is None:
            raise LostProcessError("train: the connection to the other processes is closed. Make the same call again.")
        return self._group

    def backward(
        self,
        module: HeadModule,
        rows: Float[Tensor, "own d"],
        losses: Float[Tensor, "b"],
        own: Int[Tensor, "own"],
        loss_of: HeadLoss,
    ) -> Float[Tensor, ""]:
        """The loss of a whole batch; its gradient is put into the module's parameters.

        Args:
            module: The head.
            rows: The rows that this process holds.
            losses: The task losses of all rows.
            own: Which rows of the batch are held.
            loss_of: The head's loss.
        """
        group, parameters, self._within_step = self._connected, list(module.parameters()), True
        group.broadcast(torch.cat([parameters_to_vector(parameters).detach(), torch.ones(1)]))
        computed = module(rows)
        u = _gathered(group, computed, own, len(losses)).requires_grad_()
        loss = loss_of(u, losses)
        (slope,) = torch.autograd.grad(loss, u)
        group.broadcast(slope)
        gradient = _summed(group, module, computed, slope[own])
        parts = torch.split(gradient, [one.numel() for one in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._within_step = False
        return loss.detach()

    def end(self) -> None:
        """The last step of the training is done."""
        self._module = None

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Where a process is lost inside, end the block early, and have `begin` start new ones; raise if it may not."""
        try:
            yield
        except LostProcessError:
            self.close()
            self._restarts -= 1
            if self._start is None or self._restarts < 0:
                raise

    def finish(self, outcome: Any) -> None:
        """Pass on to the other processes how it ended, and disconnect: with a result, or an error that they raise."""
        if isinstance(outcome, Exception) and not isinstance(outcome, DubitoError):
            outcome = EngineError(f"train: process 0 failed: {type(outcome).__name__}: {first_words(outcome)}.")
        with contextlib.suppress(LostProcessError):
            if self._within_step:  # they wait for other numbers than weights, and see the error when this one has left
                self._connected.report(outcome)
            else:
                if self._module is not None:  # they wait for the next weights: zeros are the last ones
                    self._connected.broadcast(torch.zeros(1 + sum(one.numel() for one in self._module.parameters())))
                self._connected.share(outcome)
        self.close()

    def close(self) -> None:
        """Disconnect."""
        if self._group is not None:
            self._group.close()
        self._group, self._module, self._within_step = None, None, False


def follow(group: Group, features: Column, name: str) -> Any:
    """Compute this process's rows of every training that process 0 begins; returns its result, or raises its error."""
    try:
        while isinstance(message := group.share(), SharedTraining):
            _follow(group, message, features, name)
    except LostProcessError:
        raise
    except Exception as error:
        group.report(error)
        raise
    finally:
        group.close()
    if isinstance(message, Exception):
        raise message
    return message


def _follow(group: Group, training: SharedTraining, features: Column, name: str) -> None:
    """The steps of one training."""
    n, d = features.shape
    losses = torch.zeros(()).expand(n)  # process 0 knows them
    stream = Stream(features, losses, training.batch, training.seed, name, group.rank, group.size)
    if differing := differing_parts({part: part for part in training.table}, training.table, described(stream)):
        raise TableError(
            f"train: all processes must open the same table; in that of process {group.rank}, other than in that of "
            f"process 0: {'; '.join(differing)}. Open the same caches in every process."
        )
    module = HeadModule(d, width=training.width, depth=training.depth)
    weights = torch.zeros(1 + sum(one.numel() for one in module.parameters()))
    vector_to_parameters(weights[:-1], module.parameters())  # as views: what arrives is in the module at once
    for step, (rows, all_losses, own) in enumerate(stream.shares(training.first, training.stop), training.first):
        kept = dropped(rows, training.dropout, training.seed, step, own, len(all_losses))
        group.broadcast(weights)
        if not weights[-1]:
            return
        computed = module(kept)
        slope = torch.empty(len(all_losses))
        _gathered(group, computed, own, len(slope))
        group.broadcast(slope)
        _summed(group, module, computed, slope[own])


def described(stream: Stream) -> Json:
    """What the tables of all processes must agree in, by what errors call it."""
    n, d = stream.features.shape
    return {"the number of rows": n, "the width of the features": d, "the features": stream.digest()}


def _gathered(group: Group, u: Float[Tensor, "own"], own: Int[Tensor, "own"], b: int) -> Float[Tensor, "b"]:
    """The outputs for a whole batch, at process 0: all others are zero, so the sum is exact."""
    whole = torch.zeros(b)
    whole[own] = u.detach()
    group.reduce(whole)
    return whole


def _summed(
    group: Group, module: HeadModule, u: Float[Tensor, "own"], slope: Float[Tensor, "own"]
) -> Float[Tensor, "p"]:
    """The gradient of a whole batch, at process 0."""
    parts = torch.autograd.grad(u, list(module.parameters()), slope)
    gradient = torch.cat([part.flatten() for part in parts])
    group.reduce(gradient)
    return gradient
