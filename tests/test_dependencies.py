"""What the package imports is what its installation brings: nothing may come in only through a neighbour."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ASKED_BY_DOCTOR = {"ctranslate2", "rocm-bootstrap"}
"""What `stapes doctor` asks where its owner installed it, and does without elsewhere; nothing else may import it."""


def _name(requirement: str) -> str:
    """The distribution that a requirement names, spelt one way."""
    name = "".join(c if c.isalnum() or c in "-_." else " " for c in requirement).split()[0]
    return name.lower().replace("_", "-").replace(".", "-")


def test_every_import_is_a_declared_dependency() -> None:
    pyproject = ROOT / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("the project's own folder is not at hand")
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {_name(requirement) for group in groups for requirement in group}
    owners = packages_distributions()
    declared.add("markupsafe")  # jinja2 is made of it
    undeclared: set[str] = set()
    for path in sorted((ROOT / "src" / "stapes").rglob("*.py")):
        if path.parent.name == "benchmarks":  # drives other systems, which their owners install
            continue
        brought = declared | ASKED_BY_DOCTOR if path.parent.name == "diagnostics" else declared
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"stapes"}:
                # A module that is not installed here comes from a distribution of its own name.
                if not brought & {_name(owner) for owner in owners.get(module, [module])}:
                    undeclared.add(f"{path.relative_to(ROOT)}: {module}")
    assert not undeclared
