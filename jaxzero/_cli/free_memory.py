"""How much memory of this machine is free."""

import os
from pathlib import Path


def free_host_bytes() -> int | None:
    """Returns what programs can still allocate; None if nobody knows."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {key: rest for key, _, rest in (line.partition(":") for line in lines)}
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
