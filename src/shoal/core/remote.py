"""A folder in an object store, or on any other file system that fsspec knows: s3://, gs://, az://, file://."""

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import UserError

T = TypeVar("T")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Which of Shoal's extras an object store needs, by how its addresses begin."""
_PROBE = ".writable"
_MOST_WORDS = 120
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 8.0


@dataclass(frozen=True)
class Access:
    """How a store is reached. Credentials and endpoints are found where its own tools look for them."""

    field: str
    """The field of the recipe that names the store, for messages."""
    timeout_s: float = 60.0
    """How long a request may stay without an answer."""
    encryption: str | None = None
    """Encryption at rest that S3 is asked for."""
    kms_key: str | None = None
    tries: int = 4
    """How often a request is made before it fails."""


class RemoteError(Exception):
    """The store did not do what it was asked for, although it was asked several times."""


class Remote:
    """Files under one address. Every call is tried again a few times, later and later, before it fails."""

    def __init__(self, url: str, access: Access, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = url.rstrip("/")
        self.sleep = sleep
        self._tries = access.tries
        self._fs, self._root = _open(self.url, access)

    def put(self, source: Path, name: str) -> None:
        """Copy a file to the store; it is there, whole, when this returns."""

        def copy() -> None:
            self._make_parent(name)
            # A store has a file whole or not at all. A folder may have half of one, of a process that was killed.
            is_folder = "file" in self._fs.protocol
            beside = f"{self._at(name)}.part" if is_folder else self._at(name)
            self._fs.put_file(str(source), beside)
            if is_folder:
                Path(beside).replace(self._at(name))
            if (there := self._fs.info(self._at(name), refresh=True)["size"]) != source.stat().st_size:
                raise OSError(errno.EIO, f"{name} has {there} bytes there instead of {source.stat().st_size}")

        self._trying(f"{name} could not be uploaded to {self.url}", copy)

    def check_writable(self) -> None:
        """That files can be written there, and deleted again."""

        def write() -> None:
            self._make_parent(_PROBE)
            self._fs.pipe_file(self._at(_PROBE), b"Shoal was here")
            self._fs.rm_file(self._at(_PROBE))

        self._trying(f"nothing can be written to {self.url}", write)

    def get(self, name: str, target: Path) -> None:
        """Copy a file from the store."""
        self._trying(
            f"{name} could not be read from {self.url}", lambda: self._fs.get_file(self._at(name), str(target))
        )

    def read(self, name: str) -> bytes | None:
        """The content of a small file, or None if there is none."""

        def read() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

        return self._trying(f"{name} could not be read from {self.url}", read)

    def names(self, folder: str) -> list[str]:
        """What is in a folder; nothing, if there is no such folder."""

        def names() -> list[str]:
            try:
                found = self._fs.ls(self._at(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

        return self._trying(f"{self._address(folder)} could not be listed", names)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Names in a folder and the bytes of each, None for folders; nothing, if there is no such folder."""

        def sizes() -> dict[str, int | None]:
            try:
                found = self._fs.ls(self._at(folder), detail=True, refresh=True)
            except FileNotFoundError:
                return {}
            names = {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in found}
            return {name: int(entry["size"]) if entry["type"] == "file" else None for name, entry in names.items()}

        return self._trying(f"{self._address(folder)} could not be listed", sizes)

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing happens if there is none."""

        def delete() -> None:
            self._fs.invalidate_cache()
            try:
                self._fs.rm(self._at(name), recursive=True)
            except FileNotFoundError:
                return

        self._trying(f"{self._address(name)} could not be deleted", delete)

    def abort_unfinished(self) -> None:
        """Have S3 forget the parts of large files whose uploads never ended: nobody sees them, and they cost money."""
        if not hasattr(self._fs, "call_s3"):
            return
        bucket, _, prefix = self._root.partition("/")

        def abort() -> None:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for upload in found.get("Uploads", []):
                which = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._fs.call_s3("abort_multipart_upload", **which)

        self._trying(f"unfinished uploads could not be ended in {self.url}", abort)

    def _address(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        """Object stores have no folders to be made, and would rather make a bucket that was but misspelt."""
        if self.url.startswith("file://"):
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _trying(self, what: str, action: Callable[[], T]) -> T:
        for attempt in range(self._tries):
            try:
                return action()
            except UserError:
                raise
            except Exception as error:
                if attempt == self._tries - 1:
                    raise RemoteError(f"{what}: {_in_words(error)}") from error
            delay_s = min(_FIRST_DELAY_S * 2**attempt, _LONGEST_DELAY_S)
            self.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - so that workers do not all come at once
        raise AssertionError("not reached")


def _in_words(error: Exception) -> str:
    """The first line, with the kind of error where that says more than nothing."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    first = first if len(first) <= _MOST_WORDS else f"{first[:_MOST_WORDS]}..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _open(url: str, access: Access) -> tuple[Any, str]:
    import fsspec

    scheme = url.partition("://")[0]
    if scheme not in (*EXTRAS, "file"):
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "file"))
        raise UserError(f"{access.field}: {scheme}:// is not a kind of storage; use {known}")
    try:
        fs, root = fsspec.core.url_to_fs(url, **_options(scheme, access))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"install it with pip install 'shoal[{extra}]'"
        raise UserError(f"{access.field}: {scheme}:// needs a package that is not there; {remedy}") from error
    except Exception as error:
        raise UserError(f"{access.field}: {url} cannot be used: {_in_words(error)}") from error
    if hasattr(fs, "retries"):
        fs.retries = 1  # whatever goes wrong is tried again here, for every store alike
    return fs, str(root).rstrip("/")


def _options(scheme: str, access: Access) -> dict[str, Any]:
    """Credentials and endpoints are found where the store's own tools look for them: environment, files, machine."""
    if EXTRAS.get(scheme) != "s3":
        return {}
    timeout_s = access.timeout_s
    options: dict[str, Any] = {
        "config_kwargs": {
            "connect_timeout": timeout_s,
            "read_timeout": timeout_s,
            "retries": {"total_max_attempts": 1},
        },
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }
    if access.encryption is not None:
        options["s3_additional_kwargs"] = {"ServerSideEncryption": access.encryption}
        if access.kms_key is not None:
            options["s3_additional_kwargs"]["SSEKMSKeyId"] = access.kms_key
    return options
