"""Fixtures of all tests: no network, a fixed seed, one thread, and the folder of real tasks."""

import copy
import functools
import gc
import os
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# nbformat imports jsonschema, which builds 39 parsers with this package: seconds in each process,
# for formats that a notebook does not have
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg"
)


# `superglue_folder` has test rows without labels, as the benchmark has
EXPECTED_WARNING = pytest.mark.filterwarnings("ignore:.* has no labels and is ignored:UserWarning")


def leave_one_case_of_each_grid(items):
    """Mark the cases of a `grid` as `long`, except for the first one that is not `slow`."""
    represented = set()
    for item in items:
        if not item.get_closest_marker("grid") or item.get_closest_marker("slow"):
            continue
        function = item.nodeid.partition("[")[0]
        if function in represented:
            item.add_marker("long")
        represented.add(function)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items):
    """Run the notebooks first, so that short tests are left for the worker that ends first."""
    leave_one_case_of_each_grid(items)
    for item in items:
        if "superglue_folder" in getattr(item, "fixturenames", ()):
            item.add_marker(EXPECTED_WARNING)
    items.sort(key=lambda item: item.get_closest_marker("notebook") is None)


def pytest_collection_finish():
    """Keep the garbage collector from visiting what is imported, which took a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(autouse=True)
def seed():
    """Seed torch before each test."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.manual_seed(0)
    elif torch:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes milliseconds


@pytest.fixture(autouse=True)
def no_backbone_digests():
    """Forget the digests of backbones, which a test may have replaced."""
    yield
    if record := sys.modules.get("idp_tutorial.runs.record"):
        record._BACKBONE_DIGESTS.clear()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, since small tensors are slower on several and sums depend on their number."""
    import torch

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True, scope="session")
def folders_of_models_are_read_once():
    """Read each folder of a model once, and give a copy to whoever loads it, to save time.

    A folder whose files have changed is read again. A test that replaces the function that reads
    the weights gets the replacement.
    """
    from idp_tutorial.backbones import load

    load_pretrained, read_weights = load.load_pretrained, load._load_with_lm_head

    @functools.lru_cache(maxsize=8)
    def load_once(folder, name, attn, dtype, files):
        return load_pretrained(folder, name, attn, dtype, False)

    def load_copy(folder, name, attn, dtype, allow_hub, **hub_kwargs):
        if not isinstance(folder, Path) or load._load_with_lm_head is not read_weights:
            return load_pretrained(folder, name, attn, dtype, allow_hub, **hub_kwargs)
        stats = [
            (file.name, file.stat() if file.exists() else file.lstat())
            for file in sorted(folder.iterdir())
        ]
        files = tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)
        return copy.deepcopy(load_once(folder, name, attn, dtype, files))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(load, "load_pretrained", load_copy)
        yield


@pytest.fixture(autouse=True, scope="session")
def path_notes_dir(tmp_path_factory):
    """Use a temporary folder for the notes that record where backbones were loaded from."""
    from idp_tutorial.saving import descriptions

    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("path_notes")
        monkeypatch.setattr(descriptions, "path_notes_folder", lambda: folder)
        yield folder


@pytest.fixture(autouse=True)
def known_tasks():
    """Forget the tasks that commands of the test make known, since later tests list all tasks."""
    from idp_tutorial.data.tasks import TASKS

    before = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(before)


@pytest.fixture(scope="session")
def small_sentiment(tmp_path_factory):
    """Return a folder of tasks with a small `sentiment`, for commands in their own process."""
    from small import write_splits

    from idp_tutorial.data.synthetic import make_rows

    folder = tmp_path_factory.mktemp("data")
    sizes = dict(train=40, validation=20, test=20)
    rows = {split: make_rows("sentiment", split, n=size) for split, size in sizes.items()}
    write_splits(folder / "sentiment", **rows)
    return folder


@pytest.fixture
def small_splits(monkeypatch):
    """Give the bundled tasks fewer rows, for tests that do not depend on how many there are."""
    from idp_tutorial.data.synthetic import SPLIT_SIZES

    for split, size in dict(train=200, validation=40, test=60).items():
        monkeypatch.setitem(SPLIT_SIZES, split, size)


@pytest.fixture
def messages():
    """The progress messages that the package has logged during the test."""
    from small import call_with_messages

    lines = []
    with call_with_messages(lines.append):
        yield lines


@pytest.fixture(scope="module")
def bbs():
    """Return a function that maps a family to its small backbone, built once a module."""
    from small import backbone

    return functools.cache(lambda family: backbone(family))


@pytest.fixture(scope="session")
def data_dir():
    """Return the folder of tasks, `IDP_DATA` or `shared/data`, or skip the test."""
    folder = Path(os.environ.get("IDP_DATA", ROOT.parent / "shared/data"))
    if not folder.is_dir():
        pytest.skip("no folder of tasks: set IDP_DATA")
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """Return a folder of `save_backbone` with a random RoBERTa and the bundled tokenizer.

    The model has 3 layers of 32 dimensions and 256 positions.
    """
    from small import backbone

    from results.pretraining.pretrain import save_backbone

    bb = backbone(max_position_embeddings=258)
    folder = tmp_path_factory.mktemp("backbone")
    save_backbone(bb.model, bb.tokenizer, folder)
    return folder


@pytest.fixture(scope="module", params=["archive", "hub"])
def superglue_folder(request, tmp_path_factory):
    """Return the five folders of the benchmark's archive, or records as the hub has them."""
    from small import write_splits
    from superglue import FOLDERS, generate_lines, hidden, unlabelled

    root = tmp_path_factory.mktemp("superglue")
    hub = request.param == "hub"
    for n, f in FOLDERS.items():
        train, valid, test = [generate_lines(n, *k, hub) for k in ((30, 0), (12, 1), (6, 2))]
        if hub:
            write_splits(root / n, train=train, validation=valid, test=hidden(test))
        else:
            write_splits(root / f, train=train, val=valid, test=[unlabelled(l) for l in test])
    return root


@pytest.fixture
def unreachable(monkeypatch):
    """Use settings that are online, and a hub address on which nothing listens."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{s.getsockname()[1]}")
        yield constants
