"""Files that survive kills, power cuts, full disks, damage, and two processes at once.

Everything that the package writes goes through this module.

A file is replaced in three steps: the new content is written beside it under a unique name,
brought to the disk, and renamed. The folder is brought to the disk too, so that after a power
cut either the old file or the new one is there. A reader never sees half a file. What is read
again is compared with a digest: that of a line of records (`utils.records`), or that of a file in
the manifest of its folder (`utils.digests`).

Two commands that write the same file of records would write every record twice, and of two
checkpoints in one folder the later one would win. So every writer takes a lock first. The
operating system releases it when the process ends, however it ends, so the lock file of a killed
process blocks nobody. A second file names the process that holds the lock. On a file system
without such locks, `filelock` writes the process and the host into the file, and removes it when
that process is gone.
"""

import glob
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from idp_tutorial.utils.checks import UserError

logger = logging.getLogger(__name__)


def cache_folder(
    folder: Path | str | None = None,  # None: `$IDP_CACHE`, or `~/.cache/idp_tutorial`
) -> Path:
    """Return the folder of all caches."""
    default = os.environ.get("IDP_CACHE") or Path.home() / ".cache/idp_tutorial"
    return Path(folder or default).expanduser()


# --- whole files


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):  # Windows does it by itself
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into_place(source: Path, destination: Path) -> None:
    """Move a file or folder to its final name after all its data is on the disk.

    So a file or folder with the final name is always complete.
    """
    for path in [*source.rglob("*"), source]:
        _sync(path)
    os.replace(source, destination)
    _sync(destination.parent)


def refuse_pipe(
    file: Path,  # a file that this package writes or reads; it may be missing
) -> Path:  # `file`
    """Return a file, unless a pipe or a device is in its place.

    A pipe may never end, and a device may keep nothing. Those below `/dev` are accepted, such as
    the pipes of a shell: `--out >(command)`.

    Raises: `UserError` for another pipe or device, or a link to one.
    """
    is_special = file.exists() and not (file.is_file() or file.is_dir())
    if is_special and not str(file.absolute()).startswith("/dev/"):
        raise UserError(f"{file} is a pipe or a device, in the place of a file: remove it.")
    return file


@cache
def _process_space() -> str:  # four hexadecimal digits
    """Return a name of this host and of its process ids, which a container has of its own."""
    space = ""
    with suppress(OSError, AttributeError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(f"{socket.gethostname()} {space}".encode(), digest_size=2).hexdigest()


def _is_process_gone(tag: str) -> bool:
    """Return whether the process of a part file, `PID-HOSTXXXX`, is known to have ended."""
    pid, _, rest = tag.partition("-")
    if os.name != "posix" or not rest.startswith(_process_space()) or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass
    return False


@contextmanager
def open_atomically(
    file: Path | str,  # the file to write; a link is followed
    mode: str = "wb",  # 'wb' or 'w'
    **open_kwargs: Any,  # further arguments of `open`
) -> Iterator[IO]:  # an open file
    """Open a file that replaces the old one when the block ends without an error."""
    file = refuse_pipe(Path(file))
    if file.exists() and not file.is_file():  # a pipe or a device cannot be replaced
        with open(file, mode, **open_kwargs) as f:
            yield f
        return
    file = Path(os.path.realpath(file))
    remove_stale_part_files(file.parent, file.name)
    tag = f"{os.getpid()}-{_process_space()}{secrets.token_hex(2)}"
    part = file.with_name(f".{file.name[:40]}.{tag}.part")
    try:
        with open(part, mode.replace("w", "x"), **open_kwargs) as f:
            yield f
        move_into_place(part, file)
    except BaseException as e:
        with suppress(OSError):
            part.unlink()
        if isinstance(e, OSError) and str(e.filename) == str(part):
            e.filename = str(file)  # the message names the file that the user knows
        raise


def write_atomically(
    file: Path | str,  # the file to write; a link is followed
    data: bytes,  # its content
) -> None:
    """Write a file as a whole, or leave the old one unchanged."""
    with open_atomically(file) as f:
        f.write(data)


def remove_stale_part_files(
    folder: Path,
    name: str = "",  # file whose part files are removed; '': all part files of the folder
) -> None:
    """Remove incomplete files of killed processes, which are named by `open_atomically`.

    A process on another host may be alive, so its files are kept for an hour.
    """
    stem = glob.escape(name[:40]) if name else "*"
    for part in folder.glob(f".{stem}.[0-9]*-????????.part"):
        with suppress(FileNotFoundError):  # another process may have removed it
            is_old = time.time() - part.stat().st_mtime > 3600
            if is_old or _is_process_gone(part.name.split(".")[-2]):
                part.unlink()


# --- locks

_HELD_LOCKS: dict[tuple[str, int, int], FileLock] = {}  # (lock file, process, thread): lock


def _describe_this_process() -> str:
    """Return the process id, host, command and time, for the message of a waiting process."""
    command = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    started = time.strftime("%d %B %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} ({command}), since {started}"


@contextmanager
def folder_lock(
    folder: Path | str | None,  # created if needed; None: no lock is taken
    name: str = "",  # file in the folder that is written; '': the whole folder
    wait: bool = False,  # wait for the process that holds the lock, instead of an error
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
        lock.acquire(timeout=1 if wait else 0)
    except Timeout:
        holder = "another process"
        with suppress(OSError, UnicodeDecodeError):
            holder = refuse_pipe(note).read_text(encoding="utf-8") or holder
        if not wait:
            raise UserError(
                f"{target} is in use by {holder}: wait until it ends, or use another output folder."
            ) from None
        logger.info(f"waiting for {holder}, which is writing to {target}")
        lock.acquire()
    _HELD_LOCKS[key] = lock
    try:
        refuse_pipe(note).write_text(_describe_this_process(), encoding="utf-8")
        remove_stale_part_files(folder, name)
        yield
    finally:
        del _HELD_LOCKS[key]
        note.unlink(missing_ok=True)
        lock.release()


def file_lock(
    file: Path | str | None,  # the file that is written; None: no lock is taken
    wait: bool = False,  # as for `folder_lock`
) -> AbstractContextManager[None]:
    """Lock one file of a folder in which other files may be written meanwhile."""
    if file is None:
        return folder_lock(None)
    return folder_lock(Path(file).parent, Path(file).name, wait)


# --- lines of records


def complete_lines(data: bytes) -> bytes:
    """Return the lines of a JSONL file, without a last one that is incomplete."""
    start = data.rfind(b"\n") + 1
    if not data[start:]:
        return data
    try:
        json.loads(data[start:])
    except ValueError:
        return data[:start]
    return data + b"\n"


def append_line(file: Path, line: str) -> None:
    """Append a line to a file, which is replaced as a whole; other processes wait."""
    # a lock of its own: that of the whole file may be held for hours
    with folder_lock(file.parent, file.name + "-end", wait=True):
        earlier = complete_lines(file.read_bytes()) if file.is_file() else b""
        write_atomically(file, earlier + line.encode() + b"\n")
