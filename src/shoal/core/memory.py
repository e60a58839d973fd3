"""The memory of a process that trains on the CPU."""

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 32 << 20
"""The most that every glibc takes; what is larger still comes from the kernel and goes back to it."""


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next step instead of giving it back: True if it does.

    Every step frees its tensors and asks for the same again. By default the memory goes back to the kernel and comes
    anew, page by page and zeroed, which costs a few percent of a step on the CPU. The price: the process stays at its
    peak, and tensors of ever other sizes may leave gaps in it. For the whole process, and for good; settings of the
    user's own stand.
    """
    has_own = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if has_own or mallopt is None:  # None: not glibc
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _LARGEST), mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)])
