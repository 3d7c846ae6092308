import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from dubito.errors import ArtefactError
from dubito.heads import hub
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, make_card, read_head, write_head
from dubito.heads.module import HeadModule

SHA = "0123456789abcdef0123456789abcdef01234567"
HEAD = PretrainedHead(HeadModule(5, width=4, depth=1, seed=3), HeadConfig(features=5, width=4, depth=1, model="timm:a"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a test asked the network")

    monkeypatch.setattr(hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", refuse)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The hub's cache with org/mine in it, in the layout that the hub's client writes: names that point to blobs."""
    place = tmp_path / "hub" / "models--org--mine"
    write_head(tmp_path / "head", HEAD)
    for path in sorted((tmp_path / "head").iterdir()):
        (place / "blobs").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / "blobs" / f"etag-of-{path.name}")
        (place / "snapshots" / SHA).mkdir(parents=True, exist_ok=True)
        (place / "snapshots" / SHA / path.name).symlink_to(place / "blobs" / f"etag-of-{path.name}")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(SHA)
    return tmp_path / "hub"


def answer(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=None)


def hub_says(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def say(*arguments: object, **options: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(hub, "get_hf_file_metadata", say)


def same(result: PretrainedHead) -> bool:
    z = torch.randn(3, 5)
    return torch.equal(result.module(z), HEAD.module(z)) and result.config == HEAD.config


def test_what_the_hub_s_cache_keeps(kept):
    assert same(hub.from_pretrained("org/mine", cache_dir=kept, local_files_only=True))
    assert same(hub.from_pretrained("org/mine", cache_dir=kept, local_files_only=True, revision=SHA))


@pytest.mark.parametrize(
    "error",
    [
        errors.OfflineModeIsEnabled("Offline mode is enabled."),
        ConnectionError("Name or service not known"),
        TimeoutError(),
        errors.HfHubHTTPError("503 Service Unavailable", response=answer(503)),
    ],
)
def test_without_network_the_kept_one_is_used_and_otherwise_it_is_reported(monkeypatch, kept, error):
    hub_says(monkeypatch, error)
    assert same(hub.from_pretrained("org/mine", cache_dir=kept, force_download=True))
    with pytest.raises(ArtefactError) as caught:
        hub.from_pretrained("org/other", cache_dir=kept)
    assert str(caught.value) == (
        f"head: 'org/other' is not in the hub's cache on this machine, and the hub cannot be reached "
        f"({str(error).rstrip('.') or 'TimeoutError'}). Try again with a network, or pass a folder that "
        f"save_pretrained wrote."
    )


def test_not_asking_is_reported_too(kept):
    with pytest.raises(ArtefactError, match=r"'org/other' is not in the hub's cache .*, and local_files_only is set"):
        hub.from_pretrained("org/other", cache_dir=kept, local_files_only=True)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError, r"there is no 'org/none', or it is private\. Check the name"),
        (errors.GatedRepoError, r"it is gated\. Request access on its page"),
        (errors.RevisionNotFoundError, r"it has no such revision\. Leave out `revision`"),
        (errors.RemoteEntryNotFoundError, r"it is not a head: config\.json or model\.safetensors is missing"),
        (errors.HfHubHTTPError, r"cannot be loaded from the hub \(said so\)\. Log in with `hf auth login`"),
    ],
)
def test_a_name_that_the_hub_does_not_have(monkeypatch, kept, error, message):
    hub_says(monkeypatch, error("said so", response=answer(404)))
    with pytest.raises(ArtefactError, match=message) as caught:
        hub.from_pretrained("org/none", cache_dir=kept)
    assert str(caught.value).startswith("head: 'org/none' cannot be loaded from the hub")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b/c", "-x/y", "a b/c", ""])
def test_a_name_that_cannot_be(name, kept):
    with pytest.raises(ArtefactError, match=r"a name on the hub is 'org/name'"):
        hub.from_pretrained(name, cache_dir=kept)


def test_three_files_of_one_commit_are_fetched(monkeypatch, kept):
    args: list[tuple[str, str, str | None]] = []
    folder = kept / "models--org--mine" / "snapshots" / SHA

    def fetch(repo_id: str, filename: str, *, revision: str | None = None, **options: object) -> str:
        args.append((repo_id, filename, revision))
        return str(folder / filename)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", fetch)
    hub_says(monkeypatch, None)
    assert same(hub.from_pretrained("org/mine", revision="v1"))
    assert sorted(set(args)) == [
        ("org/mine", "README.md", SHA),
        ("org/mine", "config.json", "v1"),
        ("org/mine", "model.safetensors", SHA),
    ]


def test_a_repository_without_a_card(kept):
    (kept / "models--org--mine" / "snapshots" / SHA / "README.md").unlink()
    assert hub.from_pretrained("org/mine", cache_dir=kept, local_files_only=True).card == make_card(HEAD.config)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "null", '{"head": {"module": 1}}', '{"architectures": ["ViT"]}'])
