"""Durable files: whole or not at all, locks, and lines that are appended."""

import errno
import os
import subprocess
import sys

import pytest

from idp_tutorial.utils import durable_files
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.durable_files import (
    append_line,
    cache_folder,
    file_lock,
    folder_lock,
    move_into_place,
    open_atomically,
    repair_last_line,
    write_atomically,
)


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
    with pytest.raises(UserError, match="is a link to a device, which keeps nothing"):
        write_atomically(tmp_path / "file", b"x")
    with pytest.raises(UserError, match="is a link to a device, which keeps nothing"):
        append_line(tmp_path / "file", "{}")
    assert (tmp_path / "file").is_symlink()


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
    file.write_text('{"a": 1}\n' + end)
    repair_last_line(file)
    assert file.read_text() == repaired
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


def test_of_a_complete_file_only_the_last_byte_is_read(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    monkeypatch.setattr(type(file), "read_bytes", lambda self: pytest.fail("read as a whole"))
    append_line(file, "{}")
    assert file.read_text() == "{}\n{}\n"
