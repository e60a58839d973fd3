"""Random numbers that can be saved, restored and derived: what makes a resumed run the same run."""

import random
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """A 64-bit seed from whole numbers: other parts, other seed; the same on every machine and version."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = _mix((value ^ (part & _MASK)) + 0x9E3779B97F4A7C15)
    return value


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_uniforms(seed: int, epoch: int, indices: np.ndarray, num_draws: int) -> np.ndarray:
    """`[len(indices), num_draws]` numbers in [0, 1) that depend on (seed, epoch, sample, draw) and nothing else.

    So a sample is augmented the same way whichever worker, micro-batch or resumed run reads it.
    """
    with np.errstate(over="ignore"):
        value = indices.astype(np.uint64)[:, None] * np.uint64(0xD1342543DE82EF95)
        value = value + np.arange(1, num_draws + 1, dtype=np.uint64)[None, :] * np.uint64(0x9E3779B97F4A7C15)
        value = value ^ np.uint64(derive_seed(seed, epoch))
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return (value >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU and every GPU)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The state of every generator of this process, as plain numbers and byte tensors."""
    version, internal, gauss = random.getstate()
    # The key words go by a dict: the tuple form is NumPy's legacy one, without type information.
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "key": numpy_state["state"]["key"].tolist(),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture_rng` took."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    numpy_state = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": np.array(numpy_state["key"], dtype=np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]), device)


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU alone, leaving the GPU, where dropout draws from, as it is."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


class isolated_rng:  # noqa: N801 - read as a statement: `with isolated_rng(seed):`
    """Inside, Python, NumPy, torch and the GPU that is given draw from `seed`; outside, nothing has moved."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self.seed = seed
        self.gpu = device if device is not None and device.type == "cuda" else None

    def __enter__(self) -> None:
        self._saved = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        seed_host(self.seed)
        if self.gpu is not None:
            self._saved_gpu = torch.cuda.get_rng_state(self.gpu)
            torch.cuda.manual_seed(self.seed)

    def __exit__(self, *exception: object) -> None:
        python_state, numpy_state, torch_state = self._saved
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self._saved_gpu, self.gpu)
