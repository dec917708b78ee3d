"""Files of records: damaged lines, and paths that are stored without their folders."""

import pytest
from small import config

from idp_tutorial.utils import records
from idp_tutorial.utils.records import config_to_record


def test_a_damaged_record_file_is_refused_and_a_cut_line_removed(tmp_path):
    out = tmp_path / "r.jsonl"
    out.write_text('{"seed": 0}\nnot a record\n{"half')
    with pytest.raises(ValueError, match="r.jsonl, line 2 is not a record"):
        records.read_existing_records(out)
    out.write_text('{"seed": 0}\n{"half')
    assert (
        records.read_existing_records(out) == [{"seed": 0}] and out.read_text() == '{"seed": 0}\n'
    )
    out.write_text('{"seed": 0}\n{"seed": 1}')
    # the last line is complete except for its newline
    assert (
        records.read_existing_records(out) == [{"seed": 0}, {"seed": 1}]
        and out.read_text() == '{"seed": 0}\n{"seed": 1}\n'
    )


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
