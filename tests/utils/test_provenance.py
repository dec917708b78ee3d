"""The provenance of a record: the commit of the package, and a command without folders."""

import subprocess
from pathlib import Path

import pytest

from idp_tutorial.utils import provenance


def test_a_repository_that_contains_the_package_is_ignored(tmp_path, monkeypatch):
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "files", lambda name: tmp_path)
    assert provenance.git_state.__wrapped__() == dict(commit=None, worktree_clean=None)
    subprocess.run(["git", "add", "__init__.py"], cwd=tmp_path, check=True)
    assert len(provenance.git_state.__wrapped__()["commit"]) == 40


def test_the_commit_of_a_clone_is_recorded():
    root = Path(provenance.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("the package is not in a repository")
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert provenance.git_state.__wrapped__()["commit"] == head.strip()


def test_a_command_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    argv = [
        tmp_path / "idp_run",
        f"--data={tmp_path / 'data'}",
        "--out",
        tmp_path / "a.jsonl",
        "--template",
        "{s1} a=b",
    ]
    monkeypatch.setattr(provenance.sys, "argv", [*map(str, argv), "--shots", "8"])
    assert (
        provenance.format_command_line()
        == "idp_run --data=data --out a.jsonl --template {s1} a=b --shots 8"
    )
