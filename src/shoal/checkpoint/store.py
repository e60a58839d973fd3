"""Checkpoints in a store: where those of a run are, which there are, and bringing one from there."""

import shutil
from pathlib import Path

from shoal.checkpoint.folder import folder_to_write, step_name, step_of
from shoal.checkpoint.manifest import MANIFEST, CheckpointInfo, CorruptCheckpointError, parse_manifest
from shoal.checkpoint.section import CheckpointSection
from shoal.core.errors import UserError
from shoal.core.remote import Access, Remote, RemoteError
from shoal.core.storage import fsync_directory


def remote_of(run_name: str, settings: CheckpointSection) -> Remote:
    """Where the checkpoints of a run are in the store."""
    assert settings.upload_to is not None
    access = Access("checkpoint.upload_to", settings.upload_timeout_s, settings.encryption, settings.kms_key)
    return Remote(f"{settings.upload_to.rstrip('/')}/{run_name}/checkpoints", access)


def check_unused(run_name: str, settings: CheckpointSection) -> None:
    """Before a run begins: that the store takes what it is given, and holds no checkpoints of another run of that name.

    Theirs would be taken for older or newer ones of this run, and be deleted, or gone on from.
    """
    remote = remote_of(run_name, settings)
    try:
        remote.check_writable()
        found = list_remote(remote)
    except RemoteError as error:
        raise UserError(f"checkpoint.upload_to: {error}; check address and credentials") from error
    if found:
        raise UserError(
            f"checkpoint.upload_to: {remote.url} holds checkpoints of another run, up to step {found[-1].step}; "
            "choose another name with --run-dir, or go on with that one: --resume"
        )


def list_remote(remote: Remote) -> list[CheckpointInfo]:
    """The checkpoints in a store whose manifest is whole, oldest first."""
    found = []
    for name in remote.names(""):
        if name.startswith("step-") and name.removeprefix("step-").isdecimal():
            content = remote.read(f"{name}/{MANIFEST}")
            try:
                info = CheckpointInfo(Path(name), parse_manifest(content or b"", f"{remote.url}/{name}"))
            except CorruptCheckpointError:
                continue
            if info.step == step_of(info.path):
                found.append(info)
    return sorted(found, key=lambda info: info.step)


def fetch(remote: Remote, info: CheckpointInfo, folder: Path) -> Path:
    """Bring a checkpoint from a store into a run's folder; whether its bytes are right shows when it is read."""
    aside = folder_to_write(folder, info.step, "fetched")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        for name in (*info.manifest.files, MANIFEST):
            remote.get(f"{info.path.name}/{name}", aside / name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    target = folder / step_name(info.step)
    aside.rename(target)
    fsync_directory(folder)
    return target
