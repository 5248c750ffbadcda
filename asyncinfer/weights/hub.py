"""`HubModel`: a model of the hub, fetched by the hub's client within bounds of time.

The client retries for minutes if a hub does not answer, and waits for ever if a hub accepts and
stays silent. So it is called on another thread, and given up if nothing has come for a while, or if
nobody wants the model any more. Its thread then ends with the next part of a file, and so its locks
are free for whoever wants the same file.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncinfer.errors import ModelLoadError
from asyncinfer.plugins.timed_call import ThreadCall
from asyncinfer.runtime import check_cancelled
from asyncinfer.suggestions import suggestion
from asyncinfer.telemetry import emit
from asyncinfer.weights.gguf import is_gguf
from asyncinfer.weights.named import NAMED_MODELS
from asyncinfer.weights.transfer import Transfer

__all__ = ["HubModel", "NotKept", "Unreachable", "is_hub_id"]

T = TypeVar("T")

_HUB_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_UNAUTHORIZED: Final = 401
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
#: How Xet's storage tells the number of a system's error, and those of files.
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_NOT_WRITTEN: Final = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)
#: Seconds to wait for the first answer if it is needed, and if it could only say that the copy in
#: the cache is still the newest. `HF_HUB_ETAG_TIMEOUT` may lengthen the first.
ANSWER_SECONDS: Final = 10.0
FRESHNESS_SECONDS: Final = 2.0
#: Seconds without a byte after which a download is given up; four of the client's own
#: `HF_HUB_DOWNLOAD_TIMEOUT` if that is more.
SILENT_SECONDS: Final = 60.0
#: Seconds of silence after which an event is logged, and again after as many.
TELL_SECONDS: Final = 3.0
#: Seconds between two looks at a call of the client.
LOOK_SECONDS: Final = 0.25
#: Seconds after which a file that nobody writes to any more is taken for a left one.
LEFT_SECONDS: Final = 3600.0


class Unreachable(Exception):
    """The hub did not say whether it has the model."""


class NotKept(ModelLoadError):
    """The cache cannot keep the hub's files: its disk is full, or may only be read."""


def is_hub_id(text: str) -> bool:
    """Whether the hub's client takes this for the id of a model."""
    if not _HUB_ID.fullmatch(text):
        return False
    # Imported here, since it takes a while.
    from huggingface_hub import hf_hub_url

    try:
        # `hf_hub_url` checks the id as every call of the client does, and asks no server.
        hf_hub_url(text, "config.json")
    except ValueError:
        return False
    return True


