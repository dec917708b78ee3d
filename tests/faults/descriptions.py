"""Descriptions that have a valid digest and another content, for every file that is read again.

Each work writes files in a folder and reads them. A mutation puts an odd value in the place of one
field of a description, or removes the field, and writes the digest that belongs to the new content.
The reader must refuse it with one line, or give what it gave before; a value of the same type may
give another result, since it is another valid description.
"""

import json
import pickle
import random
import shutil
import tempfile
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import torch
from harness import REFUSALS
from small import backbone, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.estimator import PromptClassifier
from idp_tutorial.huggingface import PromptModel, get_prompt_model
from idp_tutorial.runs.logits import load_logits, majority_vote_score, write_run_arrays
from idp_tutorial.runs.record import RunStore
from idp_tutorial.runs.tables import results_table
from idp_tutorial.saving.descriptions import read_fingerprint, read_prompts
from idp_tutorial.saving.hub import read_run_record, write_model_card
from idp_tutorial.saving.prompt_files import from_pretrained, load_first_stage, save_pretrained
from idp_tutorial.serving.multitask import MultiTaskModel
from idp_tutorial.training.cache import cache_states
from idp_tutorial.training.fit import fit
from idp_tutorial.training.state_store import StateStore
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.digests import write_manifest
from idp_tutorial.utils.records import dump_record, read_records
from idp_tutorial.utils.tensor_files import deserialise_tensors, serialise_tensors
from results.pretraining.config import PretrainConfig
from results.pretraining.corpus import prepare_text
from results.pretraining.pretrain import pretrain
from results.supplement.supplementary_training import run_supplementary_training
from results.transfer.scores import transfer_table


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ODD_VALUES = (
    None,
    True,
    0,
    -1,
    10**30,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    -1e300,
    "",
    "\0",
    "../../evil",
    "/etc/passwd",
    "x" * 5000,
    "\ud800",
    [],
    [None],
    ["../x", 3, {}],
    {},
    {"a": {"b": [1]}},
    nested(40),
    nested(700),
)
MISSING = object()
ACCEPTED = ("equal", "refused", "another valid description", "the default of a field")


def places(value, path=(), depth=4):
    """Yield the paths of all values in a tree of dictionaries and lists, to a depth."""
    yield path
    if depth and isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key), depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for i in {0, len(value) - 1} & set(range(len(value))):
            yield from places(value[i], (*path, i), depth - 1)


def value_at(tree, path):
    for step in path:
        tree = tree[step]
    return tree


def replaced(tree, path, value):
    """Return a tree with another value at a path; `MISSING` removes the key."""
    if not path:
        return value
    step, *rest = path
    if isinstance(tree, dict):
        if not rest and value is MISSING:
            return {k: v for k, v in tree.items() if k != step}
        return {k: replaced(v, rest, value) if k == step else v for k, v in tree.items()}
    items = [replaced(v, rest, value) if i == step else v for i, v in enumerate(tree)]
    if not rest and value is MISSING:
        del items[step]
    return type(tree)(items)


def is_same_kind(a, b):
    """Return whether two values are of one type, so that one may stand for the other."""
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) is type(b)
    numbers = (int, float)
    return type(a) is type(b) or (isinstance(a, numbers) and isinstance(b, numbers))


# ---- files: how a description is taken out of a file, and put into it with its digest


class Archive:
    """A safetensors file of the package."""

    def take(self, file):
        return deserialise_tensors(file.read_bytes())

    def tree(self, content):
        return content[0]

    def put(self, file, content, tree):
        file.write_bytes(serialise_tensors(content[1], tree))


class Lines:
    """A file of records; the last one is changed."""

    def take(self, file):
        return file.read_text(encoding="utf-8").splitlines()

    def tree(self, content):
        return {k: v for k, v in json.loads(content[-1]).items() if k != "digest"}

    def put(self, file, content, tree):
        last = dump_record(tree) if isinstance(tree, dict) else json.dumps(tree)
        file.write_text("\n".join([*content[:-1], last]) + "\n", encoding="utf-8")


class Plain:
    """A JSON file without a digest, in a folder that may have a manifest."""

    def take(self, file):
        return json.loads(file.read_text(encoding="utf-8"))

    def tree(self, content):
        return content

    def put(self, file, content, tree):
        file.write_text(json.dumps(tree), encoding="utf-8")


# ---- works: write into a folder; read again, and return what was read


@cache
def model_parts():
    task = small_task(train=16, validation=8, test=8)
    cfg = config("lpt-npg", prompt_length=2, bottleneck=4, steps=2, batch_size=8)
    bb = backbone(max_position_embeddings=258)
    torch.manual_seed(0)
    return task, cfg, bb, build_model(cfg, bb, task)


