"""Keep freed memory in the process: a step frees and takes the same gigabytes again, and the system charges each page.

Above a size of at most 32 MiB the C library of Linux gives every freed block back to the kernel at once, and takes it
back page by page, each page zeroed. Here blocks up to 256 MiB stay in the heap until 2 GiB lie free at its end.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)
BLOCK, FREE = 1 << 28, (1 << 31) - 1  # bytes: of the largest block that stays, and free at the end of the heap
CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch asks for 2 MiB pages where a tensor is as large; it looks once, early


def keep_freed_memory(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Raise both bounds of this process and let PyTorch ask for large pages; True where the bounds were raised.

    Nothing happens where the user chose (one of CHOSEN_BY_USER is set) or where the C library is not glibc.
    """
    if any(environment.get(name) for name in CHOSEN_BY_USER):
        return False
    environment.setdefault(HUGE_PAGES, "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all([mallopt(MMAP_THRESHOLD, BLOCK) == 1, mallopt(TRIM_THRESHOLD, FREE) == 1])
