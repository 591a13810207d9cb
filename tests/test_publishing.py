"""The files that build and publish: the workflows, which only their host runs, and the image of a container."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Permissions that publish, and the action that each is for.
PUBLISHING = {"id-token": ("pypa/gh-action-pypi-publish", "actions/deploy-pages"), "pages": ("actions/deploy-pages",)}


def commands_of_dev() -> set[str]:
    """The commands of dev.py, without running it."""
    for node in ast.parse((ROOT / "dev.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError("dev.py has no COMMANDS")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_a_workflow_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"\bdev\.py (\w+)", text)) <= commands_of_dev()
    files = re.findall(r"(?:python3|bash) ([\w./]+/[\w./]+)", text) + re.findall(r"uses: \./(\S+)", text)
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_one(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    triggers = workflow[True]  # YAML reads "on" so
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "jobs"}
    assert set(triggers) <= {"push", "pull_request", "schedule", "workflow_call", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    jobs: dict[str, dict[str, Any]] = workflow["jobs"]
    for job in jobs.values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= jobs.keys()
        if "uses" in job:  # a workflow of the project
            called: dict[Any, Any] = yaml.safe_load((ROOT / job["uses"]).read_text(encoding="utf-8"))
            assert "workflow_call" in called[True]
            continue
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w.-]+/[\w./-]+@[\w./-]+", action) for action in actions)
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        for permission in job.get("permissions", {}):
            assert any(action.startswith(PUBLISHING[permission]) for action in actions), "only the jobs that publish"


def test_image_runs_a_command_of_the_package_as_an_ordinary_user() -> None:
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM ")) :]
    (user,) = (line.split()[1] for line in last if line.startswith("USER "))
    assert user != "root"
    assert any(line.startswith("RUN useradd") and line.split()[-1] == user for line in last)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert last[-2:] == [f'ENTRYPOINT ["{next(iter(scripts))}"]', 'CMD ["demo"]']
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
