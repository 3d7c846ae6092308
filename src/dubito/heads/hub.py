"""Heads on the Hugging Face hub, through huggingface_hub's own mixin: push_to_hub and from_pretrained.

Only the three files of `dubito.heads.checkpoint` are ever fetched, all from one commit. The hub is tried once
first: the client's own retries would keep a user without network waiting for half a minute.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from huggingface_hub import ModelHubMixin, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

from dubito.errors import ArtefactError, DubitoError, first_words
from dubito.heads.checkpoint import CARD, CONFIG, WEIGHTS, PretrainedHead, make_card, read_head, write_head

_PATIENCE = 10.0
"""Seconds to wait for the hub's first answer."""
_LOG_IN = " ({error}). Log in with `hf auth login`, and check your permissions, or try again later."
_REASONS: Mapping[Any, str] = MappingProxyType(
    {
        errors.GatedRepoError: ": it is gated. Request access on its page, then `hf auth login`.",
        errors.RevisionNotFoundError: ": it has no such revision. Leave out `revision`, or name another.",
        errors.RepositoryNotFoundError: ": there is no '{name}', or it is private. Check the name (`dubito list heads` "
        "shows those on this machine), or log in with `hf auth login`.",
        errors.EntryNotFoundError: f": it is not a head: {CONFIG} or {WEIGHTS} is missing. Choose another.",
        errors.HFValidationError: ": a name on the hub is 'org/name'; got '{name}'. Check the spelling.",
        errors.HfHubHTTPError: _LOG_IN,
        errors.LocalTokenNotFoundError: _LOG_IN,
        (AttributeError, KeyError, TypeError, ValueError): f": its {CONFIG} is not a head's ({{error}}). Choose "
        "another.",
        Exception: " ({error}). Check the network and try again.",
    }
)
"""By error of the hub's client, what to tell the user; the first that fits counts."""


@final
class HubHead(ModelHubMixin, library_name="dubito", tags=["uncertainty"]):
    """A head as the mixin requires it: an object that saves itself into a folder and is read from a repository."""

    def __init__(self, head: PretrainedHead) -> None:
        self.head = head

    def _save_pretrained(self, save_directory: Path) -> None:
        write_head(save_directory, self.head)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, revision: str | None, **options: Any) -> "HubHead":
        # The mixin also passes on what it has read from the config, which may hold anything.
        options = {key: options[key] for key in ("cache_dir", "force_download", "local_files_only", "token")}
        folder = Path(hf_hub_download(model_id, CONFIG, revision=revision, **options)).parent
        # A snapshot's folder is named by its commit: the other files come from the same one.
        hf_hub_download(model_id, WEIGHTS, revision=folder.name, **options)
        with suppress(errors.EntryNotFoundError):
            hf_hub_download(model_id, CARD, revision=folder.name, **options)
        return cls(read_head(folder))


def from_pretrained(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> PretrainedHead:
    """A head from the hub by its id; `find_head` also knows folders and names.

    Args:
        name: "org/name".
        revision: Branch, tag or commit on the hub.
        cache_dir: Folder of downloaded files; by default the hub's own cache.
        token: Token for a private repository; by default that of `hf auth login`.
        force_download: Whether to fetch again what is in the cache already.
        local_files_only: Whether to use the cache alone, without the network.
    """
    with _hub_errors(f"head: '{name}' cannot be loaded from the hub", name):
        reason = None if local_files_only else _unreachable(name, revision, token)
        try:
            hub_head = HubHead.from_pretrained(
                name,
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                force_download=force_download and not reason,
                local_files_only=local_files_only or reason is not None,
            )
        except errors.LocalEntryNotFoundError as error:
            raise ArtefactError(
                f"head: '{name}' is not in the hub's cache on this machine, and "
                + (f"the hub cannot be reached ({reason})" if reason else "local_files_only is set")
                + ". Try again with a network, or pass a folder that save_pretrained wrote."
            ) from error
    return hub_head.head


def push_to_hub(
    head: PretrainedHead,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
    commit_message: str = "Uncertainty head by dubito",
) -> str:
    """Upload a head with its config and card, creating the repository if needed. Returns the commit's address.

    Args:
        head: The head to upload; if it has no card, one is made from the config.
        repo_id: "org/name".
        private: Whether a new repository is private.
        token: Token with write permission; by default that of `hf auth login`.
        branch: Branch to commit to; by default main.
        create_pr: Whether to open a pull request instead of committing.
        commit_message: Message of the commit.
    """
    carded = head if head.card else head._replace(card=make_card(head.config, name=repo_id))
    with _hub_errors(f"head: '{repo_id}' could not be pushed", repo_id):
        commit = HubHead(carded).push_to_hub(
            repo_id, private=private, token=token, branch=branch, create_pr=create_pr, commit_message=commit_message
        )
    return str(commit)


def _unreachable(name: str, revision: str | None, token: str | bool | None) -> str | None:
    """Why the hub does not answer, or None if it does; an unknown name is an answer, and raises."""
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), token=token, timeout=_PATIENCE)
    except Exception as error:  # whatever the network, a proxy, a certificate or offline mode raise
        answered = isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500
        if answered or isinstance(error, errors.HFValidationError):
            raise
        return first_words(error)
    return None


@contextmanager
def _hub_errors(what: str, name: str) -> Iterator[None]:
    """Turn the errors of the hub's client into an ArtefactError that says what to do."""
    try:
        yield
    except DubitoError:
        raise
    except Exception as error:  # the client's own errors have no common root
        reason = next(text for kinds, text in _REASONS.items() if isinstance(error, kinds))
        raise ArtefactError(what + reason.format(name=name, error=first_words(error))) from error
