"""What a service counts, for Prometheus: in a registry of its own, so that several services of a process stay apart."""

from typing import Any, final

from dubito.errors import MissingPackageError

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise MissingPackageError("serve needs its server: pip install 'dubito[serve]'") from error

_TENTHS = tuple(number / 10 for number in range(1, 11))
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@final
class ServiceMetrics:
    """Counters, gauges and histograms of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"registry": self.registry, "namespace": "dubito"}
        self.images = Counter(
            "images", "Images, by verdict (accepted, abstained, broken) and reason", ["verdict", "reason"], **own
        )
        self.rank = Histogram(
            "uncertainty_rank", "Share of reference images that are less uncertain", buckets=_TENTHS, **own
        )
        self.batch = Histogram("batch_images", "Images in a batch", buckets=_SIZES, **own)
        self.under_way = Gauge("queue_images", "Images under way, from their request's arrival to its answer", **own)
        self.seconds = Histogram("request_seconds", "Seconds of a request", ["path", "status"], buckets=_SECONDS, **own)
        self.watched = Gauge("watch_images", "Images that the watch has taken note of", **own)
        self.alarms = Gauge("watch_alarms", "1 once the watch has raised an alarm of this kind", ["kind"], **own)
        self.watch_errors = Counter("watch_errors", "Batches that the watch could not take note of", **own)
        for kind in ("images", "guarantee"):
            self.alarms.labels(kind).set(0)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)
