"""What an engine is: it decides where blocks of images are worked on; what is done with a block is not its concern.

    blocks -> ExtractionEngine.run(work, blocks) -> each block, with its shards, as it is finished

`LocalEngine` hands all blocks to the work itself, in this process. Work is idempotent: a block that is run twice leaves
the same files, so an engine may run a block again whenever it is not sure.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch


@final
@dataclass(frozen=True)
class Block:
    """Consecutive images that share their shards.

    Attributes:
        number: Its place among all blocks.
        images: The positions of its images.
        kinds: The kinds of shards that it lacks.
    """

    number: int
    images: range
    kinds: tuple[str, ...]


Finished = tuple[Block, list[Any]]
"""A block, and the shards that were written for it."""


@runtime_checkable
class BlockWork(Protocol):
    """What is done with blocks. It can be pickled, and then it does the same in another process or on another machine.

    Attributes:
        threads: Threads of torch that it computes with, wherever it runs.
    """

    threads: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def run(self, blocks: Sequence[Block], *, workers: int | None = None, progress: bool = False) -> Iterator[Finished]:
        """Do all blocks in this process, one after the other, as one stream that decodes ahead."""

    def check(self, block: Block) -> bool:
        """Raise an error unless model, labels and probes fit together, which one batch shows; nothing is written.

        Returns whether an image of the block could be read, without which nothing is shown.
        """

    def start(self, device: str | None) -> None:
        """Prepare a copy in a worker: raise an error unless folder and images are there, move models to a device."""

    def bar(self, blocks: Sequence[Block], *, show: bool) -> AbstractContextManager[Callable[..., None]]:
        """A progress bar of images; yields a function that advances it by a count, with a note to show beside it."""

    def describe_current(self) -> str:
        """Which probe runs on which images at the moment, for errors."""

    def describe(self, block: Block) -> str:
        """The images of a block in words, for errors."""

    def leave_out(self, block: Block, why: str) -> list[Any]:
        """Write a block down as images that are skipped, and return the shards."""


@runtime_checkable
class ExtractionEngine(Protocol):
    """Runs blocks of images somewhere."""

    @property
    def default_threads(self) -> int:
        """Threads of torch per worker, unless the user chooses."""

    def run(
        self, work: BlockWork, blocks: Sequence[Block], *, workers: int | None = None, progress: bool = True
    ) -> Generator[Finished, None, None]:
        """Do every block, in any order.

        Args:
            work: What to do.
            blocks: At least one.
            workers: Processes that decode images, beside each copy of the model; None for the engine's default.
            progress: Show a bar when a terminal is watching.
        """


@final
@dataclass(frozen=True)
class LocalEngine:
    """All blocks in this process, with worker processes that decode images."""

    @property
    def default_threads(self) -> int:
        """As many as torch uses in this process."""
        return torch.get_num_threads()

    def run(
        self, work: BlockWork, blocks: Sequence[Block], *, workers: int | None = None, progress: bool = True
    ) -> Generator[Finished, None, None]:
        """One stream over all blocks."""
        yield from work.run(blocks, workers=workers, progress=progress)
