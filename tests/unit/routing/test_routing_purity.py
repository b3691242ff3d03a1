"""Policies touch no I/O, time or chance, even indirectly: that is what lets a simulation replay them."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys
import typing, dataclasses, enum, collections.abc, hashlib, contextlib, math, __future__
before = set(sys.modules)
import tandem.routing.router, tandem.routing.admission
new = set(sys.modules) - before
bad = {"asyncio", "random", "redis", "torch", "grpc", "ray", "ucxx", "socket", "subprocess"} & new
assert not bad, bad
"""


def test_routing_pulls_in_no_io() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True, timeout=60)
