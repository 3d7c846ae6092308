"""The queue: batches, full queues, deadlines, clients that go, and the end of the service."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from dubito.serve import ServiceLimits, serve
from dubito.serve.batching import Batcher, ModelThread, QueueFullError

from .conftest import SlowModel, files, log_lines, pictures, run_async


def batcher(run, **settings):
    options = {"capacity": 100, "max_batch": 4, "max_wait": 0.2} | settings
    return Batcher(run, ThreadPoolExecutor(1), **options)


def together(kind, ids, images):
    """Each image's answer is its batch."""
    return [list(ids) for _ in ids]


def run(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, 20)

    return run_async(limited())


def test_calls_run_in_the_thread_that_takes_over_until_the_end():
    model = ModelThread()
    own = model.submit(threading.get_ident).result()
    numbers = [model.submit(threading.get_ident)]  # before or after: either thread runs it, once
    later = threading.Timer(0.1, lambda: numbers.append(model.submit(threading.get_ident)))
    failing = threading.Timer(0.2, lambda: numbers.append(model.submit(int, "no number")))
    ending = threading.Timer(0.3, model.shutdown)
    for timer in (later, failing, ending):
        timer.start()
    model.take_over()
    ending.join()
    assert own != threading.get_ident()
    assert numbers[0].result() in (own, threading.get_ident())
    assert numbers[1].result() == threading.get_ident()
    with pytest.raises(ValueError, match="no number"):
        numbers[2].result()


def test_a_thread_that_has_ended_cannot_be_taken_over_but_returns():
    model = ModelThread()
    model.shutdown()
    model.take_over()


def test_images_of_many_requests_share_batches_of_at_most_the_largest_size():
    async def scenario():
        queue = batcher(together)
        with queue.admit(6):
            asked = [asyncio.create_task(queue.answer("x", str(one), torch.zeros(3))) for one in range(6)]
            await asyncio.sleep(0)
            loop = asyncio.create_task(queue.run())
            answers = await asyncio.gather(*asked)
        loop.cancel()
        return answers

    assert run(scenario()) == 4 * [["0", "1", "2", "3"]] + 2 * [["4", "5"]]


def test_a_lone_image_does_not_wait():
    async def scenario():
        queue = batcher(together, max_wait=10.0)
        loop = asyncio.create_task(queue.run())
        with queue.admit(1):
            await queue.answer("x", "a", torch.zeros(3))
        loop.cancel()

    start = time.perf_counter()
    run(scenario())
    assert time.perf_counter() - start < 2


def test_an_image_waits_for_one_that_is_being_decoded_but_not_longer_than_allowed():
    async def scenario(delay):
        queue = batcher(together, max_wait=0.3)
        loop = asyncio.create_task(queue.run())
        with queue.admit(2):
            first = asyncio.create_task(queue.answer("x", "a", torch.zeros(3)))
            await asyncio.sleep(delay)
            second = asyncio.create_task(queue.answer("x", "b", torch.zeros(3)))
            answers = await asyncio.gather(first, second)
        loop.cancel()
        return answers

    assert run(scenario(0.05)) == [["a", "b"], ["a", "b"]]
    assert run(scenario(0.8)) == [["a"], ["b"]]


def test_groups_have_one_kind_and_one_shape():
    async def scenario():
        queue = batcher(together)
        images = [("x", "a", 3), ("y", "b", 3), ("x", "c", 3), ("x", "d", 5)]
        with queue.admit(4):
            asked = [asyncio.create_task(queue.answer(kind, name, torch.zeros(n))) for kind, name, n in images]
            loop = asyncio.create_task(queue.run())
            answers = await asyncio.gather(*asked)
        loop.cancel()
        return answers

    assert run(scenario()) == [["a", "c"], ["b"], ["a", "c"], ["d"]]


def test_one_image_that_fails_does_not_fail_its_batch():
    def fail_on_b(kind, ids, images):
        if "b" in ids:
            raise ValueError("b")
        return list(ids)

    async def scenario():
        queue = batcher(fail_on_b)
        with queue.admit(3):
            asked = [asyncio.create_task(queue.answer("x", name, torch.zeros(3))) for name in "abc"]
            loop = asyncio.create_task(queue.run())
            answers = await asyncio.gather(*asked, return_exceptions=True)
        loop.cancel()
        return answers

    first, second, third = run(scenario())
    assert (first, str(second), third) == ("a", "b", "c")


