"""Whether a cluster's GCS answers; with a cluster in test_cluster.py."""

import socket
import time

import pytest

from shoal.deploy.doctor import gcs
from shoal.deploy.doctor.gcs import check_gcs, judge_refusal
from shoal.deploy.doctor.surroundings import Token

FILE = "/home/me/.ray/auth_token"


@pytest.mark.parametrize(
    ("token", "mode", "found", "advice"),
    [
        (Token("RAY_AUTH_TOKEN"), "", "refuses the token of RAY_AUTH_TOKEN", "goes before every file: unset it"),
        (Token(FILE), "token", f"refuses the token of {FILE}", f"auth_token to {FILE} (mode 600), or set"),
        (Token("/t", variable="RAY_AUTH_TOKEN_PATH"), "", "of /t (RAY_AUTH_TOKEN_PATH)", "unset RAY_AUTH_TOKEN_PATH"),
        (Token("/t", is_there=False, variable="RAY_AUTH_TOKEN_PATH"), "", "none at /t (RAY_AUTH_TOKEN_PATH)", "there"),
        (Token(""), "", "asks for a token, and there is none", "here (mode 600), or set RAY_AUTH_TOKEN"),
        (Token(FILE), "disabled", "RAY_AUTH_MODE=disabled sends none", "unset RAY_AUTH_MODE"),
    ],
)
def test_what_is_told_of_a_token_that_is_refused(token: Token, mode: str, found: str, advice: str) -> None:
    finding = judge_refusal(token, mode)
    assert finding.level == "fail" and finding.check == "connect"
    assert found in finding.found and advice in finding.advice


def test_one_that_takes_connections_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "_ANSWER_WITHIN_S", 1.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which Ray does not use either
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        finding = check_gcs(f"127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 10.0
    assert finding is not None and finding.found.endswith("its GCS does not answer within 1 s")


def test_what_ray_itself_says_better_is_left_to_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert check_gcs(f"127.0.0.1:{port}") is None
    assert check_gcs(f"ray://127.0.0.1:{port}") is None
