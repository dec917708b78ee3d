"""Backbone folders that were put together with bad intent: refused with one line, or harmless.

Nothing is executed, nothing outside of the folder is read as a part of the model, and no case takes
long or fills the memory.
"""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import warnings
import zipfile
from collections import Counter
from functools import cache, partial
from pathlib import Path

import torch
from descriptions import MISSING, ODD_VALUES, describe, nested, places, replaced, small_backbone
from harness import REFUSALS
from safetensors.torch import load_file, save_file

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.utils.digests import MANIFEST_NAME

SECONDS = 30  # a case that takes longer is a failure
MEGABYTES = 1500  # and so is one that needs so much more memory


class _Mark:
    """An object whose unpickling creates a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (os.mkdir, (str(self.file),))


class _SlowError(BaseException):
    """A case that takes too long."""


def change_json(name, path, value, folder, _):
    file = folder / name
    file.write_text(json.dumps(replaced(json.loads(file.read_text()), path, value)))


def change_kind(name, kind, folder, _):
    file = folder / name
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "a dangling link":
        file.symlink_to("nowhere")
    elif kind == "a loop":
        file.symlink_to(file.name)
    elif kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "zeros":
        file.write_bytes(bytes(5000))
    elif kind == "a bomb":
        file.write_text("[" * 100_000)


def change_code(where, folder, mark):
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    code = {k: "evil.Evil" for k in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM")}
    if where == "config.json":
        change_json(where, ("auto_map",), code, folder, mark)
        change_json(where, ("model_type",), "own", folder, mark)
    elif where == "known":
        change_json("config.json", ("auto_map",), code, folder, mark)
    else:
        change_json(where, ("auto_map",), {"AutoTokenizer": ["evil.Evil", None]}, folder, mark)
        change_json(where, ("tokenizer_class",), "Evil", folder, mark)


def change_pickle(name, is_alone, folder, mark):
    if is_alone:
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Mark(mark)))


def change_torch(is_alone, folder, mark):
    if is_alone:
        (folder / "model.safetensors").unlink()
    torch.save({"embeddings": _Mark(mark)}, folder / "pytorch_model.bin")


def change_index(target, folder, _):
    weights = load_file(folder / "model.safetensors")
    outside = folder.parent / "outside.safetensors"
    save_file(weights, outside, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = dict(metadata={}, weight_map=dict.fromkeys(weights, target))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_adapter(folder, mark):
    config = dict(peft_type="LORA", base_model_name_or_path="/etc", r=2, auto_mapping=None)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def change_header(kind, folder, _):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    names = [k for k in header if k != "__metadata__"]
    if kind == "length":
        file.write_bytes((2**62).to_bytes(8, "little") + data[8:])
        return
    if kind == "offsets":
        header[names[0]]["data_offsets"] = [0, 2**60]
    elif kind == "shape":
        header[names[0]]["shape"] = [2**40, 2**40]
    elif kind == "dtype":
        header[names[0]]["dtype"] = "F99"
    elif kind == "names":
        header = {("../" + k if k in names else k): v for k, v in header.items()}
    elif kind == "type":
        header = list(header.items())
    elif kind == "null":
        header = dict.fromkeys(header)
    elif kind == "80 MB":
        header["__metadata__"] = {"x": "y" * 80_000_000}
    elif kind == "many names":
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header |= {f"x{i}": entry for i in range(300_000)}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])


def change_tensors(kind, folder, _):
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(n for n in weights if "word_embeddings" in n)
    if kind == "fewer rows":
        weights[name] = weights[name][:100].clone()
    elif kind == "nothing":
        weights = {}
    elif kind == "integers":
        weights[name] = weights[name].to(torch.int32)
    elif kind == "more":
        weights["roberta.encoder.layer.7.x"] = torch.ones(3)
    elif kind == "lost":
        del weights[name]
    elif kind == "nan":
        weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, file, {"format": "pt"})


def change_tokenizer(parts, folder, _):
    """Replace parts of the tokenizer's description."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))


def change_archive(folder, _):
    """Replace the weights by an archive of zeros, which is small as long as it is compressed."""
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))


def rules(n, pattern, content, kind="String"):
    """Return n rules that replace a pattern."""
    rule = dict(type="Replace", pattern={kind: pattern}, content=content)
    return dict(type="Sequence", normalizers=[rule] * n)


def split_at(pattern):
    """Return a rule that splits a text at a regular expression."""
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


TOKENIZERS = {  # what a library in Rust does with it: parts of tokenizer.json
    "doubles a text 28 times": dict(normalizer=rules(28, "a", "aa")),
    "doubles a rare letter": dict(normalizer=rules(40, "\u0f3a", "\u0f3a\u0f3a")),
    "doubles by a regular expression": dict(normalizer=rules(40, "[a-z]", "xx", "Regex")),
    "inserts between all letters": dict(normalizer=rules(8, "", "abc")),
    "panics at a regular expression": dict(pre_tokenizer=split_at("(a+)+$")),
    "compiles a large expression": dict(pre_tokenizer=split_at("((a{1,999}){1,999}){1,999}")),
    "panics at a table": dict(
        normalizer=dict(type="Precompiled", precompiled_charsmap="AAAA"),
    ),
    "repeats the text": dict(
        post_processor=dict(
            type="TemplateProcessing",
            single=[{"Sequence": {"id": "A", "type_id": 0}}] * 10**5,
            pair=[],
            special_tokens={},
        )
    ),
    "has very many tokens": dict(
        added_tokens=[
            dict(
                id=i,
                content=f"t{i}",
                **dict.fromkeys(
                    ("single_word", "lstrip", "rstrip", "normalized", "special"), False
                ),
            )
            for i in range(200_000)
        ]
    ),
    "truncates with a long stride": dict(
        truncation=dict(direction="Right", max_length=2, strategy="LongestFirst", stride=5)
    ),
    "pads to a large length": dict(
        padding=dict(
            strategy={"Fixed": 10**9},
            direction="Right",
            pad_to_multiple_of=None,
            pad_id=0,
            pad_type_id=0,
            pad_token="x",
        )
    ),
}