class HubModel:
    """One model, at a branch, tag or commit. `ModelLoadError` says what was tried."""

    def __init__(
        self,
        model: str,
        revision: str | None,
        *,
        offline: bool,
        cache_dir: str | Path | None,
        endpoint: str | None,
        show_progress: bool,
    ) -> None:
        from huggingface_hub import constants

        self.model = model
        self.revision = revision
        self.offline = offline or bool(constants.HF_HUB_OFFLINE)
        self._cache = Path(os.path.expanduser(cache_dir or constants.HF_HUB_CACHE))
        self._given_endpoint = endpoint
        self._endpoint = endpoint or constants.ENDPOINT
        self._show_progress = show_progress

    @property
    def _repository(self) -> Path:
        """The folder of the model in the cache."""
        return self._cache / f"models--{self.model.replace('/', '--')}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, whose content never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def cached(self, file: str = "config.json") -> Path | None:
        """The revision's folder in the cache, if it has `file`; other files may be missing."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self.model, file, cache_dir=self._cache, revision=self.revision
        )
        return Path(found).parent if isinstance(found, str) else None

    def snapshot(self) -> Path | None:
        """The revision's folder in the cache, whatever it has; None if there is none."""
        repository = self._repository
        commit = self.revision or "main"
        try:
            branch = repository / "refs" / commit
            if branch.is_file():
                commit = branch.read_text(encoding="utf-8")
            folder = repository / "snapshots" / commit
            return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None
        except (OSError, ValueError):
            return None

    def listing(self, *, needed: bool) -> tuple[str, frozenset[str]]:
        """The revision's commit, and its files. `Unreachable` if the hub does not answer in time,
        which is longer if the answer is `needed`."""
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import RevisionNotFoundError

        seconds = FRESHNESS_SECONDS
        if needed:
            seconds = max(ANSWER_SECONDS, float(constants.HF_HUB_ETAG_TIMEOUT))
        api = HfApi(endpoint=self._given_endpoint)
        # A little longer than the wait below, so that the client then ends its thread by itself.
        later = seconds + 5.0
        ask = ThreadCall(lambda: api.model_info(self.model, revision=self.revision, timeout=later))
        self._wait(ask, seconds)
        try:
            info = ask.outcome()
        except RevisionNotFoundError as error:
            raise self.refused(self._why(error)) from error
        except Exception as error:
            raise Unreachable(self._why(error)) from error
        return str(info.sha), frozenset(file.rfilename for file in info.siblings or ())

    def download(self, revision: str | None, files: Collection[str]) -> Path:
        """Fetch those of `files` that the hub has; returns their folder. Raises `ModelLoadError`,
        and what `check_cancelled` does. From the beginning on the cache takes a branch for its
        commit, and finds what it has of an older one no more."""
        from huggingface_hub import constants, snapshot_download

        # Wildcards of fnmatch in a name would match other files.
        patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
        seconds = max(SILENT_SECONDS, 4.0 * constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self._remove_left()
        transfer = Transfer()
        fetch = partial(
            snapshot_download,
            self.model,
            revision=revision,
            allow_patterns=patterns,
            cache_dir=self._cache,
            endpoint=self._given_endpoint,
            tqdm_class=transfer.bar(shown=self._show_progress),
        )
        call = ThreadCall(transfer.run, fetch)
        try:
            self._wait(call, seconds, lambda: (transfer.updates, self._stored()))
        except Unreachable as error:
            raise self.refused(str(error)) from error
        finally:
            transfer.give_up()
        try:
            return Path(call.outcome())
        except Exception as error:
            if _is_of_this_machine(error):
                raise NotKept(
                    f"cannot be kept in the hub's cache ({self._cache}): {error}", file=self.model
                ) from error
            raise self.refused(self._why(error)) from error

    def _remove_left(self) -> None:
        """Remove the unfinished files of processes that were killed, which nobody goes on with."""
        # The hub's client exports it, without saying so.
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        locks = self._cache / ".locks" / self._repository.name
        with suppress(OSError):
            for path in (self._repository / "blobs").glob("*.incomplete"):
                # Some file systems give a lock to everybody.
                if path.stat().st_mtime < time.time() - LEFT_SECONDS:
                    lock = locks / f"{path.name.partition('.')[0]}.lock"
                    with suppress(TimeoutError), WeakFileLock(lock, timeout=0.01):
                        path.unlink(missing_ok=True)

    def instead(self, copy: Path | None, error: NotKept | Unreachable) -> Path:
        """The copy in the cache, where the hub's cannot be had; this is logged. Without one it
        raises `ModelLoadError`."""
        if copy is not None:
            emit("hub_unreachable", model=self.model, error=str(error))
            return copy
        if isinstance(error, NotKept):
            raise error
        raise self.refused(str(error)) from error

    def refused(self, why: str) -> ModelLoadError:
        """The error to raise about the model."""
        where = f"the hub ({self._endpoint})"
        if self.offline:
            where = f"the hub's cache ({self._cache}), and offline nothing else is asked"
        at = f" at revision {self.revision}" if self.revision else ""
        what = "file" if is_gguf(self.model) else "folder"
        near = "" if "/" in self.model else suggestion(self.model, NAMED_MODELS)
        if self.model in NAMED_MODELS:
            near = f"; the name {self.model} goes without a revision"
        return ModelLoadError(
            f"model {self.model!r}: there is no such {what} in {os.getcwd()}, and it cannot be had "
            f"from {where}{at}: {why}. Give the path of a checkpoint's folder, the id of a "
            "model on the hub, such as 'org/name', or a name that `asyncinfer models` "
            f"lists{near}"
        )

    def _wait(
        self, call: ThreadCall[Any], seconds: float, progress: Callable[[], object] = lambda: None
    ) -> None:
        """Wait for the call. `Unreachable` once `progress` has not changed for `seconds`; what
        `check_cancelled` raises where nobody wants it any more."""
        seen, since = progress(), time.monotonic()
        told = TELL_SECONDS
        while not call.wait(min(LOOK_SECONDS, seconds / 4)):
            check_cancelled()
            now = progress()
            if now != seen:
                seen, since, told = now, time.monotonic(), TELL_SECONDS
            silent = time.monotonic() - since
            if silent >= seconds:
                raise Unreachable(f"it has not answered for {seconds:g} s")
            if silent >= told:
                emit("hub_silent", model=self.model, hub=self._endpoint, seconds=round(silent, 1))
                told += TELL_SECONDS

    def _stored(self) -> int:
        """A number that changes while data arrives."""
        folder = self._repository / "blobs"
        size = 0
        try:
            with os.scandir(folder) as entries:
                size = sum(1 + entry.stat().st_size for entry in entries)
        except OSError:
            # The folder does not exist yet, or a file was renamed during the scan.
            pass
        return size

    def _why(self, error: Exception) -> str:
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        if isinstance(error, LocalEntryNotFoundError) and isinstance(
            error.__cause__, HfHubHTTPError
        ):
            # The hub did answer, and the client says that it did not.
            return self._why(error.__cause__)
        text = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        if isinstance(error, LocalEntryNotFoundError):
            text = f"it cannot be reached ({text})"
        elif isinstance(error, GatedRepoError):
            text = "it gives it to those only who were granted access (HF_TOKEN)"
        elif isinstance(error, RevisionNotFoundError):
            text = "it has no such revision"
        elif isinstance(error, RepositoryNotFoundError):
            text = "it has no such model, or a private one that needs a token (HF_TOKEN)"
        elif getattr(getattr(error, "response", None), "status_code", None) == _UNAUTHORIZED:
            text = "it refuses the token that it was given (HF_TOKEN, or that of `hf auth login`)"
        return text


def _is_of_this_machine(error: Exception) -> bool:
    """Whether the system refused to write a file. The client's own errors have no number, and
    those of Xet's storage have it in their text."""
    told = _OS_ERROR.search(str(error))
    if told is not None and not isinstance(error, OSError):
        return int(told[1]) in _NOT_WRITTEN
    other = isinstance(error, ConnectionError | TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not other
