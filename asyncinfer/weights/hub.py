"""A model of the hub: what the hub's client is asked for, and how long it is waited for.

The client tries again for minutes where a hub does not answer, and for ever where one accepts and
stays silent. So it is asked on a thread of its own, and given up when nothing has come for a while.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncinfer.errors import ModelLoadError
from asyncinfer.plugins.within import Call
from asyncinfer.telemetry import emit
from asyncinfer.weights.gguf import is_gguf

__all__ = ["HubModel", "Unreachable"]

T = TypeVar("T")

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
#: Seconds for the first answer, of a hub whose answer is needed, and of one that could only say
#: that the copy in the cache is still the newest. `HF_HUB_ETAG_TIMEOUT` may lengthen the first.
ANSWER_SECONDS: Final = 10.0
FRESHNESS_SECONDS: Final = 2.0
#: Seconds without a byte after which a download is given up; four of the client's own
#: `HF_HUB_DOWNLOAD_TIMEOUT` if that is more.
SILENT_SECONDS: Final = 60.0
#: Seconds of silence after which the log says so, and again each time they have passed.
TELL_SECONDS: Final = 3.0


class Unreachable(Exception):
    """The hub did not say whether it has the model."""


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
        self._cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
        self._given_endpoint = endpoint
        self._endpoint = endpoint or constants.ENDPOINT
        self._show_progress = show_progress
        self._updates = 0

    @property
    def is_commit(self) -> bool:
        """Whether the revision can never name another content."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def cached(self, file: str = "config.json") -> Path | None:
        """The folder of the revision as the cache knows it, whole or not, if it has `file`."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self.model, file, cache_dir=self._cache, revision=self.revision
        )
        return Path(found).parent if isinstance(found, str) else None

    def listing(self, *, needed: bool) -> tuple[str, frozenset[str]]:
        """The commit of the revision, and its files. `Unreachable` where the hub does not tell:
        it is waited for as long as an answer is worth that is `needed`, or is not."""
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import RevisionNotFoundError

        seconds = FRESHNESS_SECONDS
        if needed:
            seconds = max(ANSWER_SECONDS, float(constants.HF_HUB_ETAG_TIMEOUT))
        api = HfApi(endpoint=self._given_endpoint)
        # The client gives up a little later than it is given up, and so ends its thread.
        later = seconds + 5.0
        ask = Call(lambda: api.model_info(self.model, revision=self.revision, timeout=later))
        self._wait(ask, seconds)
        try:
            info = ask.outcome()
        except RevisionNotFoundError as error:
            raise self.refused(self._why(error)) from error
        except Exception as error:
            raise Unreachable(self._why(error)) from error
        return str(info.sha), frozenset(file.rfilename for file in info.siblings or ())

    def download(self, revision: str | None, files: Collection[str]) -> Path:
        """The folder with those of `files` that there are."""
        from huggingface_hub import constants, snapshot_download

        # Names with the wildcards of fnmatch would match other files.
        patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
        seconds = max(SILENT_SECONDS, 4.0 * constants.HF_HUB_DOWNLOAD_TIMEOUT)
        fetch = Call(
            lambda: snapshot_download(
                self.model,
                revision=revision,
                allow_patterns=patterns,
                cache_dir=self._cache,
                endpoint=self._given_endpoint,
                tqdm_class=self._bar(),
            )
        )
        try:
            self._wait(fetch, seconds, self._progress)
            return Path(fetch.outcome())
        except Unreachable as error:
            raise self.refused(str(error)) from error
        except Exception as error:
            raise self.refused(self._why(error)) from error

    def done_without(self, error: Unreachable) -> None:
        """Tell the log that the cache's copy is taken."""
        emit("hub_unreachable", model=self.model, error=str(error))

    def refused(self, why: str) -> ModelLoadError:
        """The error to raise about the model."""
        where = f"the hub ({self._endpoint})"
        if self.offline:
            where = f"the hub's cache ({self._cache}), and offline nothing else is asked"
        at = f" at revision {self.revision}" if self.revision else ""
        what = "file" if is_gguf(Path(self.model)) else "folder"
        return ModelLoadError(
            f"model {self.model!r}: there is no such {what} in {os.getcwd()}, and it cannot be had "
            f"from {where}{at}: {why}. Give the path of a checkpoint's folder, or the id of a "
            "model on the hub, such as 'org/name'"
        )

    def _wait(
        self, call: Call[Any], seconds: float, progress: Callable[[], object] = lambda: None
    ) -> None:
        """Until the call ends. `Unreachable` once `progress` has been the same for `seconds`."""
        seen, since = progress(), time.monotonic()
        told = TELL_SECONDS
        while not call.wait(min(0.25, seconds / 4)):
            now = progress()
            if now != seen:
                seen, since, told = now, time.monotonic(), TELL_SECONDS
            silent = time.monotonic() - since
            if silent >= seconds:
                raise Unreachable(f"it has not answered for {seconds:g} s")
            if silent >= told:
                emit("hub_silent", model=self.model, hub=self._endpoint, seconds=round(silent, 1))
                told += TELL_SECONDS

    def _progress(self) -> tuple[int, int]:
        """What changes as long as something comes."""
        folder = self._cache / f"models--{self.model.replace('/', '--')}" / "blobs"
        size = 0
        try:
            with os.scandir(folder) as entries:
                size = sum(1 + entry.stat().st_size for entry in entries)
        except OSError:
            # Not there yet, or a file was renamed meanwhile.
            pass
        return self._updates, size

    def _why(self, error: Exception) -> str:
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        text = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        if isinstance(error, LocalEntryNotFoundError):
            text = f"it cannot be reached ({text})"
        elif isinstance(error, GatedRepoError):
            text = "it gives it to those only who were granted access (HF_TOKEN)"
        elif isinstance(error, RevisionNotFoundError):
            text = "it has no such revision"
        elif isinstance(error, RepositoryNotFoundError):
            text = "it has no such model, or a private one that needs a token (HF_TOKEN)"
        return text

    def _bar(self) -> type[Any]:
        """The client's progress bar, counting its updates; silent unless bars are to be shown, for
        it would write to the host's stderr."""
        import huggingface_hub.utils as hub

        base: Any = hub.tqdm  # type: ignore[attr-defined]
        options = {} if self._show_progress else {"disable": True}
        moved = self._moved

        def start(bar: Any, *args: Any, **given: Any) -> None:
            base.__init__(bar, *args, **{**given, **options})

        def update(bar: Any, n: float | None = 1) -> Any:
            moved()
            return base.update(bar, n)

        return type("Bar", (base,), {"__init__": start, "update": update})

    def _moved(self) -> None:
        self._updates += 1
