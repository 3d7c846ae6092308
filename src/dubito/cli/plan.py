"""`dubito plan`: what an extraction takes before it is started."""

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from dubito.cli._console import Screen, command, option


@dataclass
class ClusterOptions:
    """What the extraction runs on: one option per field of `Cluster`, with its default."""

    rate: Annotated[float, option("Images per second that the model of one worker takes.", "N")]
    decode_rate: Annotated[float | None, option("Images per second that one worker decodes.", "N")] = None
    image_bytes: Annotated[float, option("Mean size of an image file.", "N")] = 110e3
    row_bytes: Annotated[float, option("Bytes of the cache per row.", "N")] = 6600.0
    shard_size: Annotated[int, option("Images per shard.", "N")] = 512
    kinds: Annotated[int, option("Shards per block: one of rows, and one per probe.", "N")] = 2
    latency: Annotated[float, option("Seconds until the store answers a request.", "S")] = 0.03
    connections: Annotated[int, option("Requests that a worker has open at a time.", "N")] = 4
    images_per_request: Annotated[float, option("1 for files, more for tar shards.", "N")] = 1.0
    bandwidth: Annotated[float, option("Bytes per second between a worker and the store.", "N")] = 100e6
    store_requests: Annotated[float, option("Requests per second that the store answers.", "N")] = 5500.0
    store_bandwidth: Annotated[float, option("Bytes per second that the store sends.", "N")] = 10e9
    mtbf: Annotated[float, option("Hours between two failures of a worker.", "H")] = 100.0
    driver_rate: Annotated[float, option("Blocks per second that the driver hands out.", "N")] = 100.0
    restart: Annotated[float, option("Seconds until a failed worker works again.", "S")] = 120.0
    price: Annotated[float, option("Of one worker for an hour.", "X")] = 0.0
    request_price: Annotated[float, option("Of a thousand requests that read.", "X")] = 0.0004
    write_price: Annotated[float, option("Of a thousand requests that write.", "X")] = 0.005
    storage_price: Annotated[float, option("Of a gigabyte of the cache for a month.", "X")] = 0.023


@command
def plan(
    screen: Screen,
    *,
    images: Annotated[float, option("Number of images, such as 1e9.", "N")],
    cluster: ClusterOptions,
    workers: Annotated[int | None, option("Number of workers; otherwise enough for --hours.", "N")] = None,
    hours: Annotated[float | None, option("Hours that it may take; by default 24, or as many as needed.", "H")] = None,
    epochs: Annotated[int, option("How often every image is extracted.", "N", min=1)] = 1,
    simulated: Annotated[bool, Option("--simulated", help="Also simulate workers, failures and delays.")] = False,
) -> None:
    """Compute workers, hours, bytes and cost of an extraction, and what limits it next."""
    from dubito.cache import Cluster, plan_extraction
    from dubito.cache.plan import simulate

    settings = {name: value for name, value in vars(cluster).items() if value is not None}
    result = plan_extraction(images, Cluster(**settings), workers=workers, hours=hours, epochs=epochs)
    extra: dict[str, Any] = {}
    if simulated:
        with screen.waiting("simulating"):
            extra["simulated_hours"] = simulate(result.rows, result.cluster, result.workers)
    note = [f"Simulated: {hours:,.1f} hours." for hours in extra.values()]
    screen.show(result, *note, **extra)
