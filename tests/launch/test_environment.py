import socket
from pathlib import Path

import pytest

from shoal.launch.environment import interface_of, nccl_environment, network_environment, referenced_environment
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import NcclSection
from tests.tiny import TINY


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"interface": "eth0"}, {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}),
        ({"interface": "=eth0,eth1"}, {"NCCL_SOCKET_IFNAME": "=eth0,eth1", "GLOO_SOCKET_IFNAME": "eth0"}),
        ({"interface": "^docker0,lo"}, {"NCCL_SOCKET_IFNAME": "^docker0,lo"}),
        ({"infiniband": False}, {"NCCL_IB_DISABLE": "1"}),
        ({"infiniband": True}, {"NCCL_IB_DISABLE": "0"}),
        ({"ib_devices": "mlx5_0,mlx5_1"}, {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
        ({"p2p_level": "NVL"}, {"NCCL_P2P_LEVEL": "NVL"}),
        ({"debug": "WARN"}, {"NCCL_DEBUG": "WARN"}),
        ({"timeout_s": 10}, {}),
        ({"environment": {"NCCL_ALGO": "Ring"}}, {"NCCL_ALGO": "Ring"}),
        ({"debug": "WARN", "environment": {"NCCL_DEBUG": "TRACE"}}, {"NCCL_DEBUG": "TRACE"}),
    ],
)
def test_fields_become_the_variables_that_nccl_reads(fields: dict[str, object], variables: dict[str, str]) -> None:
    assert nccl_environment(NcclSection.model_validate(fields)) == variables


def test_the_loopback_interface_is_found_by_its_address_and_a_strange_address_is_not() -> None:
    name = interface_of("127.0.0.1")
    assert name is not None and name in [interface for _, interface in socket.if_nameindex()]
    assert interface_of("192.0.2.1") is None


def test_workers_on_one_machine_stay_on_its_loopback() -> None:
    loopback = interface_of("127.0.0.1")
    assert network_environment("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def test_what_the_user_has_said_about_the_network_stands() -> None:
    given = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_DEBUG": "INFO"}
    assert network_environment("127.0.0.1", given) | given == network_environment("127.0.0.1", given)
    assert network_environment("192.0.2.1", given) == given


def test_only_the_variables_that_a_recipe_refers_to_travel(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_LR", "0.02")
    monkeypatch.setenv("SHOAL_TEST_OTHER", "secret")
    (here / ".env").write_text("SHOAL_TEST_NAME=from-the-file\n")
    overrides = {"optim.lr": "${env:SHOAL_TEST_LR}", "name": "run-${env:SHOAL_TEST_NAME}"}
    loaded = load_recipe([TINY], overrides)
    assert referenced_environment(loaded) == {"SHOAL_TEST_LR": "0.02", "SHOAL_TEST_NAME": "from-the-file"}
    assert referenced_environment(load_recipe([TINY])) == {}