def test_cancelled_images_are_left_out():
    async def scenario():
        queue = batcher(together)
        with queue.admit(2):
            gone, stays = (asyncio.create_task(queue.answer("x", name, torch.zeros(3))) for name in "ab")
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.sleep(0)
            loop = asyncio.create_task(queue.run())
            answer = await stays
        loop.cancel()
        return answer

    assert run(scenario()) == ["b"]


def test_room_is_counted_in_images():
    queue = batcher(together, capacity=3)
    words = "2 of 3 images are under way, and 2 more were sent"
    with queue.admit(2), pytest.raises(QueueFullError, match=words), queue.admit(2):
        pass
    with queue.admit(3):
        pass


def start(guard, **limits):
    return serve(guard, port=0, limits=ServiceLimits(**{"workers": 1, "deadline_s": 10.0} | limits))


def test_a_full_queue_is_429_and_then_goes_on(guard, monkeypatch):
    slow = SlowModel(guard, monkeypatch)
    with start(guard, queue=4, max_batch=2) as service, ThreadPoolExecutor(4) as clients:
        url = f"{service.address}/guard"
        four = [clients.submit(httpx.post, url, content=one, timeout=30) for one in pictures(4)]
        assert slow.started.wait(10)
        waiting = f"{service.address}/metrics"
        while "dubito_queue_images 4.0" not in httpx.get(waiting).text:
            time.sleep(0.02)
        refused = httpx.post(url, content=pictures(1)[0])
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert httpx.post(url, files=files(pictures(5))).status_code == 413  # it could never be admitted
        slow.release.set()
        assert [one.result().status_code for one in four] == [200] * 4
        assert httpx.post(url, content=pictures(1)[0]).status_code == 200
    assert max(slow.batches) == 2


def test_no_answer_in_time_is_504_and_the_next_request_is_answered(guard, monkeypatch):
    slow = SlowModel(guard, monkeypatch)
    with start(guard, deadline_s=0.5) as service:
        url = f"{service.address}/guard"
        assert httpx.post(url, content=pictures(1)[0]).status_code == 504
        slow.release.set()
        time.sleep(0.2)
        assert httpx.post(url, content=pictures(1)[0]).status_code == 200
        assert "dubito_queue_images 0.0" in httpx.get(f"{service.address}/metrics").text


def test_the_deadline_includes_the_time_that_the_body_takes(guard, monkeypatch):
    slow = SlowModel(guard, monkeypatch)
    content = pictures(1)[0]
    with start(guard, deadline_s=2.0) as service:
        host, port = service.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            began = time.perf_counter()
            head = f"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content[:-1])
            time.sleep(1.5)
            client.sendall(content[-1:])
            assert client.recv(100).startswith(b"HTTP/1.1 504")
            assert 1.9 < time.perf_counter() - began < 3  # 3.5 if both the body and the answer had two seconds
        slow.release.set()


def test_images_of_a_client_that_has_gone_are_not_run(guard, monkeypatch, capfd):
    slow = SlowModel(guard, monkeypatch)
    with start(guard) as service, ThreadPoolExecutor(1) as clients:
        url = f"{service.address}/guard"
        first = clients.submit(httpx.post, url, content=pictures(1)[0], timeout=30)
        assert slow.started.wait(10)
        content = pictures(1)[0]
        host, port = service.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as gone:
            head = f"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            gone.sendall(head.encode() + content)
            time.sleep(0.5)
        time.sleep(0.3)
        slow.release.set()
        assert first.result().status_code == 200
        assert httpx.post(url, content=content).status_code == 200
    assert slow.batches == [1, 1]
    assert [one["status"] for one in log_lines(capfd.readouterr().err)] == [499, 200, 200]


def test_what_was_accepted_is_answered_when_the_service_ends(guard, monkeypatch):
    slow = SlowModel(guard, monkeypatch)
    service = start(guard)
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(httpx.post, f"{service.address}/guard", content=pictures(1)[0], timeout=30)
        assert slow.started.wait(10)
        closing = threading.Thread(target=service.close)
        closing.start()
        time.sleep(0.3)
        slow.release.set()
        assert asked.result().status_code == 200
        closing.join(20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(service.address)
