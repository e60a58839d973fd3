"""A cluster's dashboard, which takes jobs: finding it, Ray's token, and what goes wrong in words."""

import contextlib
import importlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from shoal.core.errors import RunError, UserError

_ANSWER_S = 10.0
_OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client obeys rather than the address that it is given."""


def check_address(address: str | None) -> str:
    """The address of a cluster's dashboard, without a slash at its end."""
    wanted = "should be that of the cluster's dashboard, for example http://HEAD:8265"
    if not address:
        raise UserError(f"--address: is missing; it {wanted}")
    try:
        parts = urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_right = False
    if not is_right:
        hint = " (train with shoal train --address for the other kinds)" if address.startswith("ray://") else ""
        raise UserError(f"--address: {address!r} {wanted}{hint}")
    return address.rstrip("/")


def client_of(address: str) -> Any:
    """Ray's client for the jobs of a cluster, which answers."""
    sdk = _sdk()
    headers = _token_headers()
    _check_answers(address, headers)
    with _without(_OVERRIDING), in_words(address):
        return sdk.JobSubmissionClient(address, headers=headers)


def _sdk() -> Any:
    """Ray's client for jobs."""
    try:
        for name in ("requests", "aiohttp", "ray"):
            importlib.import_module(name)
        sdk = importlib.import_module("ray.job_submission")
    except ImportError as error:
        raise UserError(f"shoal submit: needs {error.name}: pip install 'ray[default]' ({error})") from error
    for name in ("dashboard_sdk", "job.sdk"):  # which tell of every upload and connection
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    return sdk


def _token_headers() -> dict[str, str]:
    """Ray's token, if this user has one: Ray's own client sends it only if RAY_AUTH_MODE says so."""
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    from ray.exceptions import AuthenticationError

    try:
        loader = importlib.import_module("ray._raylet").AuthenticationTokenLoader
        return dict(loader.instance().get_token_for_http_header(ignore_auth_mode=True))
    except AuthenticationError as error:
        raise UserError(f"--address: Ray's token cannot be read: {str(error).partition('. Note')[0]}") from error


def _check_answers(address: str, headers: dict[str, str]) -> None:
    """Whether a Ray answers there, soon: Ray's own client would wait for minutes."""
    requests = importlib.import_module("requests")
    try:
        answer = requests.get(f"{address}/api/version", headers=headers, timeout=_ANSWER_S)
        is_ray = answer.status_code in (401, 403) or "ray_version" in answer.json()
    except ValueError:  # no JSON
        is_ray = False
    except OSError as error:
        is_ray = False
        if "BadStatusLine" not in str(error):  # which would be another kind of server
            raise UserError(
                f"--address: nothing answers at {address} ({_cause(error)}); is a Ray dashboard running there, and can "
                "it be reached from here (ray start --head --dashboard-host, or ssh -L)?"
            ) from error
    if not is_ray:
        raise UserError(f"--address: what answers at {address} is no Ray dashboard, whose port is 8265 unless set")


@contextlib.contextmanager
def in_words(address: str) -> Iterator[None]:
    """What Ray's client complains about, in words that name the option."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        how = "gets none" if "Authentication required" in str(error) else "refuses the one it gets"
        raise UserError(
            f"--address: {address} asks for Ray's token and {how}; put that cluster's token (on its head: "
            "ray get-auth-token) into RAY_AUTH_TOKEN, a file named by RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token"
        ) from error
    except RuntimeError as error:
        message = str(error)
        if found := re.search(r"Job (\S+) does not exist", message):
            raise UserError(
                f"job {found[1]!r}: not known at {address}, which forgets its jobs when it ends; see {address}/#/jobs"
            ) from error
        raise RunError(f"--address: {address}: {message}") from error
    except OSError as error:
        raise RunError(f"--address: {address} no longer answers: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """The end of what requests says, where the reason stands."""
    return str(error).rpartition(": ")[2].strip("')\" ") or type(error).__name__


@contextlib.contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Without these environment variables."""
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)
