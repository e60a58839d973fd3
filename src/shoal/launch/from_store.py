"""A run of which nothing is left but its checkpoints in a store."""

from pathlib import Path

import xxhash

from shoal.checkpoint.manifest import CheckpointInfo, FileFacts
from shoal.checkpoint.store import list_remote
from shoal.core.errors import UserError
from shoal.core.remote import Access, Remote, RemoteError
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
    remote = Remote(f"{upload_to}/{name}/checkpoints", Access("checkpoint.upload_to"))
    try:
        found = list_remote(remote)
        recipe = next(filter(None, (_recipe_of(info, remote) for info in reversed(found))), None)
    except RemoteError as error:
        raise UserError(f"--resume: {error}") from error
    if recipe is None:
        what = "no checkpoint whose recipe is whole" if found else "no checkpoint"
        raise UserError(f"--resume: there is {what} in {remote.url}; give the folder of a run that was uploaded")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.yaml", recipe)
    return folder, upload_to


def _recipe_of(info: CheckpointInfo, remote: Remote) -> str | None:
    """The recipe of a checkpoint in the store, if it is what was written."""
    content = remote.read(f"{info.path.name}/recipe.yaml") or b""
    facts = info.manifest.files.get("recipe.yaml")
    if facts != FileFacts(len(content), xxhash.xxh3_128_hexdigest(content)):
        return None
    return content.decode(errors="replace")