def test_a_repository_of_something_else(kept, text):
    path = kept / "models--org--mine" / "snapshots" / SHA / "config.json"
    path.unlink()
    path.write_text(text)
    with pytest.raises(ArtefactError, match=r"config\.json"):
        hub.from_pretrained("org/mine", cache_dir=kept, local_files_only=True)


class FakeApi:
    """What the mixin asks of HfApi; remembers what it was given."""

    calls: dict[str, dict[str, object]]
    to: Path

    def __init__(self, token: str | None = None) -> None:
        FakeApi.calls = {"init": {"token": token}}

    def create_repo(self, **options: object) -> SimpleNamespace:
        self.calls["create"] = options
        return SimpleNamespace(repo_id=options["repo_id"])

    def upload_folder(self, *, folder_path: Path, **options: object) -> str:
        self.calls["upload"] = options
        shutil.copytree(folder_path, self.to)
        return "the commit"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeApi]:
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", FakeApi)
    FakeApi.to = tmp_path / "uploaded"
    return FakeApi


def test_push_uploads_what_can_be_read_back(api):
    assert hub.push_to_hub(HEAD, "org/mine", private=True, branch="new", token="mine") == "the commit"  # noqa: S106
    assert api.calls["init"] == {"token": "mine"}
    assert api.calls["create"] == {"repo_id": "org/mine", "private": True, "exist_ok": True}
    assert api.calls["upload"]["repo_id"] == "org/mine"
    assert api.calls["upload"]["revision"] == "new"
    assert sorted(path.name for path in api.to.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    result = read_head(api.to)
    assert same(result)
    assert result.card == make_card(HEAD.config, name="org/mine")
    assert 'from_pretrained("org/mine")' in result.card
    assert json.loads((api.to / "config.json").read_text())["features"] == 5


def test_push_keeps_a_card_that_was_written(api):
    hub.push_to_hub(HEAD._replace(card="# written by hand"), "org/mine")
    assert (api.to / "README.md").read_text() == "# written by hand"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.HfHubHTTPError("403 Forbidden", response=answer(403)),
            r"\(403 Forbidden\)\. Log in with `hf auth login`",
        ),
        (errors.LocalTokenNotFoundError("no token"), r"\(no token\)\. Log in with"),
        (ConnectionError("down"), r"\(down\)\. Check the network and try again"),
    ],
)
def test_a_push_that_fails(monkeypatch, api, error, message):
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(FakeApi, "create_repo", fail)
    with pytest.raises(ArtefactError, match=message) as caught:
        hub.push_to_hub(HEAD, "org/mine")
    assert str(caught.value).startswith("head: 'org/mine' could not be pushed (")


def test_it_is_the_hub_s_own_mixin():
    assert issubclass(hub.HubHead, huggingface_hub.ModelHubMixin)
