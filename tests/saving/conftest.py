"""Fixtures of the tests of saved models."""

import pytest
from small import config, small_task

from idp_tutorial.runs.experiment import train_and_save


@pytest.fixture(scope="session")
def saved_model(small_folder, tmp_path_factory):
    """Return the folder of a trained model, which tests only read, and its record."""
    folder = tmp_path_factory.mktemp("runs") / "npg"
    return folder, train_and_save(
        config(backbone=str(small_folder), steps=3), folder, small_task(), save_every=0
    )
