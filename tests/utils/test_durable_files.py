"""Durable files: whole or not at all, locks, and lines that are appended."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from idp_tutorial.utils import durable_files
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.durable_files import (
    append_line,
    cache_folder,
    complete_lines,
    file_lock,
    folder_lock,
    move_into_place,
    open_atomically,
    write_atomically,
)
from idp_tutorial.utils.records import read_existing_records
from idp_tutorial.utils.tensor_files import read_last_snapshot


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_cache_is_below_the_environment_variable_unless_a_folder_is_given(monkeypatch):
    monkeypatch.setenv("IDP_CACHE", "~/there")
    assert cache_folder() == cache_folder("~/there") != cache_folder("other")
    monkeypatch.delenv("IDP_CACHE")
    assert cache_folder().parts[-2:] == (".cache", "idp_tutorial")


# --- whole files


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=str)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(error, tmp_path):
    file = tmp_path / "file"
    write_atomically(file, b"old")
    with pytest.raises(type(error)), open_atomically(file) as f:
        f.write(b"ne")
        raise error
    assert file.read_bytes() == b"old" and names(tmp_path) == ["file"]
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new" and names(tmp_path) == ["file"]


def test_content_and_folder_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    calls = []
    replace = os.replace
    monkeypatch.setattr(durable_files, "_sync", lambda path: calls.append(path.suffix or path.name))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "file", b"x")
    assert calls == [".part", "rename", tmp_path.name]
    calls.clear()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/a.bin").touch()
    move_into_place(tmp_path / "new", tmp_path / "model")
    assert calls == [".bin", "new", "rename", tmp_path.name] and (tmp_path / "model/a.bin").exists()


def test_the_error_of_a_full_disk_names_the_file_and_not_its_temporary_name(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", source)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError) as e:
        write_atomically(tmp_path / "file", b"x")
    assert e.value.filename == str(tmp_path / "file") and not names(tmp_path)


def test_a_link_is_followed_and_a_device_is_written_directly(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"x"
    write_atomically("/dev/null", b"x")


def test_a_link_to_a_device_is_refused(tmp_path):
    """What is written through it is lost, so a saved model or a record would be missing."""
    (tmp_path / "file").symlink_to(os.devnull)
    with pytest.raises(UserError, match="is a pipe or a device, in the place of a file"):
        write_atomically(tmp_path / "file", b"x")
    with pytest.raises(UserError, match="is a pipe or a device, in the place of a file"):
        append_line(tmp_path / "file", "{}")
    assert (tmp_path / "file").is_symlink()


@pytest.fixture
def pipe(tmp_path):
    """Return a pipe that no process reads or writes."""
    os.mkfifo(tmp_path / "file")
    return tmp_path / "file"


WRITERS = {
    "a whole file": lambda pipe: write_atomically(pipe, b"x"),
    "a line": lambda pipe: append_line(pipe, "{}"),
    "the note of a lock": lambda pipe: take_lock(pipe.rename(pipe.parent / ".a.lock-by")),
}
READERS = {
    "records": read_existing_records,
    "a snapshot": lambda pipe: read_last_snapshot(
        pipe.rename(pipe.parent / "checkpoint-3.safetensors").parent
    ),
}


def take_lock(pipe):
    with file_lock(pipe.parent / "a"):
        pass


@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(name, pipe):
    with pytest.raises(UserError, match="is a pipe or a device, in the place of a file: remove it"):
        (WRITERS | READERS)[name](pipe)


def test_a_pipe_of_a_shell_is_written():
    """As a shell makes one of `--out >(command)`."""
    data = b"x" * 300_000  # more than a pipe holds
    received = []
    read_end, write_end = os.pipe()

    def receive():
        with open(read_end, "rb") as f:
            received.append(f.read())

    reader = threading.Thread(target=receive)
    reader.start()
    write_atomically(f"/dev/fd/{write_end}", data)
    os.close(write_end)
    reader.join()
    assert received == [data]


KILLED = """
import os, sys
from idp_tutorial.utils.durable_files import open_atomically
with open_atomically(sys.argv[1]) as f:
    f.write(b"half")
    f.flush()
    os.kill(os.getpid(), 9)
