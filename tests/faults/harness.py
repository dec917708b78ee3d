"""Faults on purpose in the file operations of a work.

The n-th operation is killed, half done or refused; files are flipped, cut and swapped; two
processes meet, one of them paused. A work runs in a forked process, so that a kill costs no import.
"""

import builtins
import io
import lzma
import os
import random
import signal
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from idp_tutorial.utils.checks import UserError

REFUSALS = UserError, OSError, lzma.LZMAError, EOFError  # errors that a command prints as one line
COUNTED = "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync", "utime"


class Written:
    """A file whose writes are counted as file operations."""

    def __init__(self, file, faults):
        self.file = file
        self.faults = faults

    def write(self, data):
        def half():
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        path = os.path.abspath(self.file.name)
        self.faults.loose.setdefault(path, os.path.getsize(path))
        return self.faults.operation(lambda: self.file.write(data), half)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


class Faults:
    """A counter of the operations on files below a folder, with a fault at one of them."""

    def __init__(self, folder, position=0, kind="count"):
        self.folder = str(folder)
        self.position = position
        self.kind = kind
        self.n = 0
        self.loose = {}  # file that has not reached the disk: bytes of it that have
        self.moved = {}  # name that has not reached the disk: its old name and content

    def operation(self, do, half=None):
        self.n += 1
        if self.n != self.position:
            return do()
        if self.kind == "kill":
            os._exit(9)
        if self.kind == "power":
            try:
                do()
            finally:
                self.lose()
                os._exit(9)
        if self.kind == "half":  # of a write the first half; of anything else all, and then no more
            try:
                (half or do)()
            finally:  # a folder may have been there
                os._exit(9)
        if self.kind == "refuse":
            raise OSError(28, "No space left on device")
        if self.kind == "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        return do()

    def reached(self, fd):
        """Note that a file's content, or a folder's names, have reached the disk."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.loose.pop(path, None)
        self.moved = {k: v for k, v in self.moved.items() if os.path.dirname(k) != path}

    def moving(self, a, b):
        """Note what a rename replaces."""
        a = os.path.abspath(a)
        b = os.path.abspath(b)
        self.moved.setdefault(b, (a, Path(b).read_bytes() if os.path.isfile(b) else None))
        for was in [w for w in self.loose if w == a or w.startswith(a + "/")]:
            self.loose[b + was[len(a) :]] = self.loose.pop(was)

    def lose(self):
        """Simulate a power cut: cut content that has not reached the disk, and undo renames."""
        self.kind = "count"  # these operations are not counted as the work's
        for file, size in self.loose.items():
            if os.path.isfile(file):
                os.truncate(file, (size + os.path.getsize(file)) // 2)
        for b, (a, old) in reversed(self.moved.items()):
            if os.path.exists(b) and not os.path.exists(a):
                os.rename(b, a)
            if old is not None:
                Path(b).write_bytes(old)

    def _is_below_folder(self, path):
        return isinstance(path, int) or str(os.path.abspath(path)).startswith(self.folder)

    def _count_calls(self, name, function):
        """Return a function of `os` whose calls are counted."""

        def call(path, *args, **kwargs):
            if not self._is_below_folder(path):
                return function(path, *args, **kwargs)

            def do():
                if self.kind == "power" and name in ("rename", "replace"):
                    self.moving(path, args[0])
                function(path, *args, **kwargs)
                if self.kind == "power" and name == "fsync":
                    self.reached(path)

            return self.operation(do)

        return call

    def _count_opened_files(self, plain_open):
        """Return `open` with files whose writes are counted."""

        def open_counted(path, mode="r", *args, **kwargs):
            is_path = isinstance(path, (str, os.PathLike))
            if not is_path or not set(mode) & set("wax+") or not self._is_below_folder(path):
                return plain_open(path, mode, *args, **kwargs)
            return Written(self.operation(lambda: plain_open(path, mode, *args, **kwargs)), self)

        return open_counted

    @contextmanager
    def __call__(self):
        functions = {name: getattr(os, name) for name in COUNTED}
        plain_open = io.open
        for name, function in functions.items():
            setattr(os, name, self._count_calls(name, function))
        io.open = builtins.open = self._count_opened_files(plain_open)
        try:
            yield self
        finally:
            io.open = builtins.open = plain_open
            for name, function in functions.items():
                setattr(os, name, function)


def start(work, folder, faults=None):
    """Run `work(folder)` in a process, and return its id.

    Exit status: 0 done, 2 refused, 9 killed, 1 unexpected.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with (faults or Faults(folder))() as f:
            work(folder)
        if f.kind == "count" and f.position < 0:  # `operations` needs the number
            (Path(folder).parent / "operations").write_text(str(f.n))
        code = 0
    except Exception as e:
        code = 2 if isinstance(e, REFUSALS) else code
        (Path(folder).parent / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def end(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def operations(work, folder):
    """Return the number of file operations of an unbroken work."""
    code = end(start(work, folder, Faults(folder, -1)))
    error = Path(folder).parent / "error"
    assert code == 0, f"exit status {code}: {error.read_text() if error.exists() else ''}"
    return int((Path(folder).parent / "operations").read_text())


def damages(data, n, seed, others=()):
    """Yield damaged contents: flipped bits, cut ends, or the content of another file."""
    rng = random.Random(seed)
    for i in range(n):
        kind = ("flip", "cut", "swap", "flip", "flip")[i % 5]
        if kind == "swap" and others:
            yield kind, rng.choice(others)
        elif kind == "cut":
            yield kind, data[: rng.randrange(len(data))]
        else:
            position = rng.randrange(len(data))
            flipped = bytes([data[position] ^ 1 << rng.randrange(8)])
            yield "flip", data[:position] + flipped + data[position + 1 :]


def pair(work, folder, operation):
    """Run a process that pauses at an operation, and a second one; return both exit statuses."""
    first = start(work, folder, Faults(folder, operation, "pause"))
    stopped = os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
    second = start(work, folder)
    done = None
    until = time.time() + 1.5
    while done is None and time.time() < until:  # it ends, or it waits
        pid, status = os.waitpid(second, os.WNOHANG)
        done = os.waitstatus_to_exitcode(status) if pid else None
        time.sleep(0.01)
    if stopped:
        os.kill(first, signal.SIGCONT)
    return end(first) if stopped else 0, end(second) if done is None else done
