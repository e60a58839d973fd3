"""A run of which nothing is left but its checkpoints in a store."""

from pathlib import Path

from shoal.checkpoint.remote import Remote, RemoteError
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.upload import list_remote
from shoal.core.errors import UserError
from shoal.core.storage import write_atomically


def folder_for(address: str, root: Path = Path("runs")) -> tuple[Path, str]:
    """A folder of the same name under `root` with the run's recipe, where there is none yet; and what its
    `checkpoint.upload_to` is: where the folder of that name is."""
    upload_to, _, name = address.rstrip("/").rpartition("/")
    if not name or upload_to.endswith(("/", ":")):
        raise UserError(f"--resume: {address} names no run; give the folder of the run, as in s3://bucket/runs/RUN")
    folder = root / name
    if (folder / "recipe.yaml").is_file():
        return folder, upload_to
    remote = Remote(f"{upload_to}/{name}/checkpoints", CheckpointSection())
    try:
        found = list_remote(remote)
        recipe = remote.read(f"{found[-1].path.name}/recipe.yaml") if found else None
    except RemoteError as error:
        raise UserError(f"--resume: {error}") from error
    if recipe is None:
        raise UserError(f"--resume: there is no checkpoint in {remote.url}; give the folder of a run that was uploaded")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.yaml", recipe.decode())
    return folder, upload_to
