"""Export the models of the page *Playground*, and take its runtime from npm.

    python docs/playground.py

The files go into `docs/_build/live/playground`, which `make docs` copies into the site.
The page runs the bundled model in the reader's browser, one layer at a time as `core.loop` does,
so that a prompt can enter before any layer. Every graph is exported with `torch.onnx` from the
package: word vectors, embeddings, each layer, the head of each task, and each trained generator of
`results/playground`. Weights that float16 represents exactly are stored so. `manifest.json` lists
the files with their sizes and digests.
"""

import argparse
import copy
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.tasks import load_task
from idp_tutorial.data.templates import split_template
from idp_tutorial.utils.digests import asset_path

DOCS_FOLDER = Path(__file__).resolve().parent
ROOT = DOCS_FOLDER.parent
OUTPUT_FOLDER = DOCS_FOLDER / "_build/live/playground"
RESULTS = ROOT / "results/playground"
# file of a npm package → file on the site
RUNTIME_FILES = {
    "onnxruntime-web/dist/ort.wasm.bundle.min.mjs": "ort.wasm.bundle.min.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
    "@huggingface/tokenizers/dist/tokenizers.min.mjs": "tokenizers.min.mjs",
    "@huggingface/tokenizers/LICENSE": "LICENSE.tokenizers.txt",
}
MAX_TOKENS = 120  # of a text with its template; the model has positions for 256
READS = {"lpt-npg": "state", "id-spam": "words", "s-idpg-phm": "sentence"}


