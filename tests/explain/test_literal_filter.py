"""The literal filter: brute force over the same draws, resuming, ties, and what may come through the door."""

import importlib
import json
import math

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.errors import ArtefactError, ModelError, ValueRangeError
from dubito.explain.literal_filter import BINS, binary_inputs, literal_filter, log_odds

subject = importlib.import_module("dubito.explain.literal_filter")  # the package's attribute is the function


def network(classes: int = 4, seed: int = 0) -> nn.Sequential:
    """Some three-by-three network; seeded, without touching the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, classes))


def drawn(draws: int, batch: int, seed: int) -> Tensor:
    parts = [binary_inputs((3, 3), batch, seed=seed, index=i) for i in range(math.ceil(draws / batch))]
    return torch.cat(parts)[:draws]


def brute_force(net: nn.Module, x: Tensor, top: int) -> list[list[tuple[float, int]]]:
    """By class, the first rows in the order of falling log-odds, then of rising number; all inputs at once."""
    with torch.no_grad():
        logits = net.eval()(x[:, None].float()).double()
    p = logits.softmax(1)
    rows = [(float((q.max() / (1 - q.max())).log()), i, int(q.argmax())) for i, q in enumerate(p)]
    best = sorted(rows, key=lambda row: (-round(row[0], 4), row[1]))
    return [[(odds, i) for odds, i, y in best if y == c][:top] for c in range(logits.shape[1])]


@pytest.mark.parametrize(("draws", "batch", "top"), [(1000, 64, 5), (64, 64, 3), (10, 256, 8), (700, 1, 2)])
def test_top_patterns_are_those_of_brute_force(draws, batch, top):
    net = network()
    result = literal_filter(net, (3, 3), draws=draws, batch=batch, top=top, seed=5, progress=False)
    x = drawn(draws, batch, seed=5)
    for y, expected in enumerate(brute_force(net, x, top)):
        mine = [(float(o), int(i)) for o, i in zip(result.log_odds[y], result.draw[y], strict=True) if i >= 0]
        assert [odds for odds, _ in mine] == pytest.approx([odds for odds, _ in expected], abs=1e-4)
        assert [i for _, i in mine] == [i for _, i in expected]
        for k, (_, i) in enumerate(expected):
            assert torch.equal(result.patterns[y, k], x[i])
        assert bool((result.draw[y, len(expected) :] == -1).all())
        assert bool((result.log_odds[y, len(expected) :] == -math.inf).all())


def test_with_all_512_inputs_seen_the_best_of_each_class_is_the_best_there_is():
    net = network(seed=3)
    every = torch.tensor([[i >> j & 1 for j in range(9)] for i in range(512)], dtype=torch.uint8).view(512, 3, 3)
    result = literal_filter(net, (3, 3), draws=8192, top=1, progress=False)
    assert len(drawn(8192, 2048, seed=0).flatten(1).unique(dim=0)) == 512
    for y, best in enumerate(brute_force(net, every, 1)):
        if not best:
            assert result.counts[y] == 0
            continue
        assert torch.equal(result.patterns[y, 0], every[best[0][1]])


def test_counts_and_histogram_are_those_of_the_network():
    net = network()
    result = literal_filter(net, (3, 3), draws=1500, batch=128, progress=False)
    with torch.no_grad():
        p = net.eval()(drawn(1500, 128, seed=0)[:, None].float()).double().softmax(1)
    assert result.counts.tolist() == torch.bincount(p.argmax(1), minlength=4).tolist()
    assert result.histogram.shape == (4, BINS)
    expected = torch.histc(p.amax(1), BINS, 0, 1)
    assert int((result.histogram.sum(0) - expected).abs().sum()) <= 2  # a value on an edge may fall on either side
    assert result.share_above(0.5) == pytest.approx(float((p.amax(1) >= 0.5).double().mean()), abs=2e-3)
    assert result.share_above(0.0) == 1.0


def test_of_equal_confidence_the_earlier_draw_stays():
    class Same(nn.Module):
        def forward(self, x):
            return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    result = literal_filter(Same(), (3, 3), draws=100, batch=16, top=20, progress=False)
    assert result.draw[0].tolist() == list(range(20))
    assert result.draw[1].tolist() == [-1] * 20
    assert result.findings()[1:] == [
        "100.0% are classified as class 0.",
        "Classes that no input was classified as: 1 of 2 (1).",
        "Classes with a confidence of 0.9999 or more: 0 of 2.",
    ]


def test_saturated_confidences_keep_their_order():
    class Steep(nn.Module):
        def forward(self, x):
            total = 20 * x.flatten(1).sum(1, keepdim=True)
            return torch.cat([total, torch.zeros_like(total)], 1)

    result = literal_filter(Steep(), (3, 3), draws=5000, top=3, progress=False)
    assert result.confidence[0].tolist() == [1.0, 1.0, 1.0]
    assert result.log_odds[0].tolist() == [180.0, 180.0, 180.0]  # nine pixels, twenty each
    assert result.patterns[0].sum().item() == 27


def test_log_odds_are_those_of_the_softmax():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(1))
    odds, label = log_odds(logits)
    p = logits.double().softmax(1).amax(1)
    assert torch.allclose(odds.double(), (p / (1 - p)).log(), atol=1e-5)
    assert torch.equal(label, logits.argmax(1))


def test_inputs_are_uniform_and_depend_on_seed_and_number_alone():
    x = torch.cat([binary_inputs((9, 9), 512, seed=2, index=i) for i in range(20)]).double()
    assert set(x.unique().tolist()) == {0.0, 1.0}
    assert float((x.mean(0) - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(len(x))  # five standard errors
    flat = x.flatten(1) - 0.5
    correlation = (flat.T @ flat) / (len(x) / 4) - torch.eye(81, dtype=torch.float64)
    assert float(correlation.abs().max()) < 6 / math.sqrt(len(x))
    assert torch.equal(binary_inputs((9, 9), 64, seed=2, index=3), binary_inputs((9, 9), 64, seed=2, index=3))
    assert not torch.equal(binary_inputs((9, 9), 64, seed=2, index=3), binary_inputs((9, 9), 64, seed=2, index=4))
    assert not torch.equal(binary_inputs((9, 9), 64, seed=2, index=3), binary_inputs((9, 9), 64, seed=3, index=3))


def test_the_bits_do_not_change_between_versions():
    words = "".join(str(bit) for bit in binary_inputs((4,), 4, seed=1, index=2).flatten().tolist())
    assert words == "0000100101101011"


class Stops(nn.Module):
    """Dies at one of its passes, as a killed process would."""

    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.inner(x)


@pytest.mark.parametrize("at", [1, 2, 7, 10])
@pytest.mark.parametrize("every", [0.0, 1e9])
def test_a_killed_run_goes_on_and_ends_with_the_same_bits(tmp_path, monkeypatch, at, every):
    monkeypatch.setattr(subject, "_EVERY", every)
    options = {"draws": 620, "batch": 64, "top": 4, "progress": False}
    whole = literal_filter(Stops(network(), 0), (3, 3), **options)
    file = tmp_path / "new" / "filter.safetensors"
    with pytest.raises(KeyboardInterrupt):
        literal_filter(Stops(network(), at), (3, 3), checkpoint=file, **options)
    assert file.exists() == (at > 1 and every == 0.0)
    passes = Stops(network(), 0)
    result = literal_filter(passes, (3, 3), checkpoint=file, **options)
    assert -passes.left == (10 - (at - 1) if every == 0.0 else 10)
    for key in ("histogram", "log_odds", "draw", "patterns"):
        assert torch.equal(getattr(result, key), getattr(whole, key)), key
    again = Stops(network(), 0)
    assert literal_filter(again, (3, 3), checkpoint=file, **options).to_dict() == result.to_dict()
    assert again.left == 0  # finished: nothing is run


def test_more_draws_go_on_from_a_finished_run(tmp_path):
    options = {"batch": 64, "top": 4, "progress": False}
    file = tmp_path / "filter.safetensors"
    literal_filter(network(), (3, 3), draws=100, checkpoint=file, **options)
    longer = literal_filter(network(), (3, 3), draws=300, checkpoint=file, **options)
    whole = literal_filter(network(), (3, 3), draws=300, **options)
    assert longer.draw.tolist() == whole.draw.tolist()
    assert longer.counts.tolist() == whole.counts.tolist()
    with pytest.raises(ArtefactError, match=r"holds another filter run: the draws \(300 there, 200 here\)"):
        literal_filter(network(), (3, 3), draws=200, checkpoint=file, **options)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "filter.safetensors"
    literal_filter(network(), (3, 3), draws=10, checkpoint=file, progress=False)
    with pytest.raises(ArtefactError, match=r"the seed \(0 there, 1 here\). Name another file"):
        literal_filter(network(), (3, 3), draws=10, seed=1, checkpoint=file, progress=False)
    with pytest.raises(ArtefactError, match=r"another filter run: the model \("):
        literal_filter(network(seed=9), (3, 3), draws=10, checkpoint=file, progress=False)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ArtefactError, match=r"cannot be read .*checksum does not match.*Delete it to filter"):
        literal_filter(network(), (3, 3), draws=10, checkpoint=file, progress=False)
    file.write_bytes(b"nonsense")
    with pytest.raises(ArtefactError, match="cannot be read"):
        literal_filter(network(), (3, 3), draws=10, checkpoint=file, progress=False)


def test_a_classifier_gives_what_its_module_gives_and_modes_stay():
    net = network().train()
    result = literal_filter(net, (3, 3), draws=300, top=2, progress=False)
    assert net.training
    assert net[3].training
    wrapped = literal_filter(dubito.wrap(net, name="mine"), (3, 3), draws=300, top=2, progress=False)
    assert wrapped.name == "mine"
    assert torch.equal(wrapped.draw, result.draw)
    again = literal_filter(net, (1, 3, 3), draws=300, top=2, progress=False)
    assert torch.equal(again.patterns[:, :, 0], result.patterns)  # the same bits, with a channel of their own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_modules_of_another_precision(dtype):
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 3)).to(dtype)
    result = literal_filter(net, (3, 3), draws=200, top=1, progress=False)
    assert int(result.counts.sum()) == 200
    wrapped = literal_filter(dubito.wrap(net, name="mine"), (3, 3), draws=200, top=1, progress=False)
    assert torch.equal(wrapped.draw, result.draw)


def test_json_text_and_plot():
    result = literal_filter(network(), (3, 3), draws=300, top=2, progress=False)
    plain = json.loads(json.dumps(result.to_dict()))
    assert sum(plain["counts"]) == sum(plain["histogram"]) == 300
    y = int(result.counts.argmax())
    assert plain["patterns"][y][0] == "".join(str(bit) for bit in result.patterns[y, 0].flatten().tolist())
    assert str(result).startswith("Sequential as a filter of 300 inputs\nclass  inputs  share  highest confidence\n")
    assert str(result).endswith("\n".join(result.findings()))
    pytest.importorskip("matplotlib")
    assert len(result.plot(classes=list("abcd"))) == 8
    flat = literal_filter(nn.Linear(4, 2), (4,), draws=10, progress=False)
    with pytest.raises(ValueRangeError, match=r"one picture each; got shape \(4,\)"):
        flat.plot()


@pytest.mark.parametrize(
    "bad", [{"draws": 0}, {"top": 0}, {"batch": 0}, {"seed": -1}, {"shape": (3, 0)}, {"shape": ()}]
)
def test_settings_without_a_meaning_are_refused(bad):
    (setting,) = bad
    least = "0; got -1" if setting == "seed" else r"1; got 0. The paper has 2\*\*27 draws"
    with pytest.raises(ValueRangeError, match=f"{setting} must be a whole number, at least {least}"):
        literal_filter(network(), **{"shape": (3, 3), "draws": 10, **bad})


def test_outputs_that_are_no_logits_are_refused():
    with pytest.raises(ModelError, match=r"must return logits \(n, c\).*got \(10, 1\) for 10 inputs"):
        literal_filter(nn.Sequential(nn.Flatten(), nn.Linear(9, 1)), (3, 3), draws=10, progress=False)
    with pytest.raises(ModelError, match=r"got \(10, 1, 3, 3\) for 10 inputs"):
        literal_filter(nn.Identity(), (3, 3), draws=10, progress=False)
    broken = network()
    nn.init.constant_(broken[-1].bias, torch.nan)
    with pytest.raises(ValueRangeError, match="logits of Sequential: 40 of 40 values are NaN"):
        literal_filter(broken, (3, 3), draws=10, progress=False)
