"""Whether a cluster's GCS, the part of its head that all others ask, answers and takes the token from here.

It is asked once, with a time limit: Ray's own connection would wait for a stopped one without end or word.
"""

import importlib
import os
from typing import Literal

from shoal.core.ray_connection import has_token, host_and_port, is_loopback, ray_settings, why_silent
from shoal.core.secrets import scrub
from shoal.deploy.doctor.finding import Finding
from shoal.deploy.doctor.surroundings import Token, look_at_token

_ANSWER_WITHIN_S = 10.0
Trouble = Literal["", "silent", "refused"]


def check_gcs(address: str) -> Finding | None:
    """What is wrong with it; nothing where it is well, or where only Ray itself can say more.

    Args:
        address: As `shoal train` takes it; of `ray://` there is nothing to ask.
    """
    if address.startswith("ray://"):
        return None
    settings = {"RAY_AUTH_MODE": "token"} if has_token() else {}
    with ray_settings(settings, on_loopback=is_loopback(host_and_port(address)[0])):
        found = _resolve(address)
        trouble = _ask(found)
    if trouble == "refused":
        return judge_refusal(look_at_token(), os.environ.get("RAY_AUTH_MODE", ""))
    if trouble == "silent":
        words = f"{scrub(found)}: its GCS does not answer within {_ANSWER_WITHIN_S:.0f} s"
        advice = "is the head overloaded or stopped? look there, and if it stays so restart it: ray stop, ray start"
        return Finding("connect", "fail", words, advice)
    return None


def _resolve(address: str) -> str:
    """HOST:PORT of what `auto` means; empty where there is none."""
    if address != "auto":
        return address
    try:
        return importlib.import_module("ray._private.services").canonicalize_bootstrap_address(address) or ""
    except (ImportError, ConnectionError):  # of which more is said when Ray connects
        return ""


def _ask(address: str) -> Trouble:
    host, port = host_and_port(address)
    if port is None or why_silent(host, port):
        return ""
    try:
        grpc = importlib.import_module("grpc")
        messages = importlib.import_module("ray.core.generated.gcs_service_pb2")
        stubs = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
        open_channel = importlib.import_module("ray._private.grpc_utils").init_grpc_channel
        refusal = importlib.import_module("ray.exceptions").AuthenticationError
    except ImportError:
        return ""
    try:
        channel = open_channel(address, options=[("grpc.enable_http_proxy", 0)])  # as Ray does
        with channel:
            stubs.NodeInfoGcsServiceStub(channel).CheckAlive(messages.CheckAliveRequest(), timeout=_ANSWER_WITHIN_S)
    except refusal:  # RAY_AUTH_MODE asks for a token, and there is none
        return "refused"
    except grpc.RpcError as error:
        troubles: dict[object, Trouble] = {
            grpc.StatusCode.UNAUTHENTICATED: "refused",
            grpc.StatusCode.DEADLINE_EXCEEDED: "silent",
        }
        return troubles.get(error.code(), "")
    return ""


def judge_refusal(token: Token, mode: str) -> Finding:
    """What to do about the one token that Ray has used: a variable outranks a file.

    Args:
        token: Where it is from.
        mode: RAY_AUTH_MODE of the user.
    """
    named = f"{token.source} ({token.variable})" if token.variable else token.source
    found = f"the cluster refuses the token of {named}"
    if mode.lower() == "disabled":
        found, advice = "the cluster asks for a token, and RAY_AUTH_MODE=disabled sends none", "unset RAY_AUTH_MODE"
    elif token.source == "RAY_AUTH_TOKEN":
        advice = (
            "RAY_AUTH_TOKEN is set here and goes before every file: unset it if the head's token is in a file here, "
            "or set it to what ray get-auth-token prints on the head"
        )
    elif not token.source or not token.is_there:
        found = f"the cluster asks for a token, and there is none{f' at {named}' if token.source else ''}"
        advice = f"copy the head's ~/.ray/auth_token {'there' if token.source else 'here'} (mode 600)"
        advice += f", or unset {token.variable}" if token.variable else ", or set RAY_AUTH_TOKEN"
    else:
        advice = f"copy the head's ~/.ray/auth_token to {token.source} (mode 600)"
        advice += f", or unset {token.variable}" if token.variable else ", or set RAY_AUTH_TOKEN"
    return Finding("connect", "fail", found, advice)
