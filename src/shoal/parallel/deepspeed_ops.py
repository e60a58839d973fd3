"""DeepSpeed's access to disks, compiled where it is used: once on a machine, while whoever else wants it waits.

PyTorch keeps others away while it compiles by a file that stays behind when the compilation is killed, and for which
everybody then waits for ever. So processes of a run wait for a lock of their own, which goes with its holder, and what
is left of PyTorch's is removed where nobody compiles. The compiler runs under a process that takes it along, however
the worker ends.
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.core.sessions import end_with_parent, kill_session
from shoal.parallel.deepspeed_engine import environment, import_deepspeed

_OPS = ("pin_memory", "async_io")
"""What `async_io` consists of; DeepSpeed compiles one after the other."""
_WORDS = "parallel.deepspeed: nvme needs DeepSpeed's async_io, which is compiled on each machine"
_TOOLS = {"CXX": "a C++ compiler (Debian: apt-get install g++)", "ninja": "ninja (pip install ninja)"}
_LIBAIO = "libaio (Debian: apt-get install libaio-dev)"
_SOON_S = 20.0
"""A build that takes longer than to see that there is nothing to do is told."""
_NOBODY_S = 5.0
"""A lock of PyTorch's where nobody was seen for so long is of one who was killed."""
_LOOK_EVERY_S = 0.2

Tell = Callable[[str], None]


def check_nvme(folder: Path, process: Process) -> None:
    """Raise on every worker unless each can write to its disk in the way that DeepSpeed does.

    That is compiled where it was not yet, which takes minutes.
    """
    group = process.group.sibling()  # machines are not equally fast, nor equally ready
    import_deepspeed(process.device)
    # What pip has installed beside this Python, ninja above all, is found without its environment being activated.
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), str(Path(sys.executable).parent)]))
    with (
        environment(PATH=path, DS_ACCELERATOR=process.device.type),
        contextlib.redirect_stdout(sys.stderr),
        contextlib.ExitStack() as stack,
    ):
        lock, is_held, problem = None, False, _folder_problem(folder)
        try:
            lock = stack.enter_context(_open_lock())
            # The first worker of a machine goes first: it is the one that is heard.
            is_held = process.local_rank == 0 and _try_to_hold(lock)
        except OSError as error:
            problem = problem or f"{_WORDS}: {error.filename or 'its folder'} cannot be written: {error.strerror}"
        _raise_first(group.gather(problem))
        assert lock is not None
        if not is_held:
            _hold(lock, process)
        problem = _load(process.tell)
    _raise_first(group.gather(problem))


