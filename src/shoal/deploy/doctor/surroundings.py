"""Variables that trip people, Ray's token, and who the user is."""

import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.core.storage import expand_home
from shoal.deploy.doctor.finding import Finding, in_list, passed, skipped

_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of one machine copy through the host's memory",
    "NCCL_SHM_DISABLE": "GPUs of one machine talk over the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
}
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every GPU operation is waited for",
    "TORCH_SHOW_CPP_STACKTRACES": "",
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_LOUD = ("INFO", "TRACE")
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@dataclass(frozen=True)
class Token:
    """Where Ray's token comes from; never what it is."""

    source: str
    """A variable or a file; empty where there is none."""
    mode: int = 0
    """Of the file: who may read it."""
    is_there: bool = True
    variable: str = ""
    """Which names the file; empty for the file that Ray takes by itself."""


def judge_variables(variables: Mapping[str, str], cores: int, has_gpu: bool, interfaces: list[str]) -> list[Finding]:
    """What is set that makes runs slow, blind or mute; and interfaces that are not there, by which none starts."""
    findings = _judge_interfaces(variables, interfaces)
    odd = dict(_odd_variables(variables, cores, has_gpu))
    if odd:
        told = in_list((f"{name}={variables[name]}: {why}" for name, why in odd.items() if name not in _PROXIES), 6)
        proxies = in_list(why for name, why in odd.items() if name in _PROXIES)
        names = [name for name in odd if name not in _PROXIES]
        advice = [f"unset {' '.join(names)}, unless it is meant"] if names else []
        advice += ["export no_proxy=localhost,127.0.0.1 and the cluster's addresses"] if proxies else []
        found = "; ".join(filter(None, [told, proxies]))
        return [*findings, Finding("variables", "warn", found, "; ".join(advice))]
    return findings or [passed("variables", "none that is known to trip people")]


def _odd_variables(variables: Mapping[str, str], cores: int, has_gpu: bool) -> list[tuple[str, str]]:
    found = []
    if has_gpu:
        if variables.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
            found.append(("CUDA_VISIBLE_DEVICES", "no GPU is seen"))
        found += [(name, why) for name, why in _OFF.items() if variables.get(name) == "1"]
        found += [(name, why) for name, why in _SLOW.items() if why and variables.get(name) == "1"]
    if variables.get("NCCL_DEBUG", "").upper() in _LOUD:
        found.append(("NCCL_DEBUG", "NCCL prints much"))
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append(("TORCH_DISTRIBUTED_DEBUG", "every collective is checked, which is slow"))
    if variables.get("OMP_NUM_THREADS") == "1" and cores > 1:
        found.append(("OMP_NUM_THREADS", f"one thread on {cores} cores, unless cluster.threads_per_worker says more"))
    if variables.get("RAY_AUTH_MODE", "").lower() == "disabled":
        found.append(("RAY_AUTH_MODE", "whoever reaches a Ray that is started here can run code"))
    proxy = next((name for name in _PROXIES if variables.get(name)), None)
    if proxy is not None and not (variables.get("no_proxy") or variables.get("NO_PROXY")):
        found.append((proxy, f"{proxy} is set and no_proxy is not: calls to the cluster go through the proxy"))
    return found


def _judge_interfaces(variables: Mapping[str, str], interfaces: list[str]) -> list[Finding]:
    wrong = []
    for name in _INTERFACES:
        value = variables.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or name.startswith("GLOO")
        wanted = value.lstrip("=").split(",")
        if not any(one == has if exact else one.startswith(has) for one in interfaces for has in wanted):
            wrong.append(name)
    if not wrong:
        return []
    named = in_list(f"{name}={variables[name]}" for name in wrong)
    advice = f"unset {' '.join(wrong)}, or set nccl.interface to one that is there"
    found = f"{named}: no such interface; there are {in_list(interfaces, 8)}"
    return [Finding("interfaces", "fail", found, advice)]


def look_at_token(variables: Mapping[str, str] | None = None) -> Token:
    """Where Ray would take its token from."""
    variables = os.environ if variables is None else variables
    if variables.get("RAY_AUTH_TOKEN"):
        return Token("RAY_AUTH_TOKEN")
    named = variables.get("RAY_AUTH_TOKEN_PATH")
    file, variable = (Path(named), "RAY_AUTH_TOKEN_PATH") if named else (expand_home("~/.ray/auth_token"), "")
    try:
        return Token(str(file), stat.S_IMODE(file.stat().st_mode), variable=variable)
    except OSError:
        return Token(str(file), is_there=False, variable=variable) if named else Token("")


def judge_token(token: Token) -> Finding:
    """Whether others may read it."""
    if not token.is_there:
        advice = "copy the head's ~/.ray/auth_token there, or unset RAY_AUTH_TOKEN_PATH"
        return Finding("token", "fail", f"RAY_AUTH_TOKEN_PATH names {token.source}, which cannot be read", advice)
    if not token.source:
        return skipped("token", "none here; a cluster needs one: ray get-auth-token --generate")
    if token.mode & 0o077:
        found = f"{token.source} can be read by other users (mode {token.mode:o})"
        return Finding("token", "warn", found, f"chmod 600 {token.source}; if others have seen it, make a new one")
    return passed("token", token.source)


def judge_user(uid: int, name: str | None, home: str) -> Finding:
    """Whether this user has a name, which torch.compile and others ask for."""
    who = f"{name or 'no name'} (uid {uid}), home {home or 'unknown'}"
    if name is None or not home:
        advice = "set USER and HOME, and TORCHINDUCTOR_CACHE_DIR where torch.compile is used"
        return Finding("user", "warn", who, advice)
    return passed("user", who)


def check_user(variables: Mapping[str, str] | None = None) -> Finding:
    """Of this process."""
    variables = os.environ if variables is None else variables
    name: str | None = variables.get("USER") or variables.get("LOGNAME") or None
    if name is None:
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = None
    home = str(expand_home("~"))
    return judge_user(os.getuid(), name, "" if home == "~" else home)
