"""DeepSpeed's engine inside of a process that is not DeepSpeed's own: what it leaves behind elsewhere is put back."""

import contextlib
import glob
import logging
import os
import shutil
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.parallel.deepspeed_config import Config

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed(device: torch.device) -> Any:
    """The package, set up for this device and for the process group that there is."""
    with environment(DS_ACCELERATOR=device.type), contextlib.redirect_stdout(sys.stderr):
        try:
            import deepspeed
            import deepspeed.comm
        except ImportError as error:
            raise UserError(
                "parallel.strategy: deepspeed needs the DeepSpeed package; install it with: "
                f"pip install 'shoal[deepspeed]' ({error})"
            ) from error
        _speak_of_errors_alone()
        _choose_accelerator(device)
        # With a table of its own extensions that is empty, it neither compiles one for sums in shared memory (a minute,
        # and a C++ compiler) nor looks what it could compile; Gloo and NCCL do without.
        deepspeed.ops.__compatible_ops__ = {}
        try:
            deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)
        finally:
            del deepspeed.ops.__compatible_ops__
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups

    # Of an earlier run in this process: its model, and groups of a process group that is no more.
    parameter_offload.FWD_MODULE_STACK.clear()
    groups._release_process_group_references()
    groups._WORLD_GROUP = dist.group.WORLD
    return deepspeed


def _speak_of_errors_alone() -> None:
    """On stderr: stdout is for what a user asked for."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        # Names that DeepSpeed uses, and that PyTorch 2.13 calls otherwise.
        warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)


def _choose_accelerator(device: torch.device) -> None:
    """It chooses once in a process; a later run may have another device."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() != device.type:
        if device.type == "cuda":
            from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
        else:
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
        set_accelerator(Accelerator())


def check_device(precision: str, device: torch.device) -> None:
    """Raise where DeepSpeed is not installed, or cannot compute in this precision."""
    import_deepspeed(device)
    from deepspeed.accelerator import get_accelerator

    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError(f"train.precision: DeepSpeed has no fp16 on this {device.type}; use bf16 or fp32")


class Surroundings:
    """What DeepSpeed expects of its process while it works, and no longer."""

    def __init__(self, process: Process) -> None:
        index = process.device.index
        self.local_rank = str(process.local_rank if index is None else index)
        self.linear = F.linear
        """What stage 3 puts in place of torch's own, so that gathered weights are not kept for the backward pass."""

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Around the making of an engine."""
        plain = F.linear
        with environment(LOCAL_RANK=self.local_rank), contextlib.redirect_stdout(sys.stderr):
            try:
                yield
            finally:
                self.linear, F.linear = F.linear, plain

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around everything else."""
        plain, before = F.linear, os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = self.local_rank
        F.linear = self.linear
        try:
            yield
        finally:
            F.linear = plain
            if before is None:
                del os.environ["LOCAL_RANK"]
            else:
                os.environ["LOCAL_RANK"] = before


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These variables, and none that is set meanwhile is left."""
    saved = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - saved.keys():
            del os.environ[name]
        os.environ.update(saved)


def build_engine(
    root: nn.Module, optimizer: torch.optim.Optimizer, config: Config, precision: str | None, process: Process
) -> tuple[Any, Surroundings]:
    """An engine around `root`, whose weights are in the host's memory, with what must surround it when it works.

    Args:
        root: Its forward pass is what is differentiated.
        optimizer: Over its parameters.
        config: For DeepSpeed.
        precision: bf16 or fp16, where weights are computed with that.
        process: Which worker this is. Every worker must call this.
    """
    deepspeed = import_deepspeed(process.device)
    surroundings = Surroundings(process)
    with surroundings.building(), _without_broadcasts(deepspeed):
        try:
            deepspeed.DeepSpeedConfig(config)
        except Exception as error:  # an assertion, pydantic's error, its own: all are of what is configured
            words = " ".join(str(error).split())
            raise UserError(f"parallel.deepspeed: DeepSpeed refuses its configuration: {words}") from error
        if config["zero_optimization"]["stage"] == 3:
            # Weight by weight: made by the engine itself, the whole model would be on the device first.
            if precision is not None:
                for parameter in root.parameters():
                    parameter.data = parameter.data.to(_DTYPES[precision])
            deepspeed.zero.Init(module=root, config_dict_or_path=config)
        engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
        for buffers in (module._buffers for module in root.modules()):
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = buffer.to(process.device)
    _ask_once(root)
    return engine, surroundings


def take_weights_of_first(model: nn.Module, process: Process) -> None:
    """Every worker begins with rank 0's."""
    for parameter in model.parameters():
        here = parameter.detach().to(process.device)
        dist.broadcast(here, 0)
        parameter.data.copy_(here)


@contextlib.contextmanager
def _without_broadcasts(deepspeed: Any) -> Iterator[None]:
    """Keep DeepSpeed from sending weights around by itself, which it cannot do with those that are a single number."""

    def divide(init: Any, parameter: nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    engine, init = deepspeed.DeepSpeedEngine, deepspeed.zero.Init
    saved = engine._broadcast_model, init._zero_init_param
    engine._broadcast_model, init._zero_init_param = lambda _: None, divide
    try:
        yield
    finally:
        engine._broadcast_model, init._zero_init_param = saved


def _ask_once(root: nn.Module) -> None:
    """DeepSpeed asks twice for a weight on nvme that both passes need soon, and then trips over its own question."""
    swapper = next((getattr(parameter, "nvme_swapper", None) for parameter in root.parameters()), None)
    if swapper is not None:
        swap_in = swapper.swap_in
        swapper.swap_in = lambda params, *args, **kwargs: swap_in(list(dict.fromkeys(params)), *args, **kwargs)


def choose_nvme_folder(root: Path, rank: int) -> Path:
    """One for this worker alone, which is not made yet; what killed workers of this machine have left goes first."""
    place = _place()
    remove_left_behind(root, place)
    return root / f"{place}-{os.getpid()}-{uuid.uuid4().hex[:12]}-{rank}"


def _place() -> str:
    """Where this process's number is its own: a machine, or a container that may share the machine's name and disk."""
    return f"shoal-{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def remove_left_behind(root: Path, place: str, is_alive: Callable[[int], bool] = _is_alive) -> None:
    """Remove folders of `place` in `root` whose process is no more; a worker that is killed cannot do it itself."""
    for folder in root.glob(f"{glob.escape(place)}-*-*-*"):
        pid = folder.name.removeprefix(f"{place}-").split("-")[0]
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