def _raise_first(problems: list[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise UserError(problem)


def _folder_problem(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"parallel.deepspeed.nvme_dir: {folder} cannot be made: {error.strerror}"
    return None


def _build_folder(name: str) -> Path:
    """Where PyTorch compiles an extension; it is made."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _open_lock() -> Any:
    return (_build_folder("async_io").parent / "shoal.lock").open("w")


def _try_to_hold(lock: Any) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hold(lock: Any, process: Process) -> None:
    if process.local_rank == 0:  # then it is another run that does
        process.tell(f"waiting for another run on {socket.gethostname()} that builds DeepSpeed's async_io")
    fcntl.flock(lock, fcntl.LOCK_EX)


def _load(tell: Tell) -> str | None:
    """Have what is needed compiled where it is not, and load it; why that cannot be, in words."""
    if missing := missing_tools():
        return f"{_WORDS}, and {socket.gethostname()} lacks {' and '.join(missing)}; install it, or offload to cpu"
    from deepspeed.ops.op_builder import AsyncIOBuilder

    advice = "look at the compiler, or offload to cpu"
    folders = [_build_folder(name) for name in _OPS]
    for folder in folders:
        if (problem := remove_stale_lock(folder, tell)) is not None:
            return f"{_WORDS}: {problem}"
    try:
        stamp = folders[-1] / "shoal.json"
        if not _is_built(folders, stamp):
            said = build(
                [sys.executable, "-P", "-m", "shoal.parallel.deepspeed_ops", str(os.getpid())],
                tell,
                _libraries(folders),
            )
            if said is not None:
                return f"{_WORDS}, and that fails on {socket.gethostname()} ({_telling_line(said)}); {advice}"
        AsyncIOBuilder().load(verbose=False)
        stamp.write_text(json.dumps(_versions()))
    except Exception as error:  # noqa: BLE001 - what was compiled can fail to load in any way
        return f"{_WORDS}, and that fails on {socket.gethostname()} ({_telling_line(str(error))}); {advice}"
    return None


def missing_tools() -> list[str]:
    """What must be installed on this machine before anything can be compiled, with how."""
    compiler = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++"]
    missing = [words for tool, words in zip((compiler[0], "ninja"), _TOOLS.values(), strict=True) if not _finds(tool)]
    if missing:
        return missing
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return [] if AsyncIOBuilder().is_compatible(verbose=False) else [_LIBAIO]


def _finds(tool: str) -> bool:
    return shutil.which(tool) is not None


def _libraries(folders: list[Path]) -> list[Path]:
    return [folder / f"{folder.name}.so" for folder in folders]


def _versions() -> dict[str, Any]:
    """What the compiled files depend on, besides DeepSpeed's sources."""
    import deepspeed

    settings = {name: os.environ.get(name) for name in ("DS_ACCELERATOR", "CC", "CXX", "CFLAGS", "LDFLAGS")}
    return {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "python": sys.version} | settings


def _is_built(folders: list[Path], stamp: Path) -> bool:
    try:
        return all(path.is_file() for path in _libraries(folders)) and json.loads(stamp.read_text()) == _versions()
    except (OSError, ValueError):
        return False


def build(command: list[str], tell: Tell, libraries: list[Path]) -> str | None:
    """Run `command`, which compiles `libraries`; what it said, where it failed. It goes when this process does."""
    words = f"building DeepSpeed's async_io on {socket.gethostname()} (once on a machine, some minutes)"
    is_told = not all(path.is_file() for path in libraries)
    if is_told:
        tell(words)
    with subprocess.Popen(  # noqa: S603 - ourselves
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that it can end what it has started
    ) as builder:
        try:
            try:
                said, _ = builder.communicate(timeout=None if is_told else _SOON_S)
            except subprocess.TimeoutExpired:
                tell(words)
                said, _ = builder.communicate()
        except BaseException:
            builder.terminate()
            raise
    return said if builder.returncode else None


def _telling_line(said: str) -> str:
    """The one that says most of a compiler's many."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it was killed"]
    return next((line for line in lines if "error:" in line), lines[-1])


def remove_stale_lock(folder: Path, tell: Tell) -> str | None:
    """Remove the file by which PyTorch keeps others away from `folder`, when nobody compiles there any more."""
    lock = folder / "lock"
    seen, is_told = time.monotonic(), False
    while lock.exists():
        now = time.monotonic()
        if is_worked_in(folder):
            seen = now
            if not is_told:
                is_told = True
                tell(f"waiting for another process that compiles in {folder}")
        elif now - seen > _NOBODY_S:
            try:
                if lock.stat().st_uid != os.getuid():  # whose processes cannot be looked at
                    return f"another user compiles in {folder}, or has left {lock}; set TORCH_EXTENSIONS_DIR"
                lock.unlink()
            except FileNotFoundError:  # it is free after all
                return None
            except OSError as error:
                return f"{lock} was left by a compilation that was killed; remove that file ({error.strerror})"
        time.sleep(_LOOK_EVERY_S)
    return None


def is_worked_in(folder: Path) -> bool:
    """Whether a process has `folder` as its working directory, as compilers have."""
    target = str(folder.resolve())
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                if os.readlink(f"{entry.path}/cwd") == target:  # noqa: PTH115 - as a string
                    return True
    return False


def take_along(parent: int) -> None:
    """End this process when `parent` ends, and when it is told to; with everything of the session that it leads."""

    def end(number: int, frame: object) -> None:
        kill_session(os.getpid(), spare=os.getpid())
        raise SystemExit(128 + number)  # so that PyTorch removes its lock

    signal.signal(signal.SIGTERM, end)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it has gone before it could be seen
        raise SystemExit(1)


def main() -> None:
    """Compile what `async_io` needs, for the process of the number that is given."""
    take_along(int(sys.argv[1]))
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001 - a compiler can fail in any way
        print(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
