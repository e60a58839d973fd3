import errno
import importlib.util
import socket
from typing import Any

import pytest

from shoal.observe.track.reasons import short_reason


def wrapped(inner: BaseException, words: str) -> RuntimeError:
    """As packages do: with all that they know in one text."""
    try:
        try:
            raise inner
        except type(inner) as error:
            raise RuntimeError(f"{words}: {error}")  # noqa: B904 - as MLflow does it
    except RuntimeError as error:
        return error


class ReasonedError(Exception):
    """As urllib3 keeps what went wrong."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"HTTPConnectionPool(host='h', port=1): Max retries exceeded ({reason})")
        self.reason = reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (wrapped(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "x" * 900), "Connection refused"),
        (ReasonedError(OSError(errno.ENOSPC, "No space left on device")), "No space left on device"),
        (wrapped(socket.gaierror(-2, "Name or service not known"), "y"), "Name or service not known"),
        (wrapped(TimeoutError("timed out"), "API request to http://h failed"), "no answer in time"),
        (ReasonedError(ValueError("too many 503 error responses")), "too many 503 error responses"),
        (ConnectionError("401 Unauthorized"), "401 Unauthorized"),
        (ValueError("it is\nlong\n[SQL: INSERT]"), "ValueError: it is"),
        (KeyError(), "KeyError:"),
    ],
)
def test_the_bottom_of_it_in_a_few_words(error: Exception, words: str) -> None:
    assert short_reason(error) == words


def test_words_without_an_end_are_cut() -> None:
    assert len(short_reason(ValueError("x" * 10_000))) == 200


@pytest.mark.skipif(importlib.util.find_spec("requests") is None, reason="requests is not installed")
def test_what_a_real_refusal_is_called() -> None:
    import requests

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(requests.RequestException) as caught:
        requests.get(f"http://127.0.0.1:{port}", timeout=5)
    assert short_reason(_outer(caught.value)) == "Connection refused"


def _outer(error: Any) -> RuntimeError:
    return wrapped(error, "API request failed")
