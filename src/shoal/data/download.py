"""Finding the files of a dataset, and fetching public ones: whole and verified, or not at all."""

import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from shoal.core.errors import NoDataError, UserError
from shoal.core.storage import expand_home, fsync_directory

LOGGER = logging.getLogger("shoal.data")
TIMEOUT_S = 15.0
"""How long a server may stay silent, at connecting and at every read, before the next mirror is tried."""
CHUNK_BYTES = 1 << 18
PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True)
class PublicFile:
    """A file of a public dataset: its name, its checksum (`md5:...` or `sha256:...`) and its mirrors, best first."""

    name: str
    checksum: str
    urls: tuple[str, ...]


class DownloadError(Exception):
    """No mirror delivered, or there is nowhere to write; the message is the reason."""


def search_folders(data_dir: str, *subfolders: str) -> list[Path]:
    """Where files are looked for: `data_dir` first, then its subfolders; downloads go to the first subfolder."""
    root = expand_home(data_dir)
    return [root, *(root / name for name in subfolders)]


def find_file(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first file called one of `names`, folder by folder."""
    for folder in folders:
        for name in names:
            try:
                if (folder / name).is_file():
                    return folder / name
            except PermissionError as error:
                raise UserError(f"data.dir: cannot look into {folder}: {error.strerror}; check its owner") from error
    return None


def find_or_fetch(
    folders: Sequence[Path], names: Sequence[str], public: PublicFile | None = None, download: bool = False
) -> Path:
    """The file called one of `names`; where it is missing, `public` is downloaded if that is allowed.

    A file that is present is used as it is: nothing is written, so the folder may be read-only.
    """
    found = find_file(folders, names)
    if found is not None:
        return found
    if public is None:
        raise not_found(names[0], folders)
    if not download:
        raise not_found(public.name, folders, url=public.urls[0])
    try:
        return fetch_file(public, folders[1])
    except DownloadError as error:
        raise not_found(public.name, folders, url=public.urls[0], reason=str(error)) from error


def not_found(name: str, folders: Sequence[Path], url: str | None = None, reason: str | None = None) -> NoDataError:
    """The error for a file that is in none of `folders`: where it was looked for, what failed, what to do."""
    message = f"data.dir: {name} not found in {folders[0]}"
    if len(folders) > 1:
        message += f" (also looked in {', '.join(str(folder) for folder in folders[1:])})"
    if reason is not None:
        message += f", and downloading failed ({reason})"
    remedy = f"Put it in {folders[0]}." if url is None else f"Fetch {url} and put it in {folders[1]}/."
    return NoDataError(f"{message}. {remedy}")


def fetch_file(public: PublicFile, folder: Path) -> Path:
    """Download `public` into `folder`, unless another process did so while this one waited for it."""
    target = folder / public.name
    with _only_downloader(folder, public):
        if not target.is_file():
            with _verified_download(public, folder) as part:
                part.replace(target)
                fsync_directory(folder)
    return target


def fetch_archive(public: PublicFile, folder: Path, members: Sequence[str]) -> None:
    """Download the tar `public` and leave exactly its files `members` (paths inside it) under `folder`."""
    with _only_downloader(folder, public):
        if all((folder / member).is_file() for member in members):
            return
        with _verified_download(public, folder) as part:
            unpacked = folder / f".{public.name}.unpacked"
            shutil.rmtree(unpacked, ignore_errors=True)
            try:
                _unpack(part, unpacked, members)
                for member in members:
                    (folder / member).parent.mkdir(parents=True, exist_ok=True)
                    (unpacked / member).replace(folder / member)
                    fsync_directory((folder / member).parent)
            finally:
                shutil.rmtree(unpacked, ignore_errors=True)


def _unpack(archive: Path, target: Path, members: Sequence[str]) -> None:
    # Content is copied under names of ours, never extracted under names of the archive's: no links, no `../`.
    with tarfile.open(archive) as tar:
        for member in members:
            source = tar.extractfile(member)
            assert source is not None, f"{member} is not a file in {archive}"
            (target / member).parent.mkdir(parents=True, exist_ok=True)
            with source, (target / member).open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def _only_downloader(folder: Path, public: PublicFile) -> Iterator[None]:
    """Inside, this process is the only one that downloads `public` into `folder`."""
    lock = FileLock(folder / f".{public.name}.lock")
    made_here = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise DownloadError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        # Taken away while still held: whoever waits opens the path anew at each try, so it cannot hold the old one.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        # Folders made for a download that then failed go too; one that holds something stays.
        with suppress(OSError):
            for path in made_here:
                path.rmdir()


@contextmanager
def _verified_download(public: PublicFile, folder: Path) -> Iterator[Path]:
    """A temporary file in `folder` with the content of `public`; gone afterwards unless renamed inside.

    Its name is fixed and the lock is held, so that what a killed process left is overwritten, not piled up.
    """
    part = folder / f".{public.name}.part"
    failures: list[str] = []
    mismatch: UserError | None = None
    try:
        for url in public.urls:
            try:
                digest = _stream(url, part, public.checksum.partition(":")[0])
            except (OSError, http.client.HTTPException, DownloadError) as error:
                failures.append(f"{url}: {_reason(error)}")
                LOGGER.warning("download failed: %s", failures[-1])
                continue
            if digest == public.checksum:
                yield part
                return
            mismatch = UserError(
                f"data.dir: {public.name} from {url} is not the file that was published: expected {public.checksum}, "
                f"got {digest}. Nothing was kept; try again (a proxy may have answered), or put the right file in "
                f"{folder}/."
            )
            LOGGER.warning("download rejected: %s: expected %s, got %s", url, public.checksum, digest)
        raise mismatch or DownloadError("; ".join(failures))
    finally:
        part.unlink(missing_ok=True)


def _stream(url: str, part: Path, algorithm: str) -> str:
    """Write what `url` serves to `part`, durably; returns its checksum."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    # Only URLs of Shoal's own tables come here, all http or https.
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:  # noqa: S310
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        LOGGER.info("downloading %s (%s)", url, f"{total / 1e6:.1f} MB" if total else "size unknown")
        num_bytes, reported = 0, time.monotonic()
        while chunk := response.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            num_bytes += len(chunk)
            if time.monotonic() - reported > PROGRESS_EVERY_S:
                reported = time.monotonic()
                share = f" of {total / 1e6:.1f} MB" if total else ""
                LOGGER.info("downloading %s: %.1f MB%s", url, num_bytes / 1e6, share)
        if total is not None and num_bytes != total:
            raise DownloadError(f"the connection closed after {num_bytes:,} of {total:,} bytes")
        file.flush()
        os.fsync(file.fileno())
    LOGGER.info("downloaded %s: %.1f MB", url, num_bytes / 1e6)
    return f"{algorithm}:{digest.hexdigest()}"


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
