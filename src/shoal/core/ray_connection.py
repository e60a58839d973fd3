"""What has to be around a call that connects this process to Ray, which is itself not imported here."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.core.storage import expand_home

_ANSWERS_WITHIN_S = 5.0
RUNTIME_ENV = "SHOAL_RAY_RUNTIME_ENV"
"""The variable that tells a trainer, in JSON, what a job brought along: its code, above all."""
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def host_and_port(address: str | None) -> tuple[str, int | None]:
    """Of HOST:PORT and ray://HOST:PORT; of anything else nothing, as of `auto`, which Ray knows the meaning of."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    return (host, int(port)) if host and port.isascii() and port.isdigit() and int(port) < 1 << 16 else ("", None)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its loopback address."""
    return host.startswith("127.") or host == "localhost"


def why_silent(host: str, port: int) -> str | None:
    """Why nobody answers there, or None: Ray itself would try for minutes."""
    try:
        socket.create_connection((host, port), timeout=_ANSWERS_WITHIN_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def has_token() -> bool:
    """Whether this user has a token for Ray."""
    return (
        bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys())
        or expand_home("~/.ray/auth_token").is_file()
    )


@contextlib.contextmanager
def ray_settings(values: Mapping[str, str], *, on_loopback: bool) -> Iterator[None]:
    """Variables that Ray reads when it is imported and when it connects, unless the user has set them; afterwards they
    are gone, with what Ray itself sets, and signals do what they did before.

    `on_loopback`: the cluster is at this machine's loopback address, for which Ray would take another one.
    """
    values = dict(values) | ({_CLUSTERS: "0"} if on_loopback else {})
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    ours = {*fresh, "PYTHONBREAKPOINT", "RAY_AUTH_MODE"} - os.environ.keys()
    os.environ.update(fresh)
    try:
        with signals_kept(), _read_anew():
            yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _read_anew() -> Iterator[None]:
    """The same where Ray was imported before, by the user's own program say, and keeps what it read then."""
    ray: Any = sys.modules.get("ray")
    if ray is None or ray.is_initialized():  # a connection that is there is not ours to change
        yield
        return
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # of the cluster before, perhaps
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(_CLUSTERS, not constants.IS_WINDOWS_OR_OSX)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """What this process does on a signal stays as it was: Ray would end it on a SIGTERM, without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
