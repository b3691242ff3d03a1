"""Is there memory for the KV pool? Asked before it is allocated: afterwards the kernel kills instead.

Knows Linux: ``/proc/meminfo`` and the limits of control groups, version 1 and 2. Elsewhere the
answer is None, and None is not taken for "none": the check is then left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.errors import ConfigError

# What the rest of a worker still takes after the pool: activations, transport buffers, the allocator.
HEADROOM_BYTES = 256 << 20
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


def require_kv_memory(
    num_blocks: int, block_bytes: int, available_bytes: int | None, *, headroom_bytes: int = HEADROOM_BYTES
) -> None:
    """Raise `ConfigError` when `num_blocks` blocks do not fit, or there are none. Pure."""
    if num_blocks < 1:
        raise ConfigError(
            f"engine.memory_bytes (TANDEM_ENGINE__MEMORY_BYTES): holds no KV block of {block_bytes} bytes; "
            f"give at least {block_bytes}"
        )
    wanted_bytes = num_blocks * block_bytes
    if available_bytes is None or wanted_bytes + headroom_bytes <= available_bytes:
        return
    fitting = max(0, available_bytes - headroom_bytes) // block_bytes
    cure = (
        f"set engine.num_blocks (TANDEM_ENGINE__NUM_BLOCKS) to at most {fitting}, or free memory"
        if fitting
        else "not one block fits: free memory, or take a smaller model or engine.block_size_tokens"
    )
    raise ConfigError(
        f"no free memory for the KV pool: {num_blocks} blocks take {_mib(wanted_bytes)} and "
        f"{_mib(headroom_bytes)} must stay for the rest, but {_mib(available_bytes)} are available; {cure}"
    )


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still take, by the tightest of all limits; None where unknown."""
    known = list(_machine_bytes(proc))
    for folder in _cgroup_folders(proc, cgroups):
        known.extend(_cgroup_bytes(folder))
    return min(known) if known else None


def _machine_bytes(proc: Path) -> Iterator[int]:
    for line in (_read(proc / "meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """This process's groups and all above them: a parent's limit holds for its children."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / "memory" if controllers else cgroups
        # In a container the path is often that of the host, and only the root can be seen.
        relative = Path(path.lstrip("/"))
        yield from (root / part for part in (relative, *relative.parents))


def _cgroup_bytes(folder: Path) -> Iterator[int]:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit is None or usage is None or limit.strip() == "max":
            continue
        limit_bytes = int(limit)
        if limit_bytes < _UNLIMITED_BYTES:
            # The kernel gives up cached file pages before it kills, so they count as free.
            reclaimable = _stat_bytes(folder / "memory.stat", cache_name)
            yield max(0, limit_bytes - max(0, int(usage) - reclaimable))


def _stat_bytes(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
