"""Many threads, forks, workers and requests at once: every answer is the one of a single thread, and nothing fails."""

import contextlib
import copy
import io
import json
import os
import pickle
import random
import signal
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import faiss
import numpy as np
import pytest
import torch
from jaxtyping import config
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dubito
from dubito.errors import DubitoError, ValueRangeError
from dubito.models.transform import Preprocess
from dubito.probes import Dropout, Forward, Gradient, PreActivation, Tiles, Views

THREADS, CALLS, IMAGES = 8, 200, 25
SIZE = 12


@pytest.fixture(scope="module", autouse=True)
def _quick(one_thread):
    """Without the type checks of the tests, which take three quarters of the time of so many calls."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


class Net(nn.Module):
    """In train mode, with a counter, dropout and BatchNorm: much of it changes during a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(self.pool(self.body(x + self.calls)).flatten(1))


@pytest.fixture(scope="module")
def model():
    return dubito.wrap(Net(), transform=Preprocess(SIZE))


@pytest.fixture(scope="module")
def pictures():
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for _ in range(IMAGES)]


@pytest.fixture(scope="module")
def guard(model, tmp_path_factory):
    x, folder = torch.rand(400, 3, SIZE, SIZE), tmp_path_factory.mktemp("guard")
    with torch.no_grad():
        label = model.logits(model.features(x)).argmax(1)
    label[::40] = (label[::40] + 1) % 4
    table = dubito.extract(model, x, folder / "cache", labels=label, progress=False)
    # Its scores have tests of their own: most of the time is to go into passes.
    return dubito.Guard.fit(model, table, risk=0.2, scores="entropy", sets=False, novel=0.0)


def answers_of_threads(answer, inputs, calls=CALLS, threads=THREADS):
    """What every thread got, each starting elsewhere in the inputs."""

    def work(thread):
        start.wait()
        return [(row, answer(inputs[row])) for row in ((7 * thread + call) % len(inputs) for call in range(calls))]

    start = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        return [pair for result in pool.map(work, range(threads)) for pair in result]


def check(answer, inputs, calls=CALLS):
    expected = [pickle.dumps(answer(one)) for one in inputs]
    for row, result in answers_of_threads(answer, inputs, calls):
        assert pickle.dumps(result) == expected[row]


def plain(columns):
    return {name: column.numpy().tobytes() for name, column in columns.items()}


def test_a_guard_answers_as_in_one_thread(guard, pictures):
    check(lambda picture: guard(picture).to_dict(), pictures)
    assert guard.model.module.training
    assert float(guard.model.module.calls) == 0


def test_a_model_answers_as_in_one_thread(pictures):
    x = torch.stack([torch.tensor(one).permute(2, 0, 1) / 255 for one in pictures])
    module = Net()
    models = [dubito.wrap(module), dubito.wrap(module)]  # of one module, not understood yet

    def answer(row):
        one = models[row % 2]
        z, tiled = one.features(x[row : row + 2]), one.tiled(x[row : row + 2])
        return [each.numpy().tobytes() for each in (z, one.logits(z), tiled.features, tiled.logits(0, 2))]

    results = answers_of_threads(answer, range(IMAGES - 1), calls=20)
    expected = [answer(row) for row in range(IMAGES - 1)]
    assert all(result == expected[row] for row, result in results)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())


PROBES = [Dropout(3), Gradient(), Tiles(), PreActivation(), Views(), Forward()]


@pytest.mark.parametrize("probe", PROBES, ids=[probe.name for probe in PROBES])
def test_a_probe_answers_as_in_one_thread(model, probe):
    torch.manual_seed(0)
    inputs = list(torch.rand(6, 2, 3, SIZE, SIZE))
    check(lambda x: plain(probe.run(model, x, None)), inputs, calls=6)


def test_scores_and_searches_answer_as_in_one_thread():
    draw = np.random.default_rng(1)
    train = dubito.Table(
        feature=draw.normal(size=(300, 8)), logit=draw.normal(size=(300, 4)), label=draw.integers(0, 4, 300)
    )
    tables = [dubito.Table(feature=draw.normal(size=(5, 8)), logit=draw.normal(size=(5, 4))) for _ in range(IMAGES)]
    scores = [dubito.Entropy(), dubito.Density().fit(train), dubito.Neighbours().fit(train)]
    for score in scores:
        check(lambda table, score=score: score.score(table).numpy().tobytes(), tables, calls=20)
    index = dubito.SafeIndex.build(train, dubito.Entropy())
    check(lambda table: index.search(table, k=3, sets=True).to_dict(), tables, calls=20)


def test_an_index_keeps_what_many_threads_write():
    index = dubito.SafeIndex(4, clean="none")
    draw = np.random.default_rng(0).normal(size=(THREADS, 50, 4))

    def write(thread):
        for row in range(50):
            index.add(draw[thread, row][None], [0.5], ids=[f"{thread}-{row}"])
            assert f"{thread}-{row}" in index
            index.search(draw[thread, row][None], [0.1], k=1)
            if row % 5 == 0:
                index.remove([f"{thread}-{row}"])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(THREADS)))
    assert len(index) == THREADS * 40
    for thread in range(THREADS):
        for row in range(1, 50, 7):
            if row % 5:
                nearest = index.search(draw[thread, row][None], [0.1], k=1)
                assert nearest.ids[0, 0] == f"{thread}-{row}"
    assert len(copy.deepcopy(index)) == len(pickle.loads(pickle.dumps(index))) == len(index)  # noqa: S301


