"""Sizing: values by hand, and the closed form against a simulation of workers, failures and delays."""

import math
from dataclasses import replace

import pytest

from dubito.cache import Cluster, plan_extraction
from dubito.cache.plan import simulate
from dubito.errors import ValueRangeError

PLAIN = Cluster(
    rate=100, latency=0, bandwidth=1e12, mtbf=1e9, store_requests=1e9, store_bandwidth=1e15, driver_rate=1e9
)


def test_without_failures_and_delays_it_is_a_division() -> None:
    # 1,024,000 images in 2,000 blocks of 5.12 s on 10 workers: 1,024 s, and half a block at the end
    result = plan_extraction(1_024_000, PLAIN, workers=10)
    assert result.hours == pytest.approx((1024 + 2.56) / 3600, rel=1e-4)
    assert result.images_per_second == pytest.approx(1000, rel=1e-4)
    assert (result.shards, result.cache_bytes) == (4000, 1_024_000 * 6600)
    assert result.manifest_bytes == 4000 * 100


def test_the_cost_has_three_parts() -> None:
    cluster = replace(PLAIN, price=2.0, request_price=0.001, write_price=0.01, storage_price=0.02)
    cost = plan_extraction(1_024_000, cluster, workers=10).cost
    assert cost["workers"] == pytest.approx(10 * 2.0 * (1024 + 2.56) / 3600, rel=1e-4)
    assert cost["requests"] == pytest.approx(1024 * 0.001 + 4 * 0.01)
    assert cost["storage"] == pytest.approx(1_024_000 * 6600 / 1e9 * 0.02)


def test_failures_cost_what_a_renewal_process_costs() -> None:
    # T = 5.12 s, M = 10.24 s, D = 30 s: (10.24 + 30)(e^0.5 - 1) = 26.10 s
    cluster = Cluster(rate=100, latency=0, bandwidth=1e12, mtbf=10.24 / 3600, restart=30)
    assert cluster.expected_seconds() == pytest.approx(40.24 * (math.e**0.5 - 1), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"rate": 50.0}, "model"),
        ({"rate": 500.0, "decode_rate": 60.0}, "decoding"),
        ({"rate": 1e5, "bandwidth": 1e9}, "store latency"),
        ({"rate": 1e5, "images_per_request": 1000.0}, "worker bandwidth"),
        ({"rate": 250.0, "store_requests": 10.0}, "store request rate"),
        ({"rate": 250.0, "store_bandwidth": 1e6}, "store bandwidth"),
        ({"rate": 250.0, "driver_rate": 0.1}, "driver"),
    ],
)
def test_the_bottleneck_is_named(settings: dict[str, float], part: str) -> None:
    result = plan_extraction(1e6, Cluster(**settings), workers=10)
    assert result.records()[0]["part"] == part
    assert f"The {part} limits the extraction" in result.findings()[0]


def test_a_large_manifest_is_a_finding_with_a_shard_size_that_helps() -> None:
    result = plan_extraction(1e9, Cluster(rate=250, store_requests=1e6, store_bandwidth=1e12), workers=1000)
    assert result.manifest_bytes == pytest.approx(390.6e6, rel=1e-3)  # 2 x 1,953,125 shards
    assert any("With shard_size=4096 it would have 49 MB" in text for text in result.findings())


def test_what_one_process_does_alone_is_counted() -> None:
    # 100 M images of 110 kB at 100 MB/s: 110,000 s; names and labels: 11 GB in every worker
    result = plan_extraction(1e8, Cluster(rate=250, images_per_request=9), hours=24)
    assert result.opening_hours == pytest.approx(30.6, abs=0.1)
    assert result.memory_bytes == 11e9
    assert any("extract in 10 parts" in text for text in result.findings())
    few = plan_extraction(1e7, Cluster(rate=250), hours=24)
    # 10,000 requests that list a thousand files each, 0.03 s each
    assert few.opening_hours == pytest.approx(300 / 3600)
    assert (few.resume_hours, result.resume_hours) == pytest.approx((3.06, 30.6), abs=0.01 * 30)
    assert not any("parts" in text for text in few.findings())


