"""A running service of a small guard, and what clients send to it."""

import asyncio
import io
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.serve import Service, ServiceLimits, serve

CLASSES = ["ant", "bee", "cat"]


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: a browser of other tests keeps an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return dubito.wrap(net.eval(), transform=dubito.Preprocess(size=32, resize=32), classes=CLASSES, name="tiny")


def pixels(n: int, seed: int = 0) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(10, axis=1).repeat(10, axis=2)


def encoded(array: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


def pictures(n: int, seed: int = 7) -> list[bytes]:
    return [encoded(one) for one in pixels(n, seed)]


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> dubito.Guard:
    model, folder = network(), tmp_path_factory.mktemp("serve")
    table = dubito.extract(model, pixels(500), to=folder / "cache", progress=False)
    u = dubito.Entropy().score(table)
    wrong = torch.rand(len(u), generator=torch.Generator().manual_seed(1)) < (u.argsort().argsort() / len(u)) ** 3 / 2
    table = table.extended(label=(table.logit.argmax(1) + wrong.long()) % 3)
    return dubito.Guard.fit(model, table, risk=0.1)


@pytest.fixture(scope="module")  # not longer: while it runs, the process keeps freed memory
def service(guard: dubito.Guard) -> Iterator[Service]:
    with serve(guard, port=0, limits=ServiceLimits(max_mb=2.0, deadline_s=4.0, queue=16, workers=1)) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.address, timeout=30) as one:
        yield one


def files(contents: list[bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("image", (f"{number}.png", content)) for number, content in enumerate(contents)]


class SlowModel:
    """Holds every batch of a guard until it is released, and remembers what it saw."""

    def __init__(self, guard: dubito.Guard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, self.started = threading.Event(), threading.Event()
        self.batches: list[int] = []
        predict = dubito.Guard.predict

        def slow(own: dubito.Guard, images: Any) -> dubito.Table:
            if list(images.ids) != ["warm-up"]:
                self.batches.append(len(images))
                self.started.set()
                assert self.release.wait(30)
            return predict(own, images)

        monkeypatch.setattr(dubito.Guard, "predict", slow)


def log_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def log_line(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one that a request has left: it is written after the answer was sent."""
    text, end = "", time.monotonic() + 5
    while "\n" not in text and time.monotonic() < end:
        text += capfd.readouterr().err
    (line,) = log_lines(text)
    return line
