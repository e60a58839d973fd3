"""Helm and kubectl, the programs that Kubernetes is spoken to with."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import UserError

_GET = {
    "helm": "Helm renders the chart: install it (helm.sh/docs/intro/install), version 3.15 or newer",
    "kubectl": "kubectl speaks to the cluster: install it (kubernetes.io/docs/tasks/tools)",
}


def find(name: str) -> str:
    """Where a program is: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    if (found := shutil.which(name)) is not None:
        return found
    raise UserError(f"{name}: is not on the path. {_GET[name]}")


def run(
    name: str, arguments: Sequence[str], text: str | None = None, timeout_s: float = 60.0
) -> "subprocess.CompletedProcess[str]":
    """Call a program, given `text` on its standard input; the caller looks at the status."""
    words = [find(name), *arguments]
    try:
        return subprocess.run(  # noqa: S603 - no shell
            words, input=text or "", capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"error: timeout: no answer within {timeout_s:g} s")