@pytest.mark.parametrize("hours", [1.0, 5.0, 24.0])
@pytest.mark.parametrize("mtbf", [0.1, 100.0])
def test_the_fewest_workers_that_finish_in_time(hours: float, mtbf: float) -> None:
    cluster = Cluster(rate=20, mtbf=mtbf, restart=60)
    enough = plan_extraction(1e6, cluster, hours=hours).workers
    assert plan_extraction(1e6, cluster, workers=enough).hours <= hours
    assert enough == 1 or plan_extraction(1e6, cluster, workers=enough - 1).hours > hours


def test_without_workers_and_hours_a_plan_takes_as_long_as_it_must() -> None:
    assert plan_extraction(1e6, Cluster(rate=250)).hours <= 24
    # 1e9 images by 5,500 requests per second take 50.5 hours
    result = plan_extraction(1e9, Cluster(rate=250))
    assert result.hours == pytest.approx(1e9 / 5500 / 3600, rel=0.02)
    assert any("Fetch several images with one request" in text for text in result.findings())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueRangeError,
        match=r"in 1 hours: the store request rate .* Allow 50\.5 hours, or fetch several .*: images_per_request=9",
    ):
        plan_extraction(1e9, Cluster(rate=250), hours=1)
    with pytest.raises(ValueRangeError, match="got both"):
        plan_extraction(1e6, Cluster(rate=250), workers=3, hours=1)
    for wrong in ({"rate": 0.0}, {"rate": math.nan}, {"rate": 1.0, "mtbf": -1.0}, {"rate": 1.0, "price": -1.0}):
        with pytest.raises(ValueRangeError, match="plan: "):
            Cluster(**wrong)
    with pytest.raises(ValueRangeError, match="images must be"):
        plan_extraction(0, Cluster(rate=1.0))


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({"rate": 250.0}, 20),
        ({"rate": 20.0, "mtbf": 0.05, "restart": 30.0}, 20),  # a failure in seven blocks
        ({"rate": 20.0, "mtbf": 0.02, "restart": 60.0}, 50),  # a failure in three
        ({"rate": 250.0, "latency": 0.5, "connections": 64}, 20),
        ({"rate": 250.0, "latency": 0.5, "images_per_request": 9.0}, 20),  # workers wait for single requests
        ({"rate": 250.0, "store_requests": 2000.0}, 20),  # workers wait for the store
        ({"rate": 250.0, "driver_rate": 3.0}, 20),
        ({"rate": 100.0, "decode_rate": 40.0}, 7),
    ],
)
def test_the_closed_form_agrees_with_the_simulation_within_five_per_cent(
    settings: dict[str, float], workers: int
) -> None:
    cluster = Cluster(**settings)
    hours = [simulate(1_000_000, cluster, workers, seed=seed) for seed in range(5)]
    assert plan_extraction(1e6, cluster, workers=workers).hours == pytest.approx(sum(hours) / 5, rel=0.05)


def test_a_plan_is_plain_values() -> None:
    values = plan_extraction(1e6, Cluster(rate=250), workers=4).to_dict()
    assert values["limits"]["decoding"] is None
    assert values["cluster"]["rate"] == 250


@pytest.mark.parametrize("setting", ["rate", "mtbf", "image_bytes", "latency", "price"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e300])
def test_numbers_without_a_finite_plan_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueRangeError, match=f"plan: {setting} must be a number in"):
        Cluster(**{"rate": 250, setting: value})


def test_workers_that_fail_before_any_block_is_done() -> None:
    with pytest.raises(ValueRangeError, match=r"no block is ever finished.*smaller shard_size"):
        Cluster(rate=1, mtbf=1e-3)


def test_a_simulation_that_would_not_end_is_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"at most 10,000,000 are simulated"):
        simulate(10**15, PLAIN, 10)
