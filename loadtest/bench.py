"""``make bench``: every benchmark, one after the other, beside what it is compared with."""

from __future__ import annotations

import os
import platform

import bench_disaggregation
import bench_engine
import bench_transfer
from rich.console import Console


def main() -> None:
    """Nothing else should run meanwhile: all compare on the same cores."""
    console = Console()
    console.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    for benchmark in (bench_engine, bench_transfer, bench_disaggregation):
        benchmark.run(console)
        console.print()


if __name__ == "__main__":
    main()
