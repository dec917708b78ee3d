"""Locks on folders and files, so that only one process at a time writes to them.

Two commands that write the same file of records would write every record twice, and of two
checkpoints in one folder the later one would win. So every writer takes a lock first.

A lock is a file that the operating system lets one process hold at a time. It is released when
the process ends, however it ends, so the lock file of a killed process blocks nobody. A second
file names the process that holds the lock. On a file system without such locks, `filelock`
writes the process and the host into the file, and removes it when that process is gone.
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from idp_tutorial.utils.checks import UserError

__all__ = ["folder_lock", "file_lock"]


_HELD_LOCKS: dict[tuple[str, int, int], FileLock] = {}  # (lock file, process, thread): lock


def _describe_this_process() -> str:
    """Return the process id, host, command and time, for the message of a waiting process."""
    command = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    started = time.strftime("%d %B %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} ({command}), since {started}"


def _read_lock_holder(note: Path) -> str:
    """Return the description of the process that holds the lock, as far as it is known."""
    try:
        return note.read_text(encoding="utf-8") or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"


def _remove_stale_part_files(folder: Path, name: str) -> None:
    """Remove incomplete files of killed processes, which are named by `open_atomically`."""
    pattern = rf"\.{re.escape(name[:40])}\.\d+-[0-9a-f]{{8}}\.part" if name else r"\..*\.part"
    for part in folder.glob(".*.part"):
        if not re.fullmatch(pattern, part.name, re.DOTALL):
            continue
        with suppress(FileNotFoundError):  # another process may have removed it
            if time.time() - part.stat().st_mtime > 3600:
                part.unlink()


@contextmanager
def folder_lock(
    folder: Path | str | None,  # created if needed; None: no lock is taken
    name: str = "",  # file in the folder that is written; '': the whole folder
    wait: bool = False,  # wait for the process that holds the lock, instead of an error
    report: Callable[[str], Any] | None = None,  # called with a line of text before waiting
) -> Iterator[None]:
    """Lock a folder, or a file in it, against other processes while the block runs.

    Raises: `UserError` that names the process which holds the lock, unless `wait` is set.
    """
    if folder is None:
        yield
        return
    folder = Path(os.path.realpath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    lock_file = folder / f"{'.' if name else ''}{name[:100]}.lock"
    target = folder / name
    key = str(lock_file), os.getpid(), threading.get_ident()
    if key in _HELD_LOCKS:
        yield
        return
    lock = FileLock(lock_file)
    note = lock_file.with_name(lock_file.name + "-by")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise UserError(
                f"{target} is in use by {_read_lock_holder(note)}: wait until it ends, or use "
                "another output folder."
            ) from None
        if report:
            report(f"waiting for {_read_lock_holder(note)}, which is writing to {target}")
        lock.acquire()
    _HELD_LOCKS[key] = lock
    try:
        note.write_text(_describe_this_process(), encoding="utf-8")
        _remove_stale_part_files(folder, name)
        yield
    finally:
        del _HELD_LOCKS[key]
        note.unlink(missing_ok=True)
        lock.release()


def file_lock(
    file: Path | str | None,  # the file that is written; None: no lock is taken
    **kwargs: Any,  # `wait` and `report` of `folder_lock`
) -> AbstractContextManager[None]:
    """Lock one file of a folder in which other files may be written meanwhile."""
    if file is None:
        return folder_lock(None)
    return folder_lock(Path(file).parent, Path(file).name, **kwargs)
