"""The import contracts of pyproject.toml, and proof that each can fail."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter import Contract, output
from importlinter.api import read_configuration
from importlinter.configuration import configure
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract
from importlinter.contracts.protected import ProtectedContract

ROOT = Path(__file__).parents[2]
OPTIONS = read_configuration(str(ROOT / "pyproject.toml"))
CONTRACTS: dict[str, dict[str, Any]] = {options["id"]: options for options in OPTIONS["contracts_options"]}
KINDS: dict[str, type[Contract]] = {
    kind.type_name: kind
    for kind in (ForbiddenContract, IndependenceContract, LayersContract, ProtectedContract)
}

PLANTED = {
    "layers": ("tandem.request", "tandem.generation"),
    "wire": ("tandem.gateway", "tandem.v1.worker_pb2"),
    "transports": ("tandem.transport.inproc", "tandem.transport.ucx"),
    "policies": ("tandem.errors", "time"),  # every policy reaches it, though only indirectly
    "light": ("tandem.errors", "torch"),
    "edges": ("tandem.worker", "grpc"),
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    configure()
    return grimp.build_graph("tandem", include_external_packages=True, cache_dir=None)


def contract(name: str) -> Contract:
    options = {key: value for key, value in CONTRACTS[name].items() if key not in ("id", "name", "type")}
    kind = KINDS[CONTRACTS[name]["type"]]
    return kind(
        name=CONTRACTS[name]["name"], session_options=OPTIONS["session_options"], contract_options=options
    )


@pytest.mark.parametrize("name", CONTRACTS)
def test_imports_keep_the_contract(graph: grimp.ImportGraph, name: str) -> None:
    checked = contract(name)
    result = checked.check(deepcopy(graph), verbose=False)
    if not result.kept:
        output.print_error(checked.name)
        checked.render_broken_contract(result)
        pytest.fail(f"broken: {checked.name}; the chains are printed above")


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_contract_sees_a_planted_import(graph: grimp.ImportGraph, name: str) -> None:
    importer, imported = PLANTED[name]
    planted = deepcopy(graph)
    if imported not in planted.modules:
        planted.add_module(imported, is_squashed=not imported.startswith("tandem"))
    planted.add_import(
        importer=importer, imported=imported, line_number=1, line_contents=f"import {imported}"
    )
    assert not contract(name).check(planted, verbose=False).kept


LOAD_WITHOUT = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "ray", "ucxx", "transformers", "safetensors"}:
            raise ModuleNotFoundError(f"{name} is not to be loaded here")

sys.meta_path.insert(0, Absent())
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        importlib.import_module(found.name)
"""


@pytest.mark.parametrize("package", ["tandem.gateway", "tandem.rpc", "tandem.config"])
def test_it_loads_where_torch_ray_and_ucxx_are_not_installed(package: str) -> None:
    """What import-linter can't see: a library that loads torch behind our back."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT, package], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
