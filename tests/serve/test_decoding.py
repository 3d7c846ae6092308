"""Worker processes: what they prepare, and what happens to images that take too long or end them."""

import asyncio
import io
import os
import time
import zlib

import pytest
import torch
from PIL import Image

import dubito
from dubito.errors import BrokenImageError, ImagesError
from dubito.models.transform import FunctionTransform, NoTransform
from dubito.serve.decoding import DecoderError, Decoders

from .conftest import encoded, pixels, run_async


def misbehave(image: Image.Image) -> torch.Tensor:
    """Hangs for wide images, ends its process for tall ones, fails for squares but one."""
    if image.width > 100:
        time.sleep(60)
    if image.height > 100:
        os._exit(1)
    if image.width == image.height == 10:
        raise RuntimeError("ten by ten")
    return torch.zeros(3, 2, 2)


@pytest.fixture(scope="module")
def hostile():
    decoders = Decoders(FunctionTransform(misbehave), 1, seconds=1.0)
    yield decoders
    decoders.close()


def sized(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_are_prepared_as_in_this_process():
    transform = dubito.Preprocess(size=24, resize=32)
    decoders = Decoders(transform, 2, seconds=5.0)
    try:
        for one in pixels(3):
            there = decoders.prepare_now(encoded(one), "x")
            assert torch.equal(there, transform.prepare(Image.fromarray(one)))
    finally:
        decoders.close()


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [(101, 5, "decoded within 1 s"), (5, 101, "ended the process"), (10, 10, "RuntimeError: ten by ten")],
)
def test_an_image_that_fails_costs_one_image(hostile, width, height, words):
    with pytest.raises(BrokenImageError, match=words):
        hostile.prepare_now(sized(width, height), "bad.png")
    start = time.perf_counter()
    assert hostile.prepare_now(sized(5, 5), "good.png").shape == (3, 2, 2)
    assert time.perf_counter() - start < 3


def test_a_process_that_ended_while_idle_costs_no_image(hostile):
    hostile.prepare_now(sized(5, 5), "first.png")
    (worker,) = hostile._all
    worker._process.kill()
    worker._process.join()
    assert hostile.prepare_now(sized(5, 5), "next.png").shape == (3, 2, 2)


def test_a_process_that_cannot_be_started_is_not_the_images_fault(hostile, monkeypatch):
    def full(*_, **__):
        raise OSError(11, "no more processes")

    (worker,) = hostile._all
    worker.end()
    with monkeypatch.context() as patched:
        patched.setattr(worker._context.Process, "start", full)
        with pytest.raises(DecoderError, match="no more processes"):
            hostile.prepare_now(sized(5, 5), "good.png")
    assert hostile.prepare_now(sized(5, 5), "again.png").shape == (3, 2, 2)


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 3_000)])
def test_too_many_pixels_are_refused_before_they_are_decoded(hostile, size):
    start = time.perf_counter()
    # The size in the header of a PNG, and its checksum.
    content = bytearray(sized(8, 8))
    content[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    with pytest.raises(BrokenImageError, match="decompression bomb"):
        hostile.prepare_now(bytes(content), "bomb.png")
    assert time.perf_counter() - start < 1


def test_transforms_that_cannot_serve():
    with pytest.raises(ImagesError, match="cannot be sent to worker processes"):
        Decoders(FunctionTransform(lambda image: torch.zeros(3)), 1, seconds=1.0)
    with pytest.raises(ImagesError, match="cannot prepare them: this model was wrapped without a transform"):
        Decoders(NoTransform(), 1, seconds=1.0)


def test_cancelled_images_take_no_process(hostile):
    async def race() -> float:
        slow = asyncio.create_task(hostile.prepare(sized(101, 5), "slow"))
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(hostile.prepare(sized(101, 5), "gone")) for _ in range(20)]
        await asyncio.sleep(0.1)
        for one in waiting:
            one.cancel()
        start = time.perf_counter()
        await hostile.prepare(sized(5, 5), "next")
        took = time.perf_counter() - start
        with pytest.raises(BrokenImageError):
            await slow
        return took

    assert run_async(race()) < 4  # the slow one takes a second; twenty more would take twenty