def test_many_threads_add_without_ids():
    index = dubito.SafeIndex(4, clean="none")
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: index.add(np.ones((1, 4)), [0.5]), range(100)))
    assert len(index) == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def exit_code(child: int, seconds: float = 300) -> int:
    """Of a child, which is killed after a while: a deadlock fails the test and does not hang it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_in_the_middle_of_passes(guard, model, pictures):
    """Children start while other threads are in a pass, in which the module is not what it was."""
    expected = [guard(one).to_json() for one in pictures[:4]]
    stop = threading.Event()
    busy = [threading.Thread(target=lambda: [guard(pictures[0]) for _ in iter(stop.is_set, True)]) for _ in range(3)]
    for thread in busy:
        thread.start()
    codes = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            faiss.omp_set_num_threads(1)
            same = [guard(one).to_json() for one in pictures[:4]] == expected
            os._exit(0 if same and model.module.training and float(model.module.calls) == 0 else 1)
        codes.append(exit_code(child))
    stop.set()
    for thread in busy:
        thread.join()
    assert codes == [0] * 5


class Guarded(Dataset):
    """Asks the guard in a worker process."""

    def __init__(self, guard, pictures) -> None:
        self.guard, self.pictures = guard, pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> str:
        return self.guard(self.pictures[row]).to_json()


def test_workers_of_a_loader(guard, pictures):
    expected = [guard(one).to_json() for one in pictures]
    assert list(DataLoader(Guarded(guard, pictures), batch_size=None, num_workers=2)) == expected


def test_a_server_of_many_requests(guard, pictures):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            image = Image.open(io.BytesIO(self.rfile.read(int(self.headers["Content-Length"]))))
            body = guard(image).to_json().encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Not to the terminal."""

    def ask(picture):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "png")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", file.getvalue()) as reply:
            return json.loads(reply.read())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        expected = [json.loads(guard(Image.fromarray(one)).to_json()) for one in pictures]
        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(ask, pictures * 2)) == expected * 2
    finally:
        server.shutdown()
        server.server_close()


def draw():
    """From each generator of the process."""
    return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002, S311


def states():
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


class Overtaken(nn.Module):
    """While it is in a pass, another thread draws; or it draws itself, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.by, self.fails = nn.Linear(3 * SIZE * SIZE, 4), "nobody", False

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "another thread":
            with ThreadPoolExecutor(1) as pool:
                self.after = pool.submit(lambda: (draw(), states())[1]).result()
        if self.by == "itself":
            draw()
        assert not self.fails
        return self.fc(x.flatten(1))


def to_input(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


CALLS_OF = {
    "guard of a file": lambda guard, file, to: guard(file),
    "guard of an array": lambda guard, file, to: guard(np.array(Image.open(file))),
    "guard of pictures": lambda guard, file, to: guard([Image.open(file), Image.open(file)]),
    "extract": lambda guard, file, to: dubito.extract(guard.model, file.parent, to, workers=0, progress=False),
    "extract with workers": lambda guard, file, to: dubito.extract(guard.model, file.parent, to, progress=False),
    "audit": lambda guard, file, to: dubito.audit(guard.model, file.parent, progress=False),
}


@pytest.mark.parametrize("transform", [Preprocess(SIZE), to_input], ids=["our transform", "another"])
@pytest.mark.parametrize("call", CALLS_OF.values(), ids=CALLS_OF)
def test_what_other_threads_draw_meanwhile_is_not_drawn_again(call, transform, pictures, tmp_path):
    module = Overtaken()
    model, file = dubito.wrap(module, transform=transform), tmp_path / "files" / "one.png"
    file.parent.mkdir()
    Image.fromarray(pictures[0]).save(file)
    table = dubito.extract(model, torch.rand(100, 3, SIZE, SIZE), labels=torch.arange(100) % 4, progress=False)
    guard = dubito.Guard.fit(model, table, coverage=0.5, scores="entropy", sets=False, novel=0.0)
    module.by = "another thread"
    call(guard, file, tmp_path / "cache")
    assert states() == module.after
    module.by = "nobody"
    before = states()
    call(guard, file, tmp_path / "another")
    assert states() == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("who", ["module", "transform", "data set"])
def test_what_the_user_s_own_code_draws_is_undone(who, fails, pictures):
    def transform(image):
        if who == "transform":
            draw()
        assert not fails or len(seen) < 20
        seen.append(image)
        return to_input(image)

    class Drawing(list):
        def __getitem__(self, row):
            draw()
            return super().__getitem__(row)

    seen, module = [], Overtaken()
    module.by, module.fails = ("itself", fails) if who == "module" else ("nobody", False)
    model = dubito.wrap(module, transform=transform)
    images = Drawing(map(Image.fromarray, pictures)) if who == "data set" else pictures
    before = states()
    with pytest.raises(DubitoError) if fails else contextlib.nullcontext():
        dubito.extract(model, images, workers=0, progress=False)
    assert states() == before


def test_a_search_for_half_a_neighbour():
    index = dubito.SafeIndex.build(np.eye(4), np.zeros(4), clean="none")
    with pytest.raises(ValueRangeError, match=r"SafeIndex\.search: k must be a whole number.*; got 1\.5"):
        index.search(np.eye(4)[:1], k=1.5)
