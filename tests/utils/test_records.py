"""Files of records: damaged lines, and paths that are stored without their folders.

The provenance of a record: the commit of the package, and a command without folders.
"""

import subprocess
import time
from pathlib import Path

import pytest
from small import config

from idp_tutorial.utils import records
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import (
    config_to_record,
    dump_record,
    load_record,
)


def test_a_damaged_record_file_is_refused_and_a_cut_line_left_out(tmp_path):
    out = tmp_path / "r.jsonl"
    out.write_text('{"seed": 0}\nnot a record\n{"half')
    with pytest.raises(ValueError, match="r.jsonl, line 2 is not a record"):
        records.read_existing_records(out)
    out.write_text('{"seed": 0}\n{"half')
    assert records.read_existing_records(out) == [{"seed": 0}]
    out.write_text('{"seed": 0}\n{"seed": 1}')
    # the last line is complete except for its newline
    assert records.read_existing_records(out) == [{"seed": 0}, {"seed": 1}]


def test_runs_without_logits_are_left_out_on_request(tmp_path):
    out = tmp_path / "r.jsonl"
    out.write_text('{"seed": 0}\n{"seed": 1, "logits": "logits/r.npz/1"}\n')
    assert [r["seed"] for r in records.read_records(out)] == [0, 1]
    assert [r["seed"] for r in records.read_records(out, with_logits=True)] == [1]


def test_records_name_files_without_their_folders(tmp_path):
    c = config(
        method="m-idpg-phm-glove",
        data="a/data",
        glove="b/own.txt",
        init_from="c/first",
        cache_dir="d",
    )
    r = config_to_record(c)
    assert [r[k] for k in ("data", "glove", "init_from", "cache_dir")] == [
        "data",
        "own.txt",
        "first",
        None,
    ]
    assert config_to_record(config(backbone=str(tmp_path)))["backbone"] == tmp_path.name
    assert config_to_record(config(backbone="org/model"))["backbone"] == "org/model"


def test_a_repository_that_contains_the_package_is_ignored(tmp_path, monkeypatch):
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(records, "files", lambda name: tmp_path)
    assert records.git_state.__wrapped__() == dict(commit=None, worktree_clean=None)
    subprocess.run(["git", "add", "__init__.py"], cwd=tmp_path, check=True)
    assert len(records.git_state.__wrapped__()["commit"]) == 40


def test_the_commit_of_a_clone_is_recorded():
    root = Path(records.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("the package is not in a repository")
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert records.git_state.__wrapped__()["commit"] == head.strip()


def test_a_command_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    argv = [
        tmp_path / "idp_run",
        f"--data={tmp_path / 'data'}",
        "--out",
        tmp_path / "a.jsonl",
        "--template",
        "{s1} a=b",
    ]
    monkeypatch.setattr(records.sys, "argv", [*map(str, argv), "--shots", "8"])
    assert (
        records.format_command_line()
        == "idp_run --data=data --out a.jsonl --template {s1} a=b --shots 8"
    )


def test_a_changed_line_is_refused():
    line = dump_record({"score": 81.5, "name": "a"})
    assert load_record(line) == {"score": 81.5, "name": "a"}
    for changed in (line.replace("81.5", "91.5"), line.replace('"digest"', '"digesu"')):
        with pytest.raises(UserError, match="its digest does not match"):
            load_record(changed)
    with pytest.raises(UserError, match="not a JSON object"):
        load_record("[1]")


@pytest.mark.parametrize(
    "line", ['{"a": "\\ud800"}', '{"a": ' + "[" * 3000 + "]" * 3000 + "}"], ids=["text", "depth"]
)
def test_a_record_that_cannot_be_written_is_refused(line):
    with pytest.raises(ValueError, match="surrogates not allowed|nested too deeply"):
        load_record(line)


def test_seconds_do_not_follow_a_clock_that_is_set_back(monkeypatch):
    start_time = time.perf_counter()
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)  # in 1970
    provenance = records.collect_provenance(start_time, threads=1)
    assert 0 <= provenance["seconds"] < 60
    assert provenance["started_at"].startswith("1970-01-12T13:46")