"""


def test_the_part_file_of_a_killed_process_is_removed_by_the_next_writer(tmp_path):
    file = tmp_path / "answers.csv"
    subprocess.run([sys.executable, "-c", KILLED, file])
    (part,) = names(tmp_path)
    assert part.startswith(".answers.csv.") and part.endswith(".part")
    write_atomically(tmp_path / "other", b"x")
    assert part in names(tmp_path)
    write_atomically(file, b"x")
    assert names(tmp_path) == ["answers.csv", "other"]


def test_the_part_file_of_a_process_that_may_run_is_kept(tmp_path):
    with open_atomically(tmp_path / "a") as f, open_atomically(tmp_path / "a") as g:
        f.write(b"1")
        g.write(b"2")
        elsewhere = tmp_path / f".a.{2**22}-00000000.part"  # of another host
        if not elsewhere.name.split("-")[1].startswith(durable_files._process_space()):
            elsewhere.touch()
            write_atomically(tmp_path / "a", b"3")
            assert elsewhere.exists()
    assert (tmp_path / "a").read_bytes() == b"1"


# --- locks

HOLD = """
import sys, time
from idp_tutorial.utils.durable_files import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_refuses_another_process_until_that_process_is_killed(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        holder = f"is in use by process {other.pid} on "
        with pytest.raises(UserError, match=holder), folder_lock(tmp_path):
            pass
        with file_lock(tmp_path / "records.jsonl"):  # a file has a lock of its own
            pass
    finally:
        other.kill()
        other.communicate()
    with folder_lock(tmp_path), folder_lock(tmp_path):  # the same thread may take it again
        pass


def test_a_lock_removes_abandoned_part_files_of_its_own_file_only(tmp_path, monkeypatch):
    long = 50 * "a"
    names = [
        f".{name[:40]}.123-0123abcd.part"
        for name in (long, "compare", "compare-2.jsonl", "compare.jsonl")
    ]

    def remaining_files():
        return [name for name in names if (tmp_path / name).exists()]

    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    with file_lock(tmp_path / long):
        assert remaining_files() == names[1:]
    with file_lock(tmp_path / "compare"):
        assert remaining_files() == names[2:]
    monkeypatch.setattr(
        type(tmp_path), "glob", lambda self, pattern: [tmp_path / ".gone.123-0123abcd.part"]
    )
    with folder_lock(tmp_path):  # another process was quicker
        pass
    monkeypatch.undo()
    with folder_lock(tmp_path):
        assert remaining_files() == []


# --- lines


@pytest.mark.parametrize(
    "end, repaired", [('{"b"', '{"a": 1}\n'), ('{"b": 2}', '{"a": 1}\n{"b": 2}\n')]
)
def test_an_incomplete_last_line_is_removed_and_a_complete_one_is_ended(end, repaired, tmp_path):
    file = tmp_path / "records.jsonl"
    assert complete_lines(f'{{"a": 1}}\n{end}'.encode()) == repaired.encode()
    file.write_text('{"a": 1}\n' + end)
    append_line(file, '{"c": 3}')
    assert file.read_text() == repaired + '{"c": 3}\n'


def test_a_lock_of_a_folder_leaves_part_files_of_other_programs(tmp_path):
    names = [".film.mkv.part", ".file.123-0123abcd.part", ".file.1-0123abcd.part.part"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    with folder_lock(tmp_path):
        assert [name for name in names if (tmp_path / name).exists()] == [names[0], names[2]]


def test_a_line_that_cannot_be_written_leaves_the_file(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    append_line(file, "{}")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        append_line(file, "{}")
    assert file.read_text() == "{}\n"
