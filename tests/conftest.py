"""For all tests: fast ones first, and one thread a process.

Tiny models gain nothing from more threads, and several engines in one process fight over them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

_ORDER = ("architecture", "unit", "contract", "transcripts", "faults", "integration", "exactness", "cluster")
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder; the order within a folder stays."""
    items.sort(key=lambda item: _ORDER.index(item.path.relative_to(_TESTS).parts[0]))