RECORD = config("lpt-npg", prompt_length=2, bottleneck=4).to_dict() | dict(
    schema=3,
    status="done",
    digests=dict(weights="0123456789abcdef", data="0123456789abcdef"),
    split_sizes=dict(train=16, validation=8, test=8),
    metric="accuracy",
    score=50.0,
    ms_per_step=1.0,
    peak_memory_mb=1.0,
    scores=dict(accuracy=50.0),
    validation=62.5,
    params=dict(prompt=10, head=2, backbone=0),
    provenance=dict(commit="abc"),
    history=[[1, 50.0], [2, 62.5]],
    losses=[0.7, 0.6],
    checkpoint_selection="best on validation",
    lr_selection="given",
    seconds=1.0,
)


def values_of(model):
    tensors = {n: p.detach().double().sum().item() for n, p in model.named_parameters()}
    return {n: round(v, 6) for n, v in tensors.items() if not n.startswith("lm.")}


def write_model(folder):
    task, cfg, _, model = model_parts()
    save_pretrained(model, folder, task, cfg, {**RECORD, **cfg.to_dict(), "metric": "accuracy"})


def read_model(folder):
    _, _, bb, _ = model_parts()
    model, task, cfg = from_pretrained(folder, bb)
    record = read_run_record(folder, read_prompts(folder)[0]["cfg"])
    if record is None:
        raise UserError("the record is of another run, and is not used")
    read_fingerprint(folder)
    write_model_card(folder, read_prompts(folder)[0], record)
    return [values_of(model), str(task), str(cfg), (folder / "README.md").read_text()]


def read_stage(folder):
    task, cfg, bb, _ = model_parts()
    model = build_model(cfg, bb, task)
    return [sorted(load_first_stage(model, folder)), values_of(model)]


def read_bundle(folder):
    (member,) = MultiTaskModel.from_pretrained([folder], model_parts()[2]).task_models.values()
    return values_of(member.model)


@cache
def language_model():
    return backbone("gpt2").model


def write_prompt_model(folder):
    torch.manual_seed(0)
    get_prompt_model(
        language_model(), "lpt", num_labels=2, prompt_length=2, layer=1, head="classification"
    ).save_pretrained(folder)


def read_prompt_model(folder):
    model = PromptModel.from_pretrained(language_model(), folder)
    settings = model.settings["default"]
    return [{n: t.sum().item() for n, t in model.state_dict().items()}, str(settings)]


def train(folder):
    task, cfg, bb, _ = model_parts()
    torch.manual_seed(0)
    log = fit(build_model(cfg, bb, task), task, cfg, checkpoint_dir=folder, save_every=1)
    return [[round(float(v), 5) for v in log.losses], log.history, log.validation]


def write_training(folder):
    train(folder)
    (folder / "checkpoint-2.safetensors").unlink()  # the run continues from its first step


@cache
def corpus():
    rows = small_task(train=200).splits["train"]
    lines = [r["sentence1"] for r in rows]
    return lines


def read_corpus(folder):
    tokenizer, arrays = prepare_text(corpus(), folder, 300)
    return [len(tokenizer), int(arrays["stream"].sum())]


@cache
def prepared():
    folder = tempfile.mkdtemp()
    return prepare_text(corpus(), folder, 300)


def pretraining(folder):
    cfg = PretrainConfig(
        d=32,
        n_layers=1,
        vocab_size=300,
        steps=2,
        tokens_per_step=64,
        lr=1e-3,
        warmup=2,
        held_out_tokens=256,
        dtype="float32",
    )
    tokenizer, arrays = prepared()
    model, log = pretrain(arrays["stream"], tokenizer, cfg, folder, eval_every=1)
    return [len(log), sum(p.double().sum().item() for p in model.parameters())]


def write_pretraining(folder):
    pretraining(folder)
    (folder / "checkpoint-2.safetensors").unlink()


def write_records(folder):
    folder.mkdir()
    lines = [dump_record({**RECORD, "seed": seed, "score": 50.0 + seed}) for seed in range(2)]
    (folder / "compare.jsonl").write_text("\n".join(lines) + "\n")


def read_run_records(folder):
    records = read_records(folder / "compare.jsonl")
    store = RunStore(folder / "compare.jsonl")
    stored = store.find(dict(method="lpt-npg", seed=1, lr_selection="given"))
    return [results_table(records).to_string(), stored and stored["score"]]


TRANSFER = dict(
    target="two-domains",
    setting="zero-shot",
    label_map=[0, 1],
    majority_score=50.0,
    source_score=60.0,
    stage_learning_rate=0.01,
    target_train_size=0,
)


