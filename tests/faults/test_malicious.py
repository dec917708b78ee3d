"""A fast selection of `make faults`: odd descriptions, folders, two processes of a command."""

import commands
import descriptions
import folders
import pytest


@pytest.mark.grid
@pytest.mark.parametrize("name", descriptions.QUICK)
def test_a_description_of_another_content_is_refused(name):
    seen, bad = descriptions.malicious(name, 40)
    assert not bad and sum(seen.values()) > 20


def test_a_malicious_folder_is_no_backbone():
    seen, bad = folders.malicious(20)
    assert not bad and sum(seen.values()) == 20


@pytest.mark.parametrize("words", ["a tokenizer that", "compressed", "header"])
def test_a_folder_made_for_the_libraries_is_no_backbone(words):
    seen, bad = folders.malicious(words=words)
    assert not bad and sum(seen.values()) >= 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["transfer", "supplement"])
def test_two_processes_of_a_command_leave_the_files_of_one(name):
    seen, bad = commands.at_once(name)
    assert not bad and sum(seen.values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", commands.NAMES)
def test_two_processes_of_every_command(name):
    assert not commands.at_once(name, 3)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", descriptions.WORKS)
def test_every_description_in_many_ways(name):
    assert not descriptions.malicious(name, 600)[1]


@pytest.mark.slow
def test_many_malicious_folders():
    assert not folders.malicious()[1]
