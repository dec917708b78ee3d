"Shared by all tests: no network, a fixed seed, and the folder of real tasks where there is one."
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
os.environ.update(HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1', TOKENIZERS_PARALLELISM='false', MPLBACKEND='Agg')

@pytest.fixture(autouse=True)
def seed():
    "Every test starts from the same random state"
    if 'torch' in sys.modules: sys.modules['torch'].manual_seed(0)

@pytest.fixture(autouse=True, scope='module')
def one_thread():
    "Small tensors are slower on several threads, and sums differ"
    import torch
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

@pytest.fixture(autouse=True, scope='session')
def places(tmp_path_factory):
    "Where backbones lie is noted in a folder of this process"
    from idp_tutorial.model import places
    with pytest.MonkeyPatch.context() as m:
        folder = tmp_path_factory.mktemp('places')
        m.setattr(places, 'notes', lambda: folder)
        yield folder

@pytest.fixture(scope='module')
def bbs():
    "A small backbone by family, made once a file"
    from small import backbone
    made = {}
    return lambda family: made[family] if family in made else made.setdefault(family, backbone(family))

@pytest.fixture(scope='session')
def data_dir():
    "The folder of tasks that `IDP_DATA` names (or the one beside the checkout); the test is skipped without it"
    folder = Path(os.environ.get('IDP_DATA', ROOT.parent/'shared/data'))
    if not folder.is_dir(): pytest.skip('no folder of tasks: set IDP_DATA')
    return folder

@pytest.fixture(scope='session')
def small_folder(tmp_path_factory):
    """A folder with the smallest of RoBERTas (3 layers of 32 dimensions, 256 positions, random) and the bundled
    tokenizer, as `save_backbone` writes it"""
    from small import backbone

    from idp_tutorial.pretraining.bundled_backbone import save_backbone
    bb = backbone(max_position_embeddings=258)
    save_backbone(bb.model, bb.tokenizer, folder := tmp_path_factory.mktemp('backbone'))
    return folder
