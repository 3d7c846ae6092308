import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, make_card, read_config, read_head, write_head
from dubito.heads.module import HeadModule


def head(*, depth: int = 2, dtype: str = "float32", card: str = "", seed: int = 3) -> PretrainedHead:
    module = HeadModule(5, width=4, depth=depth, seed=seed)
    return PretrainedHead(module, HeadConfig(features=5, width=4, depth=depth, model="timm:a", dtype=dtype), card)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_head(tmp_path / "mine", head())


def edit(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_three_files_and_nothing_else(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (folder / "README.md").read_text() == make_card(head().config)


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


def test_what_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArtefactError, match=r"taken' cannot be written \(.*\)\. Give another place"):
        write_head(tmp_path / "taken", head())
    wrong = head()._replace(config=HeadConfig(features=6, width=4))
    with pytest.raises(ArtefactError, match="the config says 6 features, width 4, depth 2; the module has 5, 4, 2"):
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
        ArtefactError, match=r"no head in '.*gone': there is no such folder\. Give a folder that save_pre"
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
    with pytest.raises(ArtefactError, match=r"config\.json is not JSON .*save the head again"):
        read_head(folder)


def test_a_config_of_another_format(folder):
    edit(folder, format=99)
    with pytest.raises(ArtefactError, match=r"is not a head's config\.json of format 1; got format 99\. Update dubito"):
        read_head(folder)


@pytest.mark.parametrize(
    "change", [{"features": 6}, {"width": 5}, {"depth": 1}, {"depth": 10**9}, {"features": 10**12}]
)
def test_a_config_that_tells_of_another_head(folder, change):
    edit(folder, **change)
    with pytest.raises(ArtefactError, match=r"does not hold that: .*layers\.0\.weight \(4, 5\).*Copy both files"):
        read_head(folder)


def test_a_pickle_under_the_name_is_not_run(folder, tmp_path):
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return Path.write_text, (marker, "boom")

    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ArtefactError, match=r"is not a whole safetensors file .*nothing in it was executed"):
        read_head(folder)
    torch.save({"layers.0.weight": Bomb()}, folder / "model.safetensors")
    with pytest.raises(ArtefactError, match="is not a whole safetensors file"):
        read_head(folder)
    assert not marker.exists()


def test_weights_cut_short_anywhere(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(ArtefactError, match="is not a whole safetensors file"):
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


def test_tensors_that_are_not_a_head_s(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"layers.0.bias": torch.full((4,), float("nan"))}, path)
    with pytest.raises(ArtefactError, match=r"layers\.0\.bias must be finite .* with NaN or infinity came"):
        read_head(folder)
    save_file(tensors | {"layers.0.bias": torch.zeros(4, dtype=torch.int64)}, path)
    with pytest.raises(
        ArtefactError, match=r"layers\.0\.bias must be finite numbers of type float32; got torch\.int64"
    ):
        read_head(folder)
    save_file(tensors | {"extra": torch.zeros(1)}, path)
    with pytest.raises(ArtefactError, match="does not hold that"):
        read_head(folder)
    save_file({}, path)
    with pytest.raises(ArtefactError, match="does not hold that: nothing"):
        read_head(folder)


def test_a_card_in_any_bytes_can_be_read(folder):
    (folder / "README.md").write_bytes(b"# \xff mine")
    assert read_head(folder).card == "# � mine"
