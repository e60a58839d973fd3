"""What is around a connection to Ray; that one is made so is shown in tests/data/test_ray_data.py and tests/launch."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from shoal.core.ray_connection import has_token, host_and_port, is_loopback, ray_settings, why_silent


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:6379", ("127.0.0.1", 6379)),
        ("ray://head:10001", ("head", 10001)),
        ("auto", ("", None)),
        (None, ("", None)),
        ("head", ("", None)),
        ("head:", ("", None)),
        ("head:65536", ("", None)),
        (":6379", ("", None)),
        ("head:\uff16", ("", None)),
    ],
)
def test_addresses_are_taken_apart(address, found):
    assert host_and_port(address) == found


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True)])
def test_loopback_is_known(host, expected):
    assert is_loopback(host) is expected and not is_loopback("192.0.2.1") and not is_loopback("")


def test_who_does_not_answer_is_told_at_once():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert why_silent("127.0.0.1", port) == "Connection refused"
        server.listen()
        assert why_silent("127.0.0.1", port) is None


def test_a_token_is_found_in_a_variable_or_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert not has_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert has_token()
    (tmp_path / ".ray" / "auth_token").unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert has_token()


def test_variables_and_signals_are_as_before(monkeypatch):
    monkeypatch.setenv("RAY_SET_BY_USER", "theirs")
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    with ray_settings({"RAY_SET_BY_USER": "ours", "RAY_OURS": "1"}, on_loopback=True):
        assert os.environ["RAY_SET_BY_USER"] == "theirs" and os.environ["RAY_OURS"] == "1"
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
        os.environ["PYTHONBREAKPOINT"] = "ray.util.pdb.set_trace"  # as Ray does
        os.environ["RAY_AUTH_MODE"] = "token"  # as Ray does where it is given one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert os.environ["RAY_SET_BY_USER"] == "theirs"
    ours = {"RAY_OURS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "PYTHONBREAKPOINT", "RAY_AUTH_MODE"}
    assert not ours & os.environ.keys()


def test_how_the_user_lets_ray_know_people_is_kept(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with ray_settings({"RAY_AUTH_MODE": "disabled"}, on_loopback=True):
        assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_what_the_user_has_set_is_kept_after_an_import_too():
    code = """
        import os
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
        import ray
        from shoal.core.ray_connection import ray_settings

        with ray_settings({}, on_loopback=True):
            assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is True
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_ray_that_was_imported_before_takes_the_settings_too():
    code = """
        import os
        os.environ.pop("RAY_AUTH_MODE", None)
        import ray
        from ray._private.services import resolve_ip_for_localhost
        from ray._raylet import AuthenticationMode, get_authentication_mode
        from shoal.core.ray_connection import ray_settings

        before = ray._private.ray_constants.ENABLE_RAY_CLUSTER
        assert get_authentication_mode() == AuthenticationMode.DISABLED
        with ray_settings({"RAY_AUTH_MODE": "token"}, on_loopback=True):
            assert resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
            assert get_authentication_mode() == AuthenticationMode.TOKEN
        assert ray._private.ray_constants.ENABLE_RAY_CLUSTER == before

        from ray._raylet import Config
        Config.initialize('{"health_check_period_ms": 4321}')
        with ray_settings({}, on_loopback=False):
            assert Config.health_check_period_ms() != 4321
        Config.initialize('{"health_check_period_ms": 4321}')
        ray.is_initialized = lambda: True  # as with a program's own connection, whose settings are not ours
        with ray_settings({}, on_loopback=True):
            assert Config.health_check_period_ms() == 4321
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_the_token_of_another_cluster_is_read_anew():
    """A program that was connected to one cluster, and then connects to another, or starts a Ray of its own."""
    code = """
        import os
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
        import ray
        ray._raylet.Config.initialize("")
        loader = ray._raylet.AuthenticationTokenLoader.instance()
        assert loader.get_raw_token() == "a" * 64
        from shoal.core.ray_connection import ray_settings
        os.environ["RAY_AUTH_TOKEN"] = "b" * 64
        with ray_settings({}, on_loopback=True):
            assert loader.get_raw_token() == "b" * 64
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