def load_training() -> ModuleType:
    """Return `results/playground/train.py` as a module."""
    spec = importlib.util.spec_from_file_location("playground_train", RESULTS / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the parts of the model as modules with tensors as arguments


class WordVectors(nn.Module):
    """Token ids `[1,T]` → word vectors `[1,T,d]`."""

    def __init__(self, bb: Backbone) -> None:
        super().__init__()
        self.word_embeddings = bb.word_embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the vectors."""
        return self.word_embeddings(ids)


class Embeddings(nn.Module):
    """Word vectors `[1,T,d]` → input of the first layer."""

    def __init__(self, bb: Backbone) -> None:
        super().__init__()
        self.backbone = bb
        self.module = bb.base.embeddings

    def forward(self, words: Tensor) -> Tensor:
        """Add positions and normalise."""
        ones = torch.ones_like(words[..., 0], dtype=torch.long)
        return self.backbone.embed(words, ones, ones - 1)


class Layer(nn.Module):
    """Hidden states `[1,T,d]` before a layer → after it."""

    def __init__(self, bb: Backbone, index: int) -> None:
        super().__init__()
        self.backbone = bb
        self.index = index
        self.module = bb.layers[index]

    def forward(self, h: Tensor) -> Tensor:
        """Run the layer; one text has no padding, so it needs no mask."""
        kwargs = {kind: dict(attention_mask=None) for kind in set(self.backbone.layer_types)}
        return self.backbone.run_layer(self.index, h, kwargs)


class Head(nn.Module):
    """Final hidden state `[1,d]` at the mask → logits of the label words `[1,C]`."""

    def __init__(self, bb: Backbone, label_token_ids: list[int]) -> None:
        super().__init__()
        self.head = copy.deepcopy(bb.get_lm_head())
        decoder = self.head.decoder
        rows = nn.Linear(bb.d, len(label_token_ids))
        with torch.no_grad():
            rows.weight.copy_(decoder.weight[label_token_ids])
            rows.bias.copy_(decoder.bias[label_token_ids])
        self.head.decoder = rows

    def forward(self, state: Tensor) -> Tensor:
        """Apply the frozen language-model head, cut to the label words."""
        return self.head(state)


class Scale(nn.Module):
    """The standardiser of a trained generator, with its statistics as constants."""

    def __init__(self, standardiser: Any) -> None:
        super().__init__()
        # as in `RunningStandardiser`, digit by digit: a variance is a difference of large numbers
        mean = standardiser.total / standardiser.n
        least = (1e-7 * mean.square()).clamp(min=1e-8)
        variance = standardiser.square / standardiser.n - mean.square()
        self.register_buffer("mean", mean)
        self.register_buffer("std", variance.maximum(least).sqrt())

    def forward(self, z: Tensor) -> Tensor:
        """Standardise."""
        return (z - self.mean) / self.std


class StateGenerator(nn.Module):
    """NPG: hidden state at `<s>` `[1,d]` → prompt `[1,t,d]`."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.scale = Scale(source.scale)

    def forward(self, state: Tensor) -> Tensor:
        """Generate the prompt (LPT Eq. 1 and 2)."""
        p = self.source.up(self.source.down(self.scale(state)).relu())
        return p.unflatten(-1, (-1, self.source.d))


class SentenceGenerator(nn.Module):
    """IDPG: sentence vector `[1,d]` → prompt `[1,t,d]`."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.generator = source.generator
        self.scale = Scale(source.read.scale)

    def forward(self, sentence: Tensor) -> Tensor:
        """Generate the prompt (IDPG §3.1)."""
        return self.generator(self.scale(sentence))


class WordGenerator(nn.Module):
    """ID-SPAM: word vectors `[1,T,d]` → prompt `[1,t,d]` and weights of the tokens `[1,T]`."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Generate the prompt (ID-SPAM Eq. 1 and 2)."""
        mask = torch.ones_like(words[..., 0])
        A = self.source.pool(words, mask)
        p = self.source.up(self.source.down(A).relu()).unflatten(-1, (-1, self.source.d))
        return p, self.source.pool.token_weights(words, mask)


class TokenWeights(nn.Module):
    """Attention of ID-SPAM: word vectors `[1,T,d]` → weights of the tokens `[1,T]`."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.pool = source.pool

    def forward(self, words: Tensor) -> Tensor:
        """Return the weights."""
        return self.pool.token_weights(words, torch.ones_like(words[..., 0]))


GENERATORS = {"state": StateGenerator, "sentence": SentenceGenerator, "words": WordGenerator}


# ---- export


def export_graph(
    module: nn.Module,
    example: Tensor,
    file: Path,
    outputs: tuple[str, ...] = ("out",),
    variable_length: bool = True,  # the second dimension of the input is the length of a text
) -> None:
    """Export a module with one input to ONNX; weights become float16 where this is exact."""
    shapes = ({1: torch.export.Dim("T", min=2, max=512)},) if variable_length else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            (example,),
            input_names=["x"],
            output_names=list(outputs),
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(store_in_half(program.model_proto).SerializeToString())


def store_in_half(model: Any) -> Any:
    """Return an ONNX model whose float32 weights are stored in float16, where this is exact.

    The graph computes in float32: each of these weights is cast when the model is loaded.
    """
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for initializer in model.graph.initializer:
        if initializer.data_type != TensorProto.FLOAT or len(initializer.dims) < 1:
            continue
        value = numpy_helper.to_array(initializer)
        with np.errstate(over="ignore"):
            half = value.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), value):
            continue
        name = initializer.name
        initializer.CopyFrom(numpy_helper.from_array(half, f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    names = {node.output[0] for node in casts}
    unchanged = [value for value in model.graph.value_info if value.name not in names]
    del model.graph.value_info[:]
    model.graph.value_info.extend(unchanged)
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for node in model.graph.node:  # stack traces of the exporter
        del node.metadata_props[:]
        node.doc_string = ""
    return model


def export_backbone(bb: Backbone, folder: Path) -> list[str]:
    """Export word vectors, embeddings and layers; return their names in the order of a pass."""
    h = torch.randn(1, 9, bb.d)
    export_graph(WordVectors(bb), torch.arange(9)[None], folder / "words.onnx")
    export_graph(Embeddings(bb), h, folder / "embed.onnx")
    for i in range(bb.n_layers):
        export_graph(Layer(bb, i), h, folder / f"layer-{i}.onnx")
    return ["words", "embed", *(f"layer-{i}" for i in range(bb.n_layers))]


def describe_task(name: str, bb: Backbone, sentences: list[str]) -> dict[str, Any]:
    """Return what the page needs of a task: labels, and its template as token ids and a slot."""
    task = load_task(name)
    tokenizer = bb.tokenizer
    pieces: list[dict[str, Any]] = [dict(ids=[tokenizer.cls_token_id])]
    template = task.template("code", False)
    for piece in split_template(template):
        slot = piece.strip()
        if slot == "{mask}":
            pieces.append(dict(ids=[tokenizer.mask_token_id], mask=True))
        elif slot == "{s1}":
            pieces.append(dict(space=piece.removesuffix(slot)))
        else:
            pieces.append(dict(ids=tokenizer(piece, add_special_tokens=False)["input_ids"]))
    pieces.append(dict(ids=[tokenizer.sep_token_id]))
    return dict(
        labels=list(task.labels),
        words=list(task.label_words),
        template=template,
        pieces=pieces,
        max_tokens=MAX_TOKENS,
        sentences=sentences,
        head=f"head-{name}",
    )


def export_prompt(
    model: PlannedModel, run: dict[str, Any], folder: Path, untrained: PlannedModel | None
) -> dict[str, Any]:
    """Export a trained prompt or generator, and return its entry in the manifest."""
    (source,) = model.sources
    method, d = run["method"], model.backbone.d
    entry = {name: run[name] for name in ("task", "method", "layer", "score", "lr", "steps")}
    if method == "lpt":
        return entry | dict(prompt=source.p.flatten().tolist())
    reads = READS[method]
    place = "input" if run["layer"] is None else run["layer"]
    entry |= dict(file=f"{run['task']}-{method}-{place}", reads=reads)
    is_text = reads == "words"
    example = torch.randn(1, 9, d) if is_text else torch.randn(1, d)
    outputs = ("prompt", "weights") if is_text else ("prompt",)
    file = folder / f"{entry['file']}.onnx"
    export_graph(GENERATORS[reads](source), example, file, outputs, is_text)
    if untrained is not None:
        entry |= dict(untrained=f"{entry['file']}-untrained")
        export_graph(
            TokenWeights(untrained.sources[0]), example, folder / f"{entry['untrained']}.onnx"
        )
    return entry


def export_models(folder: Path) -> dict[str, Any]:
    """Export everything that the page computes with, and return the manifest."""
    training = load_training()
    bb = load_backbone("tiny")
    manifest: dict[str, Any] = dict(
        d=bb.d, n_layers=bb.n_layers, backbone=export_backbone(bb, folder), tasks={}, prompts=[]
    )
    for name in training.TASKS:
        sentences = training.example_sentences(name)
        manifest["tasks"][name] = describe_task(name, bb, sentences)
        head = Head(bb, load_task(name).word_ids(bb.tokenizer))
        export_graph(head, torch.randn(1, bb.d), folder / f"head-{name}.onnx", ("out",), False)
    last_layer = max(layer for method, layer in training.PROMPTS if method == "id-spam")
    for cell in training.cells():
        run = training.find_run(*cell)
        if run is None:
            continue
        model, experiment = training.load_model(*cell)
        shows_words = cell[1:] == ("id-spam", last_layer)  # the panel *Which words?*
        untrained = experiment.build_model().eval() if shows_words else None
        manifest["prompts"].append(export_prompt(model, run, folder, untrained))
    assets = asset_path("lexicons.json").parent / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets / name, folder / name)
    return manifest


# ---- runtime


def install_runtime(folder: Path) -> None:
    """Copy the pinned runtime and tokenizer from npm, with their licences, into a folder."""
    if not shutil.which("npm"):
        raise SystemExit("npm is missing, which provides the runtime of the page: install Node.js")
    work = OUTPUT_FOLDER.parents[1] / "npm"
    work.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(DOCS_FOLDER / "playground" / name, work / name)
    subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"],
        cwd=work,
        check=True,
    )
    for package_file, name in RUNTIME_FILES.items():
        shutil.copy(work / "node_modules" / package_file, folder / name)
    import onnxruntime  # its wheel has the licence, and the notices of what it contains

    licences = Path(onnxruntime.__file__).parent
    shutil.copy(licences / "LICENSE", folder / "LICENSE.onnxruntime.txt")
    shutil.copy(licences / "ThirdPartyNotices.txt", folder / "NOTICES.onnxruntime.txt")


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file of a folder but the manifest."""
    return {
        path.name: dict(
            bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }


def build(folder: Path = OUTPUT_FOLDER, runtime: bool = True) -> dict[str, Any]:
    """Write all files of the live page into a folder, and return the manifest."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest = export_models(folder)
    if runtime:
        install_runtime(folder)
    manifest["versions"] = dict(torch=version("torch"), onnx=version("onnx"))
    lock = json.loads((DOCS_FOLDER / "playground/package-lock.json").read_text(encoding="utf-8"))
    for name in ("onnxruntime-web", "@huggingface/tokenizers"):
        manifest["versions"][name] = lock["packages"][f"node_modules/{name}"]["version"]
    manifest["files"] = list_files(folder)
    text = json.dumps(manifest, separators=(",", ":"))
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return manifest


def total_megabytes(files: Iterable[dict[str, Any]]) -> float:
    """Return the size of files in megabytes."""
    return sum(file["bytes"] for file in files) / 1e6


def main() -> None:
    """Build the files and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-runtime", action="store_true", help="leave out what npm provides")
    args = parser.parse_args()
    manifest = build(runtime=not args.no_runtime)
    for name, file in manifest["files"].items():
        print(f"{file['bytes'] / 1e6:8.3f} MB  {file['sha256'][:16]}  {name}")
    print(f"{total_megabytes(manifest['files'].values()):8.3f} MB  in {OUTPUT_FOLDER}")


if __name__ == "__main__":
    main()
