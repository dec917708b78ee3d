"Shared by all tests: no network, a fixed seed, and the folder of real tasks where there is one."
import os, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1', TOKENIZERS_PARALLELISM='false', MPLBACKEND='Agg')

@pytest.fixture(autouse=True)
def seed():
    "Every test starts from the same random state"
    if 'torch' in sys.modules: sys.modules['torch'].manual_seed(0)

@pytest.fixture(scope='session')
def data_dir():
    "The folder of tasks that `IDP_DATA` names (or the one beside the checkout); the test is skipped without it"
    folder = Path(os.environ.get('IDP_DATA', ROOT.parent/'shared/data'))
    if not folder.is_dir(): pytest.skip('no folder of tasks: set IDP_DATA')
    return folder
