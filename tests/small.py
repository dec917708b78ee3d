"""Small models, tasks and configs for the tests.

Models have three layers of 32 dimensions, random weights and the bundled tokenizer.
"""

import json
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from tokenizers import AddedToken, ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunOptions
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.data.user_data import make_task
from idp_tutorial.families.family import wrap_hf_model
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.utils.process import handle_messages

BASE_MODELS = dict(roberta="roberta-base", gpt2="gpt2", deberta="deberta-large")
SIZES = dict(vocab_size=8192, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)

# one method or two of each kind; several tests that train take the others weekly
DAILY_METHODS = (
    "head-only",
    "prompt-tuning",
    "p-tuning-v2",
    "m-idpg-phm",
    "m-idpg-phm-glove",
    "lpt-appg",
    "smop",
    "dept",
    "shadow",
    "lora",
    "adapterdrop",
    "efl",
    "fine-tuning",
)
assert {*DAILY_METHODS} <= {*METHODS}
EACH_METHOD = [
    m if m in DAILY_METHODS else pytest.param(m, marks=pytest.mark.slow) for m in METHODS
]


@contextmanager
def call_with_messages(function):
    """Call a function with every progress message of the package."""
    handler = logging.Handler()
    handler.emit = lambda record: function(record.getMessage())
    with handle_messages(handler):
        yield


@cache
def _build_backbone(family, std, **kw):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if family == "bert":
            tokenizer = load_backbone("roberta-base", weights="meta", **SIZES).tokenizer
            bb = wrap_hf_model(
                BertForMaskedLM._from_config(
                    BertConfig(**SIZES, intermediate_size=64), attn_implementation="sdpa"
                ),
                tokenizer,
                "bert",
            )
        else:
            bb = load_backbone(
                BASE_MODELS[family],
                weights="random",
                **SIZES,
                **kw,
                **({} if family == "gpt2" else dict(intermediate_size=64)),
            )
        for p in bb.model.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=std)
            else:
                p.data.add_(0.1 * torch.randn_like(p))
    return bb


def backbone(family="roberta", std=0.2, **kw):
    """Return a new frozen backbone, whose weights are large enough for differences to show.

    The tokenizer is shared with other backbones of the same family.
    """
    bb = _build_backbone(family, std, **kw)
    return wrap_hf_model(deepcopy(bb.model), bb.tokenizer, bb.name)


def small_task(name="sentiment", train=64, validation=24, test=24):
    """Return a synthetic task with few examples in each split."""
    sizes = dict(train=train, validation=validation, test=test)
    splits = {split: make_rows(name, split, n=size) for split, size in sizes.items()}
    return replace(TASKS[name], splits=splits)


TOPIC_WORDS = {  # words of a topic; a text has any number of topics
    "food": ("pizza", "bread", "soup"),
    "money": ("bank", "dollar", "price"),
    "sport": ("football", "tennis", "goal"),
}


def make_topic_texts(n, seed=0):
    """Return texts with words of some topics, and the names of the topics of each text."""
    rng = random.Random(seed)
    texts = []
    topics = []
    for _ in range(n):
        names = [name for name in TOPIC_WORDS if rng.random() < 0.4]
        words = [rng.choice(TOPIC_WORDS[name]) for name in names] + ["the", "film", "is"]
        rng.shuffle(words)
        texts.append(" ".join(words))
        topics.append(names)
    return texts, topics


def topic_task(train=96, validation=24, test=24):
    """Return a task whose rows may have several labels, the topics of `make_topic_texts`."""
    texts, topics = make_topic_texts(train + validation + test)
    rows = [dict(sentence1=text, label=names) for text, names in zip(texts, topics)]
    splits = dict(
        train=rows[:train],
        validation=rows[train : train + validation],
        test=rows[train + validation :],
    )
    return make_task("topics", splits)


def config(method="lpt-npg", **kw):
    """Return the config of a run of a few seconds; keyword arguments replace its options.

    An option that the method does not have is left out.
    """
    options = RunOptions(
        prompt_length=4,
        bottleneck=8,
        steps=4,
        batch_size=16,
        eval_every=2,
        device="cpu",
        lr=1e-2,
    )
    return options.with_options(**kw).with_method(method)