def write_transfer(folder):
    folder.mkdir()
    lines = [dump_record({**RECORD, **TRANSFER, "seed": seed}) for seed in range(2)]
    (folder / "transfer.jsonl").write_text("\n".join(lines) + "\n")


def read_transfer(folder):
    return transfer_table(read_records(folder / "transfer.jsonl")).to_string()


ARRAYS = dict(
    test=np.ones((4, 2), np.float32), test_label=np.arange(4) % 2, validation=np.zeros((4, 2))
)


def write_logits(folder):
    folder.mkdir()
    fields = write_run_arrays(folder / "logits/runs.npz", "run", ARRAYS)
    (folder / "runs.jsonl").write_text(dump_record({**RECORD, **fields}) + "\n")


def read_logits(folder):
    (record,) = read_records(folder / "runs.jsonl")
    arrays = load_logits(record, folder)
    vote = majority_vote_score([{**record, "folder": folder}])
    return [{n: a.tolist() for n, a in arrays.items()}, vote]


def supplement(folder):
    task, cfg, _, _ = model_parts()
    cfg = cfg.with_method("prompt-tuning").with_options(
        backbone=str(small_backbone()), epochs=1, batch_size=16
    )
    return run_supplementary_training(cfg, build_model, task, folder, with_swapped_pairs=False)


@cache
def small_backbone():
    from results.pretraining.pretrain import save_backbone

    folder = Path(tempfile.mkdtemp()) / "backbone"
    bb = backbone(max_position_embeddings=258)
    save_backbone(bb.model, bb.tokenizer, folder)
    return folder


@cache
def estimator():
    task, cfg, _, _ = model_parts()
    fitted = PromptClassifier(backbone=str(small_backbone()))
    cfg = cfg.with_options(backbone=str(small_backbone()))
    bb = load_backbone(str(small_backbone()))
    save = Path(tempfile.mkdtemp()) / "model"
    save_pretrained(build_model(cfg, bb, task), save, task, cfg)
    return type(fitted).from_pretrained(save, str(small_backbone()))


class Pickle:
    """The state of a pickled estimator, without the pickle around it."""

    def take(self, file):
        return pickle.loads(file.read_bytes())

    def tree(self, content):
        return content

    def put(self, file, content, tree):
        file.write_bytes(pickle.dumps(tree))


def write_pickle(folder):
    folder.mkdir()
    (folder / "state.pkl").write_bytes(pickle.dumps(estimator().__getstate__()))


def read_pickle(folder):
    new = PromptClassifier.__new__(PromptClassifier)
    new.__setstate__(pickle.loads((folder / "state.pkl").read_bytes()))
    return sorted(k for k in vars(new) if k.endswith("_"))


class Manifest:
    """`SHA256SUMS` as a dictionary, file name: digest."""

    def take(self, file):
        return dict(reversed(l.split("  ", 1)) for l in file.read_text().splitlines())

    def tree(self, content):
        return {"names": list(content), "digests": list(content.values())}

    def put(self, file, content, tree):
        names, digests = (tree.get(k, []) if isinstance(tree, dict) else [] for k in tree_keys)
        names = names if isinstance(names, list) else [names]
        digests = digests if isinstance(digests, list) else [digests]
        text = "".join(f"{d!s:.200}  {n!s:.6000}\n" for n, d in zip(names, digests))
        file.write_bytes(text.encode(errors="surrogatepass"))


tree_keys = ("names", "digests")


def write_backbone(folder):
    shutil.copytree(small_backbone(), folder)


def read_backbone(folder):
    return values_of(load_backbone(str(folder)).model)


class WithManifest(Plain):
    """A JSON file whose digest is in the manifest of its folder."""

    def __init__(self, folder="."):
        self.folder = folder

    def put(self, file, content, tree):
        super().put(file, content, tree)
        write_manifest((file.parent / self.folder).resolve())


class Index:
    """The index of a part of a store of states: keys, ends and digests."""

    def take(self, file):
        return file.read_bytes()

    def tree(self, content):
        n = int.from_bytes(content[-24:-16], "little")
        entries = np.frombuffer(content[-24 - 32 * n : -24], store_dtype())
        return {"ends": entries["end"].tolist(), "n": n}

    def put(self, file, content, tree):
        n = int.from_bytes(content[-24:-16], "little")
        entries = np.frombuffer(content[-24 - 32 * n : -24], store_dtype()).copy()
        ends = tree.get("ends") if isinstance(tree, dict) else None
        for i in range(n):
            value = ends[i] if isinstance(ends, list) and i < len(ends) else 0
            good = isinstance(value, (int, float)) and abs(value) < 2**63
            entries["end"][i] = int(value) if good else -(2**62)
        store = StateStore.__new__(StateStore)
        store.folder, store.d, store.dtype = file.parent, 32, np.dtype("float32")
        file.write_bytes(content[: -24 - 32 * n] + store._dump_index(entries))


