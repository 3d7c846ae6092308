r"""From the bytes of images to answers: decoding, batching, the model, the watch; everything but HTTP.

    bytes -> Decoders (processes) -> Batcher (queue) -> guard or index (one thread) -> answers
                                                             \-> watch (another thread)

The model has one thread, because passes take turns anyway. The watch writes a file after every batch; the next batch
runs meanwhile, and waits for it if the disk is slower than the model. Answers wait for it, too: an image that a client
has an answer for is in the watch, even if the process is killed. Only where the watch cannot write, as on a full disk,
are answers sent without it; a metric and a log line count that.
"""

import asyncio
import json
import sys
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, final

from torch import Tensor

from dubito.cache.runner import kept_memory
from dubito.data.image_set import ImageSet, hash_bytes
from dubito.errors import BrokenImageError, GuardError
from dubito.guard import Decisions, Guard, Verdict, Watch, WatchReport
from dubito.guard.thresholds import CLASS
from dubito.models.from_onnx import OnnxNetwork
from dubito.result import plain
from dubito.search import SafeIndex
from dubito.serve.batching import Batcher, ModelThread
from dubito.serve.decoding import Decoders
from dubito.serve.metrics import ServiceMetrics
from dubito.types import Json

GUARD = "guard"
_LABELS = ("label", "label_class")
"""Left out of verdicts: images of clients have no labels."""


class Upload(NamedTuple):
    """What a client calls an image, and its bytes."""

    name: str
    content: bytes


class Search(NamedTuple):
    """Find the k most similar items, or all if there are fewer."""

    k: int


