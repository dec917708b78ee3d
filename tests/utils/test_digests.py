"""A manifest finds changed and missing files, also those of the package."""

import pytest

from idp_tutorial.utils import digests
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.digests import (
    MANIFEST_NAME,
    asset_path,
    find_damaged_file,
    read_manifest,
    require_intact_files,
    write_manifest,
)


def test_a_manifest_finds_changed_and_missing_files(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    assert find_damaged_file(tmp_path) == ""
    assert require_intact_files(tmp_path, "Copy it again.") == tmp_path
    (tmp_path / "b").write_text("c")
    with pytest.raises(UserError, match="b is damaged or missing: .* Copy it again."):
        require_intact_files(tmp_path, "Copy it again.")
    (tmp_path / "a").unlink()
    assert find_damaged_file(tmp_path) == "a"
    (tmp_path / MANIFEST_NAME).write_text("nonsense\n")
    with pytest.raises(UserError, match="SHA256SUMS is damaged"):
        find_damaged_file(tmp_path)


def test_a_file_of_the_package_is_compared_with_its_digest(tmp_path, monkeypatch):
    assert asset_path("lexicons.json").is_file()
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/lexicons.json").write_text("{}")
    write_manifest(tmp_path / "assets")
    monkeypatch.setattr(digests, "files", lambda package: tmp_path)
    assert asset_path("lexicons.json").read_text() == "{}"
    (tmp_path / "assets/lexicons.json").write_text("{ }")
    for name in ("lexicons.json", "other.json"):
        with pytest.raises(UserError, match=f"{name} is damaged or missing.*Install the package"):
            asset_path(name)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a//b", "x" * 300, "a\\b"])
def test_a_manifest_names_files_of_its_folder_only(name, tmp_path):
    (tmp_path / MANIFEST_NAME).write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match="which is not in this folder"):
        read_manifest(tmp_path)
