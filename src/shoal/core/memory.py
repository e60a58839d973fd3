"""The memory of a process that trains on the CPU."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next step instead of giving it back: True if it does.

    Every step frees its tensors and asks for the same again. By default the large ones come fresh from the kernel each
    time, page by page and zeroed, which costs a few percent of a step on the CPU. The most that the process ever needs
    stays the same. For the whole process, and for good.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
