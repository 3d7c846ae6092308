"""A head on disk: its files, its config, its card, and damage that is noticed."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.checkpoint import FORMAT, HeadConfig, PretrainedHead, make_card, read_config, read_head, write_head
from dubito.heads.module import HeadModule
from dubito.heads.shelf import find_head
from dubito.table import Provenance


def head(*, depth: int = 2, dtype: str = "float32", card: str = "", seed: int = 3) -> PretrainedHead:
    module = HeadModule(5, width=4, depth=depth, seed=seed)
    return PretrainedHead(module, HeadConfig(features=5, width=4, depth=depth, model="timm:a", dtype=dtype), card)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_head(tmp_path / "mine", head())


def edit(folder: Path, **entries: object) -> None:
    """As the first heads were written, without a hash of the config."""
    path = folder / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({key: one for key, one in described.items() if key != "digest"} | entries))


def test_three_files_and_nothing_else(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (folder / "README.md").read_text() == make_card(head().config)


def test_a_config_that_was_changed_since(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"timm:a"', '"timm:b"'))
    with pytest.raises(ArtefactError, match=r"config\.json was changed after it was written"):
        read_head(folder)
    edit(folder, model="timm:c")
    assert read_head(folder).config.model == "timm:c"


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_float32_comes_back_to_the_bit(tmp_path, depth):
    before = head(depth=depth, card="# mine")
    after = read_head(write_head(tmp_path, before))
    z = torch.randn(7, 5)
    assert torch.equal(after.module(z), before.module(z))
    assert (after.config, after.card) == (before.config, "# mine")
    assert not after.module.training
    assert read_config(tmp_path) == before.config


def test_float16_halves_the_file_and_is_read_as_float32(tmp_path):
    before = head(dtype="float16")
    after = read_head(write_head(tmp_path / "a", before))
    assert {value.dtype for value in load_file(tmp_path / "a" / "model.safetensors").values()} == {torch.float16}
    for mine, theirs in zip(before.module.parameters(), after.module.parameters(), strict=True):
        assert theirs.dtype == torch.float32
        assert torch.equal(theirs, mine.half().float())
    write_head(tmp_path / "b", after)
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()


def test_writing_again_replaces(tmp_path):
    write_head(tmp_path, head(seed=1))
    write_head(tmp_path, head(seed=2))
    assert torch.equal(read_head(tmp_path).module.layers[0].weight, head(seed=2).module.layers[0].weight)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("files", range(4))
def test_killed_between_the_files_of_a_replacement_one_of_the_two_heads_is_there(tmp_path, monkeypatch, files):
    write_head(tmp_path, head(seed=1))
    writes = [lambda path, data: path.write_bytes(data)] * files

    def write(path, data):
        if not writes:
            raise KeyboardInterrupt
        writes.pop()(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("dubito.heads.checkpoint.write_file", write)
        patch.setattr("dubito.storage.files.write_file", write)
        with pytest.raises(KeyboardInterrupt):
            write_head(tmp_path, head(seed=2))
    kept = read_head(tmp_path).module.layers[0].weight
    assert any(torch.equal(kept, head(seed=seed).module.layers[0].weight) for seed in (1, 2))
    write_head(tmp_path, head(seed=2))
    assert torch.equal(read_head(tmp_path).module.layers[0].weight, head(seed=2).module.layers[0].weight)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArtefactError, match=r"the head cannot be saved in '.*taken' \(.*\)\. Choose another place"):
        write_head(tmp_path / "taken", head())
    wrong = head()._replace(config=HeadConfig(features=6, width=4))
    with pytest.raises(
        ArtefactError, match=r"must be \(5, 4, 2\), as those of the module; the config says \(6, 4, 2\)"
    ):
        write_head(tmp_path / "new", wrong)
    large = head(dtype="float16")
    large.module.layers[2].weight.data[0, 0] = 1e6  # float16 ends at 65504
    with pytest.raises(
        ValueRangeError, match=r"layers\.2\.weight has values .* too large for float16.*keep it in float32"
    ):
        write_head(tmp_path / "new", large)
    broken = head()
    broken.module.layers[0].bias.data[1] = float("nan")
    with pytest.raises(ValueRangeError, match=r"layers\.0\.bias has values that are NaN.*Train it again\.$"):
        write_head(tmp_path / "new", broken)
    assert not (tmp_path / "new").exists()


def test_a_missing_folder_or_file(folder):
    with pytest.raises(
        ArtefactError, match=r"no head in '.*gone': there is no such folder\. Pass a folder that save_pre"
    ):
        read_head(folder / "gone")
    (folder / "README.md").unlink()
    assert read_head(folder).card == make_card(head().config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtefactError, match=r"model\.safetensors is not there"):
        read_head(folder)
    assert read_config(folder).features == 5
    (folder / "config.json").unlink()
    with pytest.raises(ArtefactError, match=r"config\.json is not there"):
        read_head(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_no_json(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(
        ArtefactError, match=r"(?s)config\.json cannot be read \(.*\)\. Copy it again, or save the head again"
    ):
        read_head(folder)


def test_a_config_of_another_format(folder):
    edit(folder, format=99)
    with pytest.raises(ArtefactError, match=r"is not a head's config\.json of format 1; got format 99\. Update dubito"):
        read_head(folder)


@pytest.mark.parametrize(
    "change", [{"features": 6}, {"width": 5}, {"depth": 1}, {"depth": 10**9}, {"features": 10**12}]
)
def test_a_config_that_reports_of_another_head(folder, change):
    edit(folder, **change)
    with pytest.raises(
        ArtefactError, match=r"expected a head of .*; got .*layers\.0\.weight \(4, 5\).*both of the same head"
    ):
        read_head(folder)


def test_a_pickle_under_the_name_is_not_run(folder, tmp_path):
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return Path.write_text, (marker, "boom")

    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(
        ArtefactError, match=r"is not the file that config\.json was written with.*nothing in it was executed"
    ):
        read_head(folder)
    torch.save({"layers.0.weight": Bomb()}, folder / "model.safetensors")
    with pytest.raises(ArtefactError, match="nothing in it was executed"):
        read_head(folder)
    assert not marker.exists()


def test_weights_cut_short_anywhere(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(ArtefactError, match="it was damaged or replaced"):
            read_head(folder)


def test_every_flipped_bit_of_the_weights_is_seen(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ArtefactError):
            read_head(folder)


def test_weights_of_another_head_with_the_same_shape(folder, tmp_path):
    write_head(tmp_path / "other", head(seed=4))
    (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(
        ArtefactError, match=r"is not the file that config\.json was written with.*Copy the whole folder"
    ):
        read_head(folder)


@pytest.mark.parametrize("change", ["replaced", "extra", "nan"])
def test_tensors_that_are_not_a_head_s(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = {"extra": torch.zeros(1)} if change == "extra" else {"layers.0.bias": torch.full((4,), torch.nan)}
    save_file({} if change == "replaced" else tensors | changed, path)
    with pytest.raises(ArtefactError, match=r"is not the file that config\.json was written with"):
        read_head(folder)


@pytest.mark.parametrize(("extra", "listed"), [(None, "nothing"), ({"extra": torch.zeros(1)}, ".*layers")])
def test_tensors_with_their_hash_that_are_not_a_head_s(folder, extra, listed):
    path = folder / "model.safetensors"
    save_file({} if extra is None else load_file(path) | extra, path)
    edit(folder, weights_file=hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest())
    with pytest.raises(ArtefactError, match=f"; got {listed}"):
        read_head(folder)


def test_weights_with_their_hash_that_are_malformed(folder):
    (folder / "model.safetensors").write_bytes(b"not tensors")
    edit(folder, weights_file=hashlib.blake2b(b"not tensors", digest_size=16).hexdigest())
    with pytest.raises(
        ArtefactError,
        match=r"model\.safetensors cannot be read \(.+\)\. Copy model\.safetensors and config\.json again",
    ):
        read_head(folder)


def test_weights_of_another_dtype_than_the_config_s(folder):
    edit(folder, dtype="float16")
    with pytest.raises(ArtefactError, match=r"\(layers\S+ is torch\.float32, not float16\)\. Copy"):
        read_head(folder)


def test_weights_that_are_not_finite(folder):
    tensors = {key: value.fill_(float("nan")) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    digest = hashlib.blake2b((folder / "model.safetensors").read_bytes(), digest_size=16).hexdigest()
    edit(folder, weights_file=digest)
    with pytest.raises(ArtefactError, match=r"cannot be read \(NaN or infinite weights\)"):
        read_head(folder)


def test_a_card_in_any_bytes_can_be_read(folder):
    (folder / "README.md").write_bytes(b"# \xff mine")
    assert read_head(folder).card == "# � mine"


BACKBONE = Provenance(
    model="timm:a",
    weights="a" * 32,
    tensors="b" * 32,
    head={"layer": None, "output": "logits"},
    transform={"kind": "preprocess", "size": [224, 224], "resize": 256},
)
FULL = HeadConfig(
    features=8,
    width=4,
    depth=1,
    model="timm:a",
    provenance=BACKBONE,
    dtype="float16",
    trained={"rows": 5},
    licence="MIT",
)


def test_json_and_back():
    text = json.dumps(FULL.to_json())
    assert HeadConfig.from_json(json.loads(text), "x") == FULL
    assert json.loads(text)["format"] == FORMAT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"x is not a head's config.json of format 1; got format 2. Update dubito"),
        ({"features": "8"}, r"x has features='8'\. Copy it again"),
        ({"features": True}, r"x cannot be read \(head: features must be a whole number, at least 1; got True"),
        ({"depth": 1.0}, r"x has depth=1\.0"),
        ({"provenance": "me"}, r"x: provenance has no part 'me'"),
        ({"provenance": {"maker": 1}}, r"x: provenance has no part maker"),
        ({"trained": None}, r"x has trained=None"),
        ({"surprise": 1}, r"x has an entry 'surprise' that no head has"),
        ({"width": 0}, r"x cannot be read \(head: width must be a whole number, at least 1; got 0"),
        ({"dtype": "float8"}, r"(?s)x cannot be read \(.*float8"),
    ],
)
def test_odd_entries_are_named(change, message):
    with pytest.raises(ArtefactError, match=message):
        HeadConfig.from_json(FULL.to_json() | change, "x")


@pytest.mark.parametrize("key", [key for key in FULL.to_json() if key != "format"])
def test_every_entry_must_be_there(key):
    result = FULL.to_json()
    del result[key]
    with pytest.raises(ArtefactError, match=f"x has no entry '{key}'"):
        HeadConfig.from_json(result, "x")


@pytest.mark.parametrize("result", [None, [], "config", 3])
def test_json_that_is_no_config(result):
    with pytest.raises(ArtefactError, match=r"is not a head's config.json of format 1; got format \w+"):
        HeadConfig.from_json(result, "x")


def test_what_is_not_json_is_refused():
    for measured in ({"auroc": float("nan")}, {"auroc": {1, 2}}):
        with pytest.raises(ArtefactError, match="provenance, trained and measured must be JSON without NaN"):
            HeadConfig(features=8, measured=measured).to_json()
    with pytest.raises(ValueRangeError, match="features must be a whole number, at least 1; got 0"):
        HeadConfig(features=0)


def front(card: str) -> dict[str, object]:
    result: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return result


def test_the_front_matter_is_what_the_hub_reads():
    result = front(make_card(HeadConfig(features=192, model="timm:vit_tiny_patch16_224.x", licence="Apache-2.0")))
    assert result["library_name"] == "dubito"
    assert result["license"] == "apache-2.0"
    assert result["base_model"] == "timm/vit_tiny_patch16_224.x"
    assert "uncertainty" in result["tags"]


@pytest.mark.parametrize(
    ("model", "base"), [("hf:google/vit", "google/vit"), ("pypi:efficientnet_lite0", None), (None, None)]
)
def test_only_backbones_of_the_hub_are_linked(model, base):
    result = front(make_card(HeadConfig(features=8, model=model)))
    assert result.get("base_model") == base
    assert "license" not in result


def test_a_licence_cannot_write_yaml_of_its_own():
    licence = 'x"\ntags: [evil]\n# '
    assert front(make_card(HeadConfig(features=8, licence=licence)))["license"] == licence


def test_it_reports_what_was_recorded_and_how_to_use_it():
    provenance = Provenance(weights="w" * 32, tensors="t" * 32, head={"layer": None}, transform={"size": [224, 224]})
    config = HeadConfig(
        features=1280,
        width=64,
        depth=1,
        model="pypi:efficientnet_lite0",
        provenance=provenance,
        trained={"corpus": "4,000 photographs", "rows": 40000},
        measured={"ambiguous_auroc": 0.70123, "interval": [0.65, 0.75]},
    )
    card = make_card(config, name="org/mine")
    for text in (
        "1280 features",
        "1 hidden layer of width 64",
        "4,000 photographs",
        "rows: 40000",
        "ambiguous auroc: 0.7012",
        "interval: 0.65, 0.75",
        "w" * 32,
        'dubito.load("pypi:efficientnet_lite0")',
        'UncertaintyHead.from_pretrained("org/mine")',
        "licence:\nnot stated",
    ):
        assert text in card, text


def test_it_does_not_pretend():
    card = make_card(HeadConfig(features=8, depth=0))
    assert "Nothing was measured." in card
    assert "Nothing was recorded about its training." in card
    assert "Its exact weights were not recorded" in card
    assert "one linear layer" in card
    assert json.dumps("SOURCE:NAME") in card


def test_a_head_in_a_store_is_the_head(bucket):
    assert str(write_head(f"{bucket}/heads/mine", head())) == f"{bucket}/heads/mine"
    again = find_head(f"{bucket}/heads/mine")
    assert {key: value.tolist() for key, value in again.module.state_dict().items()} == {
        key: value.tolist() for key, value in head().module.state_dict().items()
    }
    assert again.config.model == "timm:a"
    with pytest.raises(ArtefactError, match=r"no head in 's3://bucket/heads/none': there is no such folder"):
        read_head(f"{bucket}/heads/none")