def model_of(method, bb, task=None, head="classification", jolt=0.1, **kw):
    """Return a model of `METHODS` in eval mode.

    All trainable tensors except those of the head are moved by noise of standard deviation `jolt`,
    because some of them are initialised to zero.
    """
    model = build_model(config(method=method, head=head, **kw), bb, task or small_task())
    edited = [p for p in model.lm.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in [*model.sources.parameters(), *edited]:
            p.add_(jolt * torch.randn_like(p))
    return model.eval()


def batch_of(bb, task=None, n=6, template=None, split="train"):
    """Return a padded batch of the first `n` examples of a split."""
    task = task or small_task()
    examples = task.encode(task.splits[split][:n], bb.tokenizer, 60, template)
    return collate(examples, bb.tokenizer.pad_token_id)


TOKEN_FIELDS = ("input_ids", "attention_mask", "token_type_ids")


def text_of(batch):
    """Return the input fields of a batch, without what earlier passes added to it."""
    fields = (*TOKEN_FIELDS, "mask_position", "label")
    return {name: value for name, value in batch.items() if name in fields}


def one(batch, i):
    """Return example `i` as a batch of one, without its padding."""
    length = int(batch["attention_mask"][i].sum())
    example = {name: value[i : i + 1] for name, value in text_of(batch).items()}
    return {
        name: value[:, :length] if name in TOKEN_FIELDS else value
        for name, value in example.items()
    }


def same(a, b, atol=1e-5, rtol=1e-5):
    """Assert that two tensors are equal up to float32 rounding."""
    torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


def refused(function, *words, error=ValueError):
    """Assert that a call raises an error whose message has all of the words."""
    with pytest.raises(error) as e:
        function()
    assert all(word in str(e.value) for word in words), str(e.value)


def count_passes(bb, function):
    """Return how often the first layer of a backbone runs during a call."""
    calls = []
    hook = bb.layers[0].register_forward_hook(lambda *a: calls.append(1))
    function()
    hook.remove()
    return len(calls)


def in_threads(function, arguments):
    """Call a function with each argument at once, each in a thread of its own."""
    barrier = threading.Barrier(len(arguments))

    def call(argument):
        barrier.wait(60)
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return [*pool.map(call, arguments)]


FAMILY = ("roberta", "bert", "gpt2", "deberta")
cached_backbone = cache(backbone)


def setting(family="roberta", n=24, head="classification", name="sentiment"):
    """Return a cached backbone, a task, `n` of its encoded examples and an untrained head."""
    bb = cached_backbone(family)
    task = small_task(name)
    template = "code" if head == "verbalizer" else None
    examples = task.encode(task.splits["train"][:n], bb.tokenizer, 60, template)
    torch.manual_seed(0)
    if head == "verbalizer":
        return bb, task, examples, VerbalizerHead(bb, task.word_ids(bb.tokenizer))
    return bb, task, examples, ClassificationHead(bb.d, len(task.labels), "mean")


class Killed(BaseException):
    """A process that was killed; no `except Exception` catches it."""


def stop_at(monkeypatch, n):
    """Interrupt training before its nth step; return a list that grows by one with each step."""
    from idp_tutorial.training.fit import TrainingRun

    original_step = TrainingRun.step
    calls = []

    def step(run):
        calls.append(1)
        if len(calls) == n:
            raise KeyboardInterrupt
        original_step(run)

    monkeypatch.setattr(TrainingRun, "step", step)
    return calls


def kill_at(model, step):
    """Raise `Killed` in the model's nth computation of a loss; return a list of the calls."""
    calls = []
    original_forward = model.forward

    def forward(batch, return_loss=False):
        if return_loss:
            calls.append(1)
            if len(calls) == step:
                raise Killed
        return original_forward(batch, return_loss)

    model.forward = forward
    return calls


def numbers(log):
    """Return the part of a log that two runs of one config share, which excludes times."""
    return log.losses, log.history, log.validation_losses, log.validation, log.steps


_TIMES = ("ms_per_step", "peak_memory_mb", "provenance", "learning_rates_tried", "lr_at_grid_edge")


def without_times(record):
    """Return the fields of a record that two runs of one config share."""
    return {name: value for name, value in record.items() if name not in _TIMES}


YES_NO = Task("mine", labels=("no", "yes"), label_words=("No", "Yes"))
YES_NO_PAIRS = Task("pair", labels=("no", "yes"), pair=True)
YES_NO_ROWS = [dict(sentence1=f"sentence number {i} .", label=i % 2) for i in range(60)]


def write_splits(folder, **splits):
    """Write rows or records of each split to `folder/SPLIT.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def sentences_of(rows):
    """Return the set of first sentences of rows."""
    return {row["sentence1"] for row in rows}


def toy_tokenizer(causal=False):
    """Return a byte-level tokenizer of 900 tokens, of a masked model or of a decoder."""
    text = [
        " ".join(w for t in TASKS.values() for w in t.label_words)
        + " It was They are . , ? : the film is a dull plane taking off",
        " it was great .",
    ]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [" " + t for t in text] * 9,
        vocab_size=900,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<pad>", "<unk>", AddedToken("<mask>", lstrip=True)],
    )
    if causal:
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<unk>"
        )
    bpe._tokenizer.post_processor = RobertaProcessing(
        ("</s>", 1), ("<s>", 0), add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def write_glove(index, vectors, file):
    """Write vectors `[N,d]` in GloVe's text format; `index` has the row of each word."""
    lines = [" ".join([word, *map(str, vectors[row].tolist())]) for word, row in index.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
