"""A module during a pass: in eval mode, used by one thread, and afterwards as it was, also after an error.

Modes and random states come back, and so do parameters and buffers that a pass replaces or writes into:

    replaced         by the object that was there
    other memory     (weight.data = ...) by the memory that was there
    written into     by a copy, where the version counter of the tensor has moved

A copy is made once, and again after somebody else has written into the tensor: it is not paid for in every pass. Small
tensors always have one; of the large ones, those that the module writes into in its first pass, after which every
tensor is compared with its copy. A large one that is written into for the first time later on cannot be restored: that
raises ModelError. What is written through `.data`, and statistics that batch normalisation updates, escape version
counters: they are restored where the first pass writes them, too, and statistics (short buffers) always, as they are
compared with their copies before every pass, because somebody may have trained the module, and after it. Buffers that a
pass adds, such as tables that are computed once, stay.

Few modules draw random numbers in eval mode. One pass that leaves a random generator alone shows that a module does not
use it: from then on, until the module is changed, its state is not restored any more, because who draws is another
thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dubito.errors import ModelError
from dubito.threads import GENERATORS, RandomStates, one_at_a_time

_SMALL, _SMALL_BUFFER = 2**16, 2**22
"""Numbers of a parameter and of a buffer that always have a copy: norms, biases, statistics, tables of positions."""
_SHORT = 2**13
"""Numbers of a buffer that is compared with its copy before and after every pass, in microseconds."""
_revisions = count()


@contextmanager
def frozen(module: nn.Module) -> Iterator[nn.Module]:
    """The module in eval mode without gradients, in one thread at a time; afterwards nothing about it has changed.

    Its own train() and eval() are not called, and requires_grad and hooks are never touched.

    Raises:
        ModelError: A large parameter was written into that had never been before; see above.
    """
    failed = False
    with one_at_a_time, torch.inference_mode(False), torch.no_grad():
        parts = _parts(module)
        modes, state = [part.training for part in parts], _state_of(module, parts)
        slots, draws, random = state.slots, state.draws, RandomStates(state.draws)
        state.draws = set()  # a pass inside this one leaves it to this one to restore them
        try:
            _switch(parts, [False] * len(modes))
            yield module
        except (Exception, KeyboardInterrupt):
            failed = True
            raise
        finally:
            _switch(parts, modes)
            drawn = random.restore()
            state.draws |= draws if failed else drawn
            lost = state.restore(slots, parts)
            if lost and not failed:
                raise ModelError(
                    f"{type(module).__name__}: its forward pass wrote into '{_name_of(lost[0], module)}', which it had "
                    f"not done for earlier batches, so what was there is lost. Load its weights again; from now on "
                    f"this tensor is restored after every pass."
                )


def signature(module: nn.Module, *, statistics: bool = True) -> tuple[object, ...]:
    """What differs once layers, parameters or buffers have been replaced or written into, but not by `frozen` passes.

    It is cheap: of every tensor it reads the last number, because writing through `.data` shows nowhere else. Where it
    differs, `module_digests` says whether the module does.

    Args:
        module: The module.
        statistics: Whether numbers that are written into buffers count, as by training with batch normalisation.
    """
    with one_at_a_time, torch.no_grad():
        state = _state_of(module, _parts(module))
        tensors = [slot.tensor for slot in state.slots if slot.tensor is not None and slot.kept is not None]
        tensors = [one for one in tensors if statistics or isinstance(one, nn.Parameter)]
        last: dict[object, list[Tensor]] = {}  # by device and type: numbers of each are read at once
        for one in tensors:
            if one.is_floating_point() and one.numel() and not one.is_meta:
                last.setdefault((one.device, one.dtype), []).append(one[(-1,) * one.dim()])
        numbers = [number.hex() for some in last.values() for number in torch.stack(some).tolist()]
        return (state.revision if statistics else state.revision_of_layers, *numbers)


@dataclass(slots=True)
class _Kept:
    """What a tensor was before a pass.

    Attributes:
        version: Its version counter.
        address: Of its memory.
        memory: The same memory, as a tensor of its own.
        before: A copy of its numbers, if there is one.
        first: Whether no pass has been compared with the copy yet.
        written: Whether passes write into it, perhaps unseen by its version counter.
    """

    version: int
    address: int
    memory: Tensor
    before: Tensor | None
    first: bool
    written: bool = False

    def differs(self, tensor: Tensor) -> bool:
        """Whether the tensor has other numbers than the copy."""
        if self.before is None or tensor.is_meta:
            return False
        kinds = [(one.shape, one.dtype, one.device) for one in (tensor, self.before)]
        if kinds[0] != kinds[1]:
            return True
        if torch.equal(tensor, self.before):
            return False
        return not (tensor.is_floating_point() and torch.allclose(tensor, self.before, 0, 0, equal_nan=True))

    def restore(self, tensor: Tensor) -> bool:
        """Put back memory and numbers; False where there is no copy of these."""
        if tensor.data_ptr() != self.address:
            tensor.data = self.memory
        moved, differs = tensor._version != self.version, self.differs(tensor)
        self.written = self.written or moved or differs
        if self.first and not self.written and not _is_small(tensor):
            self.before = None
        self.first = False
        if not moved and not differs:
            return True
        known = self.before is not None
        if self.before is None:
            self.before = _copy(tensor)
        else:
            tensor.copy_(self.before)
        self.version = tensor._version
        return known


class _Slot(NamedTuple):
    """A place for a parameter or a buffer: the dict that holds it, its name there, and what is there."""

    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor | None
    kept: _Kept | None

    def is_written(self) -> bool:
        """Whether a short buffer, or a tensor that passes write into, has other numbers than its copy."""
        tensor, kept = self.tensor, self.kept
        if tensor is None or kept is None:
            return False
        short = not isinstance(tensor, nn.Parameter) and tensor.numel() <= _SHORT
        return (short or kept.written) and kept.differs(tensor)

    def is_updated_buffer(self) -> bool:
        """Of a slot that has changed: whether it holds the same buffer in the same memory, with other numbers."""
        tensor, kept = self.tensor, self.kept
        if tensor is None or kept is None or isinstance(tensor, nn.Parameter):
            return False
        return self.owner.get(self.name) is tensor and tensor.data_ptr() == kept.address


def _changed(slots: list[_Slot]) -> list[_Slot]:
    """Those that hold another tensor, other memory or other numbers than they are known to; one quick loop."""
    return [
        slot
        for slot in slots
        if slot[0].get(slot[1]) is not slot[2]
        or (
            slot[3] is not None and (slot[2]._version != slot[3].version or slot[2].data_ptr() != slot[3].address)  # type: ignore[union-attr]
        )
    ]


class _State:
    """Parts, parameters and buffers of a module as they were before its latest pass.

    Attributes:
        revision: Another one whenever something has changed that no pass has done.
        revision_of_layers: The same, but numbers that are written into buffers do not count.
        draws: The random generators that a pass may draw from: all, until one has not.
    """

    def __init__(self) -> None:
        # A module must not be kept alive by what is known of it.
        self.parts: list[ReferenceType[nn.Module]] = []
        self.slots: list[_Slot] = []
        self.revision = self.revision_of_layers = -1
        self.draws = set(GENERATORS)

    def refresh(self, parts: list[nn.Module]) -> None:
        """Take note of what has changed since the pass before."""
        now, written = [ref(part) for part in parts], [slot for slot in self.slots if slot.is_written()]
        changed = [*_changed(self.slots), *written]
        for slot in written:
            slot.kept.version = -1  # type: ignore[union-attr]
        rebuilt = now != self.parts or len(self.slots) != _count(parts)
        if rebuilt or changed:
            self.parts, self.revision = now, next(_revisions)
            if rebuilt or not all(slot.is_updated_buffer() for slot in changed):
                self.revision_of_layers, self.draws = self.revision, set(GENERATORS)
            self._keep(parts)

    def restore(self, slots: list[_Slot], parts: list[nn.Module]) -> list[Tensor]:
        """Put back what a pass has changed; returns the tensors whose numbers are lost."""
        lost, added = [], len(slots) != _count(parts)
        unseen = [slot for slot in slots if slot.kept and (slot.kept.first or slot.is_written())]
        for owner, name, tensor, kept in [*_changed(slots), *unseen]:
            added = added or tensor is None
            if tensor is not None:
                owner[name] = tensor
                if kept is not None and not kept.restore(tensor):
                    lost.append(tensor)
        if added:  # part of the module from now on
            self._keep(parts)
        return lost

    def _keep(self, parts: list[nn.Module]) -> None:
        known = {id(slot.tensor): slot.kept for slot in self.slots if slot.kept is not None}
        first = not self.slots
        self.slots = []
        for part in parts:
            for owner in (part._parameters, part._buffers):
                for name, tensor in owner.items():
                    kept = None if tensor is None else _kept(tensor, known.get(id(tensor)), first=first)
                    if tensor is not None and kept is not None:
                        known[id(tensor)] = kept
                    self.slots.append(_Slot(owner, name, tensor, kept))  # type: ignore[arg-type]


_STATES: "WeakKeyDictionary[nn.Module, _State]" = WeakKeyDictionary()


def _state_of(module: nn.Module, parts: list[nn.Module]) -> _State:
    state = _STATES.get(module)
    if state is None:
        state = _STATES[module] = _State()
    state.refresh(parts)
    return state


def _kept(tensor: Tensor, known: _Kept | None, *, first: bool) -> _Kept | None:
    """What restores a tensor; None for one that cannot be written into, or that has no memory of the usual kind."""
    if is_lazy(tensor) or tensor.is_inference() or tensor.layout != torch.strided:
        return None
    version, address = tensor._version, tensor.data_ptr()
    if known is not None and (known.version, known.address) == (version, address):
        return known
    written = known is not None and known.written
    before = _copy(tensor) if first or written or _is_small(tensor) else None
    return _Kept(version, address, tensor.detach(), before, first, written)


def _parts(module: nn.Module) -> list[nn.Module]:
    """The module and all in it, each once; faster than `modules()`."""
    parts = {module: None}
    todo = [module]
    while todo:
        for part in todo.pop()._modules.values():
            if part is not None and part not in parts:
                parts[part] = None
                todo.append(part)
    return list(parts)


def _count(parts: list[nn.Module]) -> int:
    return sum(len(part._parameters) + len(part._buffers) for part in parts)


def _switch(parts: list[nn.Module], modes: list[bool]) -> None:
    for part, mode in zip(parts, modes, strict=True):
        if part.training is not mode:
            part.training = mode


def _name_of(tensor: Tensor, module: nn.Module) -> str:
    named = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, one in named if one is tensor), "a parameter")


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_SMALL if isinstance(tensor, nn.Parameter) else _SMALL_BUFFER)


def _copy(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:  # the module is to run where it just fits
        return None
