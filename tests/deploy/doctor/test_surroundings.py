"""Variables, token, user."""

from pathlib import Path

import pytest

from shoal.deploy.doctor.finding import Finding
from shoal.deploy.doctor.surroundings import (
    Token,
    check_user,
    judge_token,
    judge_user,
    judge_variables,
    look_at_token,
)


def judge(variables: dict[str, str], cores: int = 8, has_gpu: bool = True) -> list[Finding]:
    return judge_variables(variables, cores, has_gpu, ["lo", "eth0"])


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_VISIBLE_DEVICES": ""},
        {"NCCL_P2P_DISABLE": "1"},
        {"NCCL_DEBUG": "info"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        {"OMP_NUM_THREADS": "1"},
        {"RAY_AUTH_MODE": "disabled"},
    ],
)
def test_variables_that_trip_people(variables: dict[str, str]) -> None:
    (finding,) = judge(variables)
    name, value = next(iter(variables.items()))
    assert finding.level == "warn" and f"{name}={value}" in finding.found and f"unset {name}" in finding.advice


@pytest.mark.parametrize(
    ("variables", "cores", "has_gpu"),
    [
        ({"CUDA_VISIBLE_DEVICES": "", "NCCL_IB_DISABLE": "1"}, 8, False),
        ({"OMP_NUM_THREADS": "1"}, 1, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}, 8, True),
        ({"http_proxy": "http://proxy", "no_proxy": "localhost"}, 8, True),
    ],
)
def test_those_that_do_not(variables: dict[str, str], cores: int, has_gpu: bool) -> None:
    assert [finding.level for finding in judge(variables, cores, has_gpu)] == ["pass"]


def test_a_proxy_is_told_without_its_password() -> None:
    (finding,) = judge({"https_proxy": "http://me:secret@proxy:3128"})
    assert finding.level == "warn" and "https_proxy" in finding.found and "no_proxy" in finding.advice
    assert "secret" not in str(finding)


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth"}, "pass"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "fail"),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, "pass"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "fail"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "pass"),
        ({"NCCL_SOCKET_IFNAME": "ib0,eth0"}, "pass"),
    ],
)
def test_interfaces_must_be_there(variables: dict[str, str], level: str) -> None:
    finding = judge(variables)[0]
    assert finding.level == level
    if level == "fail":
        assert finding.check == "interfaces" and "lo, eth0" in finding.found


def test_tokens(tmp_path: Path) -> None:
    assert look_at_token({"RAY_AUTH_TOKEN": "s3cret"}) == Token("RAY_AUTH_TOKEN")
    file = tmp_path / "token"
    named = look_at_token({"RAY_AUTH_TOKEN_PATH": str(file)})
    assert judge_token(named).level == "fail" and named.variable == "RAY_AUTH_TOKEN_PATH"
    file.write_text("s3cret")
    file.chmod(0o644)
    finding = judge_token(look_at_token({"RAY_AUTH_TOKEN_PATH": str(file)}))
    assert finding.level == "warn" and "644" in finding.found and f"chmod 600 {file}" in finding.advice
    file.chmod(0o600)
    finding = judge_token(look_at_token({"RAY_AUTH_TOKEN_PATH": str(file)}))
    assert finding == Finding("token", "pass", str(file))


def test_no_token_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert judge_token(look_at_token({})).level == "skip"


def test_users() -> None:
    assert judge_user(1000, "me", "/home/me").level == "pass"
    assert judge_user(4242, None, "/").level == "warn"
    assert judge_user(4242, "me", "").level == "warn"
    assert check_user({"USER": "me"}).found.startswith("me (uid ")
    assert check_user({}).level == "pass"  # whoever runs the tests has a name
