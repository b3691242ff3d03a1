from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.memory import available_memory_bytes, require_kv_memory
from tandem.errors import ConfigError

MIB = 1 << 20


def machine(root: Path, *, meminfo_mib: int | None, cgroup: str = "0::/") -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    if meminfo_mib is not None:
        (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {meminfo_mib * 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup + "\n")
    return proc, cgroups


def group(folder: Path, limit: str, usage_mib: int, cached_mib: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached_mib * MIB}\n")


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, meminfo_mib=1000)
    group(cgroups, "max", 10)
    assert available_memory_bytes(proc, cgroups) == 1000 * MIB


def test_a_containers_limit_is_tighter_and_cached_pages_count_as_free(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, meminfo_mib=1000)
    group(cgroups, str(600 * MIB), 200, cached_mib=50)
    assert available_memory_bytes(proc, cgroups) == 450 * MIB


def test_a_parents_limit_holds_for_its_children(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, meminfo_mib=1000, cgroup="0::/pods/one")
    group(cgroups / "pods" / "one", "max", 1)
    group(cgroups / "pods", str(300 * MIB), 100)
    assert available_memory_bytes(proc, cgroups) == 200 * MIB


def test_version_one_groups_are_read_and_their_no_limit_number_is_none(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, meminfo_mib=1000, cgroup="4:memory:/job\n1:cpu:/job")
    group(cgroups / "memory", "9223372036854771712", 1, version=1)
    group(cgroups / "memory" / "job", str(500 * MIB), 400, version=1)
    assert available_memory_bytes(proc, cgroups) == 100 * MIB


def test_a_group_over_its_limit_leaves_nothing_not_less(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, meminfo_mib=1000)
    group(cgroups, str(100 * MIB), 120)
    assert available_memory_bytes(proc, cgroups) == 0


def test_where_nothing_is_known_the_answer_is_none_and_the_check_is_left_out(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") is None
    require_kv_memory(10**9, MIB, None)


def test_this_machine_has_memory() -> None:
    found = available_memory_bytes()
    assert found is None or found > 0


def test_no_free_memory_names_the_setting_and_the_largest_that_fits() -> None:
    require_kv_memory(50, MIB, 150 * MIB, headroom_bytes=100 * MIB)
    with pytest.raises(ConfigError) as caught:
        require_kv_memory(51, MIB, 150 * MIB, headroom_bytes=100 * MIB)
    message = str(caught.value)
    for part in ("no free memory", "51 blocks", "TANDEM_ENGINE__NUM_BLOCKS", "at most 50"):
        assert part in message


def test_when_not_one_block_fits_the_cure_is_another() -> None:
    with pytest.raises(ConfigError, match="not one block fits: free memory"):
        require_kv_memory(5, MIB, MIB // 2, headroom_bytes=0)


def test_a_pool_smaller_than_a_block_is_refused_even_where_memory_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_ENGINE__MEMORY_BYTES.*at least 1048576"):
        require_kv_memory(0, MIB, None)