SIZES = {
    "num_hidden_layers": (0, 1, 2, 100_000, 10**12),
    "hidden_size": (1, 31, 10**6, 10**12),
    "vocab_size": (1, 100, 10**7, 10**12),
    "max_position_embeddings": (1, 10**9),
    "num_attention_heads": (-1, 0, 5, 10**9),
    "intermediate_size": (0, 10**9),
    "type_vocab_size": (0, 10**10),
    "model_type": ("bert", "llama", "own", "t5", "gpt2", "clip"),
    "architectures": (["Evil"], ["../x"], []),
    "pad_token_id": (-5, 10**9),
    "torch_dtype": ("evil", "int8"),
    "dtype": ("evil", "float64"),
    "quantization_config": ({"quant_method": "bitsandbytes"}, {"quant_method": "gptq"}, {}),
    "attn_implementation": ("evil",),
    "_attn_implementation": ("evil", "flash_attention_2"),
    "transformers_version": (None, 7),
    "_name_or_path": ("/etc", "../x"),
    "tie_word_embeddings": ("no", None),
}


KINDS = (
    *("a folder", "a dangling link", "a loop", "a pipe", "a device", "empty", "zeros", "a bomb"),
)


def json_cases():
    """Yield the cases of odd values in a JSON file."""
    folder = small_backbone()
    for size, values in SIZES.items():
        for value in values:
            change = partial(change_json, "config.json", (size,), value)
            yield f"config {size}={value!r:.30}", change
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        tree = json.loads((folder / name).read_text())
        tree.pop("model", None)
        for path in places(tree, depth=3 if name == "tokenizer.json" else 2):
            for value in (*ODD_VALUES, MISSING):
                if path or value is not MISSING:
                    label = f"{name} {'.'.join(map(str, path))}={describe(value)}"
                    yield label, partial(change_json, name, path, value)
    for value in (*ODD_VALUES[:-1], nested(300)):
        for key in ("vocab", "merges", "type", "unk_token"):
            label = f"tokenizer.json model.{key}={describe(value)}"
            yield label, partial(change_json, "tokenizer.json", ("model", key), value)


def cases():
    """Yield (name, function of a folder and of the mark) of every case."""
    yield from json_cases()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        for kind in KINDS:
            yield f"{name} is {kind}", partial(change_kind, name, kind)
    for where in ("config.json", "known", "tokenizer_config.json"):
        yield f"code in {where}", partial(change_code, where)
    for alone in (True, False):
        for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl", "training_args.bin"):
            yield f"pickle {name} alone={alone}", partial(change_pickle, name, alone)
        yield f"torch file alone={alone}", partial(change_torch, alone)
    for target in ("../outside.safetensors", "/etc/passwd", "x" * 300, "\0", 3, None, ["x"]):
        yield f"index {target!r:.30}", partial(change_index, target)
    yield "adapter", change_adapter
    yield "compressed weights", change_archive
    for name, parts in TOKENIZERS.items():
        yield f"a tokenizer that {name}", partial(change_tokenizer, parts)
    for kind in (
        "length",
        "offsets",
        "shape",
        "dtype",
        "names",
        "type",
        "null",
        "80 MB",
        "many names",
    ):
        yield f"header {kind}", partial(change_header, kind)
    for kind in ("fewer rows", "nothing", "integers", "more", "lost", "nan"):
        yield f"tensors {kind}", partial(change_tensors, kind)


def use(folder):
    """Load a backbone and run it on a text."""
    bb = load_backbone(str(folder))
    ids = bb.tokenizer("a cold beer", return_tensors="pt")
    with torch.no_grad():
        h = bb.base(input_ids=ids["input_ids"]).last_hidden_state
    return round(h.abs().sum().item(), 3)


@cache
def unchanged():
    return use(small_backbone())


def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _stop(*_):
    raise _SlowError


def run(change, folder, mark):
    """Return the outcome of one case, and a message."""
    before = megabytes()
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change(folder, mark)
            got = use(folder)
        outcome = ("equal" if got == unchanged() else "another valid model"), str(got)
    except REFUSALS as e:
        outcome = ("refused" if str(e) and "\n" not in str(e) else "not one line"), str(e)
    except _SlowError:
        outcome = "slow", ""
    except Exception as e:
        outcome = "an error that nobody expected", f"{type(e).__name__}: {e}"
    finally:
        signal.alarm(0)
    if mark.exists():
        outcome = "executed", ""
        mark.rmdir()
    if megabytes() - before > MEGABYTES:
        outcome = "too much memory", f"{megabytes() - before:.0f} MB"
    return outcome


def malicious(limit=None, seed=0, words=""):
    """Try folders, `limit` of them drawn by lot; None: all whose names have the words."""
    chosen = [case for case in cases() if words in case[0]]
    if limit is not None:
        chosen = random.Random(seed).sample(chosen, limit)
    seen = Counter()
    bad = []
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "folder"
        unchanged()
        for name, change in chosen:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(small_backbone(), folder)
            (folder / MANIFEST_NAME).unlink()
            outcome, message = run(change, folder, Path(tmp) / "mark")
            seen["backbone folders", outcome] += 1
            if outcome not in ("equal", "refused", "another valid model"):
                bad.append((name, outcome, message[:200]))
    return seen, bad