def store_dtype():
    from idp_tutorial.training.state_store import INDEX_DTYPE

    return INDEX_DTYPE


@cache
def examples():
    task, _, bb, _ = model_parts()
    return task.encode(task.splits["train"][:4], bb.tokenizer, 60, None)


def read_cache(folder):
    states, _ = cache_states(model_parts()[2], examples(), 2, folder, folder_name="b")
    return [[round(float(v), 4) for v in e["hidden_states"].sum(1)] for e in states]


WORKS = {  # name: (write, read, file that is changed, its format)
    "a saved model": (write_model, read_model, "prompts.safetensors", Archive()),
    "its record": (write_model, read_model, "record.jsonl", Lines()),
    "a first stage": (write_model, read_stage, "prompts.safetensors", Archive()),
    "one of several models": (write_model, read_bundle, "prompts.safetensors", Archive()),
    "a prompt model": (write_prompt_model, read_prompt_model, "prompts.safetensors", Archive()),
    "a checkpoint": (write_training, train, "checkpoint-1.safetensors", Archive()),
    "a pretraining": (write_pretraining, pretraining, "checkpoint-1.safetensors", Archive()),
    "a corpus": (read_corpus, read_corpus, "text.json", Plain()),
    "its tokenizer": (
        read_corpus,
        read_corpus,
        "tokenizer/tokenizer_config.json",
        WithManifest(".."),
    ),
    "records": (write_records, read_run_records, "compare.jsonl", Lines()),
    "records of transfer": (write_transfer, read_transfer, "transfer.jsonl", Lines()),
    "logits": (write_logits, read_logits, "runs.jsonl", Lines()),
    "supplementary training": (supplement, supplement, "prompts.safetensors", Archive()),
    "a pickled estimator": (write_pickle, read_pickle, "state.pkl", Pickle()),
    "a manifest": (write_backbone, read_backbone, "SHA256SUMS", Manifest()),
    "a cache": (read_cache, read_cache, "b/layer2-float32/*.states", Index()),
}
QUICK = ("a saved model", "a checkpoint", "records", "logits", "a cache")


def mutations(tree, rng, limit):
    """Return (path, value) pairs, `limit` of them drawn by lot; None: all."""
    cases = [(path, value) for path in places(tree) for value in (*ODD_VALUES, MISSING)]
    cases = [c for c in cases if c[0] or c[1] is not MISSING]
    if limit is None or limit >= len(cases):
        return cases
    return rng.sample(cases, limit)


def outcome_of(read, folder, want, old, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = read(folder)
        except REFUSALS as e:
            text = str(e)
            is_line = bool(text) and "\n" not in text and len(text) < 4000
            return ("refused" if is_line else "a message that is not a line"), text
        except Exception as e:
            return "an error that nobody expected", f"{type(e).__name__}: {e}"
    if got == want:
        return "equal", ""
    if value is not MISSING and is_same_kind(old, value):
        return "another valid description", ""
    if value is MISSING or (value is None) != (old is None):
        return "the default of a field", ""
    return "silently another result", str(got)


def describe(value):
    return "removed" if value is MISSING else f"{value!r:.30}" if value != nested(700) else "[[…]]"


def malicious(name, limit=None, seed=0):
    """Change the description of a work's file in many ways, and read it; return the outcomes."""
    write, read, pattern, form = WORKS[name]
    rng = random.Random(f"{seed}{name}")
    seen = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "out"
        pristine = Path(tmp) / "pristine"
        write(folder)
        shutil.copytree(folder, pristine)
        want = read(folder)
        (file,) = [p.relative_to(pristine) for p in pristine.glob(pattern)]
        content = form.take(pristine / file)
        tree = form.tree(content)
        for path, value in mutations(tree, rng, limit):
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            try:
                form.put(folder / file, content, replaced(tree, path, value))
            except (UnicodeEncodeError, RecursionError, TypeError):
                continue  # such a file cannot be written
            old = value_at(tree, path)
            outcome, message = outcome_of(read, folder, want, old, value)
            seen["descriptions", outcome] += 1
            if outcome not in ACCEPTED:
                where = ".".join(map(str, path))
                bad.append((name, where, describe(value), outcome, message[:200]))
    return seen, bad
