"""Notes of the folders of backbones: a hint that is ignored if it is missing, damaged or old."""

from idp_tutorial.saving import descriptions
from idp_tutorial.saving.descriptions import recall_backbone_path, remember_local_backbone

DESCRIPTION = dict(local=True, dtype="float32", digests=dict(float32="0123abcd"))


def test_the_last_folder_of_some_weights_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(descriptions, "path_notes_folder", lambda: tmp_path / "notes")
    for name in "ab":
        (tmp_path / name).mkdir()
        remember_local_backbone(DESCRIPTION, tmp_path / name)
    assert recall_backbone_path("0123abcd") == tmp_path / "b"
    (tmp_path / "b").rmdir()
    for unknown in ("0123abcd", "4567", "../notes/0123abcd", "0" * 5000):
        assert recall_backbone_path(unknown) is None
    (tmp_path / "notes/4567").write_bytes(b"\xff\xfe")
    assert recall_backbone_path("4567") is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(descriptions, "path_notes_folder", lambda: tmp_path / "file")
    remember_local_backbone(DESCRIPTION, tmp_path)
    assert recall_backbone_path("0123abcd") is None
