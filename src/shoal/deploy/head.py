"""`ray start` with Redis's password kept out of argument lists, where every user of the machine could read it.

Ray takes the password as an argument and hands it on as one. Here it comes from the environment, and Ray's GCS is told
to look for it there too; no other of Ray's processes has a use for it.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import UserError

PASSWORD = "SHOAL_REDIS_PASSWORD"  # noqa: S105 - the name of a variable
_OF_GCS = "FLAGS_redis_password"
"""Where gflags, which reads the arguments of Ray's GCS, looks for what `--fromenv` names."""


def without_password(command: Sequence[str], password: str) -> list[str]:
    """A command of Ray's without the password: the GCS is sent to its environment, the others do without."""
    if f"--redis_password={password}" in command:
        return ["--fromenv=redis_password" if word == f"--redis_password={password}" else word for word in command]
    # Commands that the raylet starts others by are arguments of its own.
    given = re.compile(rf"(redis[._-]password)={re.escape(password)}(?=\s|$)")
    return [given.sub(r"\1=", word) for word in command]


def start_head(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """`ray start ARGUMENTS`, with the password that the environment holds."""
    password = environment.get(PASSWORD)
    if not password:
        raise UserError(f"{PASSWORD}: is missing; put Redis's password into this variable")
    if not password.isprintable() or any(letter.isspace() for letter in password):
        raise UserError(f"{PASSWORD}: holds spaces or control characters, which Ray cannot hand on; use another one")
    from ray._private import services
    from ray.scripts import scripts

    start_process = services.start_ray_process

    def start(command: Sequence[str], process_type: str, *others: Any, **options: Any) -> Any:
        if process_type == "gcs_server":
            os.environ[_OF_GCS] = password
        try:
            return start_process(without_password(command, password), process_type, *others, **options)
        finally:
            os.environ.pop(_OF_GCS, None)

    services.start_ray_process = start
    os.environ.pop(PASSWORD, None)
    scripts.cli(["start", *arguments, "--redis-password", password], standalone_mode=True)


if __name__ == "__main__":
    try:
        start_head(sys.argv[1:], dict(os.environ))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
