"""What reaches a trainer by environment variables: settings of the network, and what a recipe refers to."""

import fcntl
import re
import socket
import struct
from collections.abc import Mapping

from shoal.observe.track.section import ENVIRONMENT as OF_TRACKERS
from shoal.recipe.load import LoadedRecipe
from shoal.recipe.references import environment
from shoal.recipe.schema import NcclSection

_SIOCGIFADDR = 0x8915
QUIET_RAY = {
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "10000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_DASHBOARD_AGENT_LOOP_MONITOR_INTERVAL_S": "60",
    "METRICS_RECORD_INTERVAL_S": "600",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
}
"""A Ray of our own shares its cores with the training; nobody looks at its statistics, and its store stays empty."""


def nccl_environment(section: NcclSection) -> dict[str, str]:
    """The variables that NCCL reads, for the fields that are set."""
    values: dict[str, str] = {}
    if section.interface is not None:
        values["NCCL_SOCKET_IFNAME"] = section.interface
        if not section.interface.startswith("^"):  # Gloo takes one name, and no exclusions
            values["GLOO_SOCKET_IFNAME"] = section.interface.lstrip("=").split(",")[0]
    if section.infiniband is not None:
        values["NCCL_IB_DISABLE"] = "0" if section.infiniband else "1"
    if section.ib_devices is not None:
        values["NCCL_IB_HCA"] = section.ib_devices
    if section.p2p_level is not None:
        values["NCCL_P2P_LEVEL"] = section.p2p_level
    if section.debug is not None:
        values["NCCL_DEBUG"] = section.debug
    return values | dict(section.environment)


def network_environment(address: str, given: Mapping[str, str]) -> dict[str, str]:
    """Gloo by the interface that holds this machine's address: it would otherwise go by what the host's name means.

    Workers on one machine stay on its loopback, NCCL's too.
    """
    interface = interface_of(address)
    if interface is None:
        return dict(given)
    found = {"GLOO_SOCKET_IFNAME": interface}
    if address.startswith("127."):
        found["NCCL_SOCKET_IFNAME"] = interface
    return found | dict(given)


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # one without an IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def referenced_environment(loaded: LoadedRecipe) -> dict[str, str]:
    """The variables that the recipe's `${env:NAME}` references name, and those that its trackers read: workers
    elsewhere do not have them."""
    names = {name for text in loaded.references.values() for name in re.findall(r"\$\{env:([^}]*)\}", text)}
    values = environment()
    if loaded.recipe.track.sinks:
        names |= {name for name in values if name.startswith(OF_TRACKERS)}
    return {name: values[name] for name in sorted(names) if name in values}