@final
class PreparedImages(ImageSet):
    """Images that a worker process has decoded and prepared."""

    ready = True

    def __init__(self, ids: Sequence[str], inputs: Sequence[Tensor]) -> None:
        super().__init__("the request", ids)
        self._inputs = inputs

    def read(self, index: int) -> Tensor:
        """One input, as it was sent."""
        return self._inputs[index]

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each input."""
        return [hash_bytes(self._inputs[row].numpy().tobytes()) for row in rows]


@final
class Engine:
    """Everything that a service runs.

    Args:
        guard: The guard, with its model.
        workers: Processes that decode.
        seconds: How long decoding one image may take.
        index: An index of the same model, for searches.
        watch: Takes note of what the guard decides.
        batching: Settings of the `Batcher`.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        workers: int,
        seconds: float,
        index: SafeIndex | None = None,
        watch: Watch | None = None,
        **batching: Any,
    ) -> None:
        if guard.guarantee.per not in (None, CLASS):
            raise GuardError(
                f"serve: this guard has a threshold for every group of '{guard.guarantee.per}', and a request does not "
                f"state the group of its images. Fit a guard with per='class', or without per."
            )
        if guard.model is None:
            raise GuardError("serve: images need the model. Load it with the guard: Guard.load(path, model).")
        self.guard, self.index, self.watch = guard, index, watch
        self.metrics = ServiceMetrics()
        self._memory = ExitStack()
        self.decoders = Decoders(guard.model.transform, workers, seconds=seconds)
        # Beside a network of another runtime, threads of torch would only be in its way.
        self.model_thread = ModelThread(1 if isinstance(guard.model.module, OnnxNetwork) else None)
        self._watcher = ThreadPoolExecutor(1, "watch")
        self._noting: Future[None] | None = None
        self.batcher = Batcher(self._run, self.model_thread, seen=self.metrics.batch.observe, **batching)
        self.metrics.under_way.set_function(lambda: self.batcher.admitted)
        self.stopping = False
        self._loop: asyncio.Task[None] | None = None
        self._memory.enter_context(kept_memory())  # after the processes have begun, which need the usual limits
        try:
            self.model_thread.submit(self._warm_up).result()
            if watch is not None:
                self._update_gauges(watch.report())
        except BaseException:
            self.close()
            raise

    async def start(self) -> None:
        """Begin to run batches."""
        self._loop = asyncio.create_task(self.batcher.run())

    async def stop(self) -> None:
        """Run no more batches, and let the watch finish."""
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End all threads and processes."""
        self.decoders.close()
        self.model_thread.shutdown()
        self._watcher.shutdown()
        self._memory.close()

    @property
    def live(self) -> bool:
        """Whether batches are run; if not, only a new process helps."""
        return self._loop is not None and not self._loop.done()

    def ready(self, deadline: float) -> bool:
        """Whether a request would be answered now: no batch has been in the model for longer than the deadline."""
        return self.live and not self.stopping and self.batcher.seconds <= deadline

    async def answers(self, kind: Hashable, uploads: Sequence[Upload], request: str) -> list[Any]:
        """For each image its answer, or why it is broken; ids are those of the request and a number.

        Raises:
            QueueFullError: There is no room for so many images now.
        """
        with self.batcher.admit(len(uploads)):
            ids = [f"{request}-{number}" for number in range(len(uploads))]
            work = [self._answer(kind, name, one) for name, one in zip(ids, uploads, strict=True)]
            answers = await asyncio.gather(*work, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, BrokenImageError):
                raise answer
        return answers

    async def label(self, labels: Json) -> WatchReport:
        """The report of the watch after it has taken note of true classes, by the ids of images.

        Raises:
            GuardError: A label is no class of the model.
        """
        return await asyncio.wrap_future(self._watcher.submit(self._label, labels))

    async def request_labels(self, count: int) -> list[str]:
        """Ids of images to label, so that the watch can test the guarantee."""
        assert self.watch is not None  # noqa: S101 (its endpoint exists only with a watch)
        return await asyncio.wrap_future(self._watcher.submit(self.watch.request_labels, count))

    async def _answer(self, kind: Hashable, name: str, upload: Upload) -> Any:
        try:
            image = await self.decoders.prepare(upload.content, upload.name)
        except BrokenImageError:
            self.metrics.images.labels("broken", "").inc()
            raise
        answer, noted = await self.batcher.answer(kind, name, image)
        if noted is not None:
            await asyncio.shield(asyncio.wrap_future(noted))  # one client that goes does not undo it for the others
        return answer

    def _run(self, kind: Hashable, ids: list[str], inputs: list[Tensor]) -> Sequence[tuple[Any, "Future[None] | None"]]:
        """Answers for a batch, in the thread of the model, and when the watch has taken note of them."""
        table = self.guard.predict(PreparedImages(ids, inputs))
        if isinstance(kind, Search):
            assert self.index is not None  # noqa: S101 (its endpoint exists only with an index)
            k = min(kind.k, self.index.kept)
            return [(one, None) for one in plain(self.index.search(table, k=k).to_dict()["queries"])]
        decisions = self.guard.decide(table)
        verdicts = list(decisions)
        for row, verdict in enumerate(verdicts):
            reason = "" if verdict.accept else decisions.cause(row)
            self.metrics.images.labels("accepted" if verdict.accept else "abstained", reason).inc()
            self.metrics.rank.observe(verdict.rank)
        if self.watch is not None:
            if self._noting is not None:
                self._noting.result()
            self._noting = self._watcher.submit(self._note, self.watch, decisions)
        return [(verdict, self._noting) for verdict in verdicts]

    def _note(self, watch: Watch, decisions: Decisions) -> None:
        try:
            self._update_gauges(watch.update(decisions))
        except Exception as error:  # a full disk must not end the service; the metrics and the log show it
            self.metrics.watch_errors.inc()
            write_log({"event": "watch failed", "error": f"{type(error).__name__}: {error}"})

    def metrics_text(self) -> bytes:
        """Counters for Prometheus; those of the watch are of its file, which other processes write, too."""
        if self.watch is not None:
            self._update_gauges(self.watch.report())
        return self.metrics.text()

    def _label(self, labels: Json) -> WatchReport:
        assert self.watch is not None  # noqa: S101 (its endpoint exists only with a watch)
        report = self.watch.label(labels)
        self._update_gauges(report)
        return report

    def _update_gauges(self, report: WatchReport) -> None:
        self.metrics.watched.set(report.images)
        for alarm in report.alarms:
            self.metrics.alarms.labels(alarm["kind"]).set(1)

    def _warm_up(self) -> None:
        """One grey image through everything: what does not fit together fails now, and the first client waits less."""
        from PIL import Image  # noqa: PLC0415 (for this alone)

        assert self.guard.model is not None  # noqa: S101 (checked above)
        image = self.guard.model.transform.prepare(Image.new("RGB", (64, 48), "grey"))
        table = self.guard.predict(PreparedImages(["warm-up"], [image]))
        self.guard.decide(table)
        if self.index is not None:
            self.index.search(table, k=1)


def verdict_json(verdict: Verdict) -> Json:
    """A verdict for clients."""
    return {key: value for key, value in plain(verdict).items() if key not in _LABELS}


def write_log(entries: Json) -> None:
    """One line of JSON on standard error."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stderr.write(json.dumps({"time": stamp, **entries}) + "\n")
    sys.stderr.flush()
