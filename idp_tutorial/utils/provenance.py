"""Which code, command and machine made a record.

A record says which code made it, with which command and on which machine: the commit and
whether it was clean, the processor, the GPU if one was used, the number of threads, the start time
and the seconds. A machine is named by its processor and GPU only, a file by its last path
component.
"""

import os
import platform
import subprocess
import sys
import time
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch

__all__ = [
    "git_state",
    "processor_name",
    "gpu_name",
    "format_command_line",
    "collect_provenance",
]


def _run_git(*arguments: str) -> str | None:
    """Return the output of a git command in the folder of the package; None if it fails."""
    folder = str(files("idp_tutorial"))
    result = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20
    )
    return result.stdout.strip() if result.returncode == 0 else None


@cache
def git_state() -> dict:  # `commit` and `worktree_clean`; both are None outside of a repository
    """Return the commit of the package, and whether its files are unchanged since."""
    unknown = dict(commit=None, worktree_clean=None)
    try:
        # the package may be installed inside a repository that does not track it
        is_tracked = _run_git("ls-files", "--error-unmatch", "__init__.py")
        commit = _run_git("rev-parse", "HEAD") if is_tracked else None
        if commit is None:
            return unknown
        is_clean = _run_git("status", "--porcelain", "--", ".") == ""
        return dict(commit=commit, worktree_clean=is_clean)
    except (OSError, subprocess.TimeoutExpired):
        return unknown


@cache
def processor_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(l.split(":", 1)[1].strip() for l in lines if l.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _shorten_paths(argument: str) -> str:
    """Return an argument with only the last component of a path, also in `--data=PATH`."""
    option, equals, value = (
        argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    )
    return option + equals + (Path(value).name if os.sep in value else value)


def format_command_line() -> str:
    """Return the command line of this process, with only the last component of each path."""
    return " ".join(_shorten_paths(argument) for argument in sys.argv)


def gpu_name() -> str | None:
    """Return the name of the GPU that this process has used, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None


def collect_provenance(
    start_time: float,  # `time.time()` when the run started
    threads: int,  # number of threads that the run used
) -> dict:
    """Return the code, command, processor, start time and seconds of a run, for its record."""
    return dict(
        command=format_command_line(),
        **git_state(),
        processor=processor_name(),
        **({"gpu": gpu} if (gpu := gpu_name()) else {}),
        threads=threads,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start_time)),
        seconds=round(time.time() - start_time, 1),
    )
