"""Several processes, accumulation, Accelerate configs, recipes; memory and FLOPs of real steps."""

import inspect
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import backbone, config, small_task
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import FULL_SCALE_CONFIGS, load_backbone
from idp_tutorial.cli.train import idp_train
from idp_tutorial.core.prompted_model import trained_state
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.efficiency import full_scale as scaling
from idp_tutorial.reproduction.efficiency.full_scale import (
    FULL_SCALE_RECIPES,
    GPU_PEAK_FLOPS,
    estimate_memory,
    estimate_step_flops,
    largest_batch,
    seconds_per_step,
)
from idp_tutorial.reproduction.pretraining.bundled_backbone import save_backbone
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training import fit as training
from idp_tutorial.training.distributed import end_process_group, iterate_step_batches
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.snapshots import read_last_snapshot

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"


def disable_dropout(model):
    """Disable all dropout, since two processes draw other random numbers than one."""
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        for k in ("dropout", "dropout_prob"):
            if isinstance(getattr(m, k, None), float):
                setattr(m, k, 0.0)
    return model


# the last step of an epoch has 5 examples, and 23 cannot be divided evenly
UNEVEN_SPLITS = dict(train=37, validation=23)


def full_tensor(t):
    """Return the whole of a tensor that FSDP may have sharded."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(method, processes, accumulate=1, save=None, prepare=disable_dropout, **options):
    """Return losses, history and sums of the trained tensors of a short run."""
    cfg = config(
        method=method,
        batch_size=16 // processes // accumulate,
        accumulate=accumulate,
        lr=3e-3,
        steps=4,
        eval_every=2,
        prompt_dropout=0.0,
        **options,
    )
    model = prepare(build_model(cfg, backbone(), small_task()))
    log = fit(model, small_task(**UNEVEN_SPLITS), cfg, checkpoint_dir=save)
    return dict(
        losses=log.losses,
        history=log.history,
        sums=[full_tensor(t).sum().item() for t in trained_state(model).values()],
    )


# --- two processes, which run this file


def run_process(folder):
    """Train in each of two processes, and write the results to `RANK.json`."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results = dict(
        methods={m: train(m, 2) for m in METHODS}, accumulated=train("lpt-npg", 2, accumulate=2)
    )

    def train_with_dropout(**options):
        return train("lpt-npg", 2, prepare=lambda model: model, **options)

    results["with dropout"] = train_with_dropout()
    original_step = training.TrainingRun.step
    calls = []

    def killed_step(run):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        original_step(run)

    training.TrainingRun.step = killed_step
    try:
        train_with_dropout(save=folder / "run")
    except KeyboardInterrupt:
        results["killed"] = len(calls)
    training.TrainingRun.step = original_step
    results["resumed"] = train_with_dropout(save=folder / "run")
    try:
        train_with_dropout(save=folder / "one-process")
    except ValueError as e:
        results["other number of processes"] = str(e)
    if rank == 0:
        shutil.copytree(folder / "run", folder / "run0")  # as on a disk of the first machine only
    try:
        train_with_dropout(save=folder / f"run{rank}")
    except ValueError as e:
        results["different folders"] = str(e)
    enable_fsdp()
    results["sharded"] = {m: train(m, 2) for m in SHARDED}
    try:
        train("lpt-npg", 2, save=folder / "shards")
    except ValueError as e:
        results["no checkpoints"] = str(e)
    cfg = config(backbone=str(folder / "backbone"), batch_size=8, lr=3e-3, eval_every=2)
    model = disable_dropout(build_model(cfg, load_backbone(cfg.backbone), small_task()))
    results["wrapped"] = fit(model, small_task(**UNEVEN_SPLITS), cfg).losses
    results["module types"] = sorted(
        {type(m).__name__ for m in model.modules() if type(m).__name__.startswith("FSDP")}
    )
    save_pretrained(model, folder / "prompts", small_task(), cfg)
    (folder / f"{rank}.json").write_text(json.dumps(results))


SHARDED = ("lpt-npg", "s-idpg-phm", "fine-tuning")


def enable_fsdp():
    """Use FSDP as in configs/fsdp.yaml, but on CPUs, which the launcher does not support."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = training.create_accelerator
    os.environ.update(
        {k: v for k, v in launch_environment("fsdp")[1].items() if k.startswith("FSDP")}
    )

    def create_accelerator(cfg):
        acc = original(cfg)
        AcceleratorState._shared_state.update(
            distributed_type=DistributedType.FSDP, fsdp_plugin=FullyShardedDataParallelPlugin()
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        return acc

    training.create_accelerator = create_accelerator
    # the profiler does not count the bytes of shards
    training.StepProfiler.track_activations = lambda self, n_tokens: torch.enable_grad()
    training.StepProfiler.peak_memory_mb = lambda self: 0.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    train("lpt-npg", 1, save=folder / "one-process")
    bb = backbone()
    save_backbone(bb.model, bb.tokenizer, folder / "backbone")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, folder],
            stderr=subprocess.PIPE,
            text=True,
            env={**env, "RANK": r, "LOCAL_RANK": r},
        )
        for r in "01"
    ]
    errors = [p.communicate(timeout=240)[1] for p in workers]
    codes = [p.returncode for p in workers]
    assert codes == [0, 0], f"exit codes of the two workers: {codes}\n" + "\n".join(errors)
    assert not any(
        "terminate called" in e or "destroy_process_group() was not called" in e for e in errors
    ), errors
    return (
        json.loads((folder / "0.json").read_text()),
        json.loads((folder / "1.json").read_text()),
        folder,
    )


def assert_same_run(a, b):
    """Compare losses with a tolerance for rounding, and the validation scores."""
    assert a["losses"] == pytest.approx(b["losses"], abs=1e-5) and [*map(tuple, a["history"])] == [
        *map(tuple, b["history"])
    ]


# SMoP draws noise in training
@pytest.mark.parametrize("method", [m for m in METHODS if m != "smop"])
def test_two_processes_are_one_with_the_same_texts(method, pair):
    a = pair[0]["methods"][method]
    b = pair[1]["methods"][method]
    assert a == b  # losses are means over both, tensors are the same
    one = train(method, 1)
    assert_same_run(a, one)
    assert a["losses"][0] != a["losses"][1]
    if method not in ("fine-tuning", "efl", "bitfit", "lora-all"):
        # where a gradient is zero, AdamW turns rounding errors into steps
        assert a["sums"] == pytest.approx(one["sums"], abs=1e-4)


def test_processes_draw_their_own_noise(pair):
    assert pair[0]["methods"]["smop"] == pair[1]["methods"]["smop"]
    assert pair[0]["with dropout"] == pair[1]["with dropout"] != pair[0]["methods"]["lpt-npg"]


def test_a_process_group_ends_when_the_interpreter_exits(monkeypatch):
    """A group is destroyed once; nothing happens if there is none."""
    calls = []
    end_process_group()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append(1))
    end_process_group()
    assert calls == [1]


def test_two_processes_accumulate_gradients(pair):
    assert_same_run(pair[0]["accumulated"], train("lpt-npg", 1))
    assert pair[0]["accumulated"] == pair[1]["accumulated"]


def test_two_killed_processes_resume(pair):
    for p in pair[:2]:
        assert p["killed"] == 4 and p["resumed"] == p["with dropout"]  # dropout of both included
    assert len(read_last_snapshot(pair[2] / "run")["random_states"]) == 2


def test_checkpoints_that_do_not_fit_are_refused_by_both_processes(pair):
    for p in pair[:2]:
        assert "processes was 1 and is now 2" in p["other number of processes"]
        assert "processes read different checkpoints" in p["different folders"]
        assert "(steps [4, 0])" in p["different folders"]


@pytest.mark.parametrize("method", SHARDED)
def test_sharded_processes_equal_one_process(method, pair):
    a = pair[0]["sharded"][method]
    b = pair[1]["sharded"][method]
    assert a == b
    one = train(method, 1)
    assert_same_run(a, one)
    if method != "fine-tuning":
        assert a["sums"] == pytest.approx(one["sums"], abs=1e-4)


def test_a_sharded_model_is_saved_as_a_whole(pair):
    for p in pair[:2]:
        assert "not supported with FSDP" in p["no checkpoints"]
        assert p["module types"] == [
            "FSDPPromptedModel",
            "FSDPRobertaLayer",
        ]
    model, task, cfg = from_pretrained(pair[2] / "prompts", str(pair[2] / "backbone"))
    one = disable_dropout(build_model(cfg, load_backbone(str(pair[2] / "backbone")), task))
    log = fit(one, small_task(**UNEVEN_SPLITS), replace(cfg, batch_size=16))
    assert pair[0]["wrapped"] == pytest.approx(log.losses, abs=1e-5)
    for n, t in trained_state(one).items():
        torch.testing.assert_close(trained_state(model)[n], t, atol=1e-4, rtol=0)


# --- the examples of a step


class Process:
    """Index and number of processes."""

    def __init__(self, i, n):
        self.process_index = i
        self.num_processes = n


@pytest.mark.parametrize("size,n,a", [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2)])
@pytest.mark.parametrize("n_examples", [3, 16, 21])
def test_the_examples_of_a_step(size, n, a, n_examples):
    """A step has the same examples for any number of parts; each epoch has each example once."""
    rows = [
        dict(input_ids=[i + 5] * (1 + i % 7), token_type_ids=[0] * (1 + i % 7))
        for i in range(n_examples)
    ]
    per_epoch = -(-n_examples // 8)

    def steps(size, n, a):
        iterators = [
            iterate_step_batches(Process(i, n), rows, config(batch_size=size, accumulate=a), 0)
            for i in range(n)
        ]
        return [[p for g in iterators for p in next(g)] for _ in range(2 * per_epoch)]

    def ids(step):
        return sorted(i for b, w in step if w for i in b["input_ids"][:, 0].tolist())

    parts = steps(size, n, a)
    one = steps(8, 1, 1)
    epoch_ids = [i for step in parts[:per_epoch] for i in ids(step)]
    assert [*map(ids, parts)] == [*map(ids, one)]
    assert sorted(epoch_ids) == [i + 5 for i in range(n_examples)]
    for step in parts:
        total = sum(len(b["input_ids"]) for b, w in step if w)
        assert (
            len(step) == n * a
            and all(
                w == 0 or w == pytest.approx(len(b["input_ids"]) * n * a / total) for b, w in step
            )
            and all(len(b["input_ids"]) <= size for b, w in step)
        )


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("head", ["classification", "verbalizer"])
def test_parts_are_weighted_as_the_loss_is(accumulate, head):
    """The loss has class weights, or is a mean over tokens of answers."""
    options = dict(class_weight={"positive": 7}, head=head)
    assert_same_run(
        train("lpt-npg", 1, accumulate=accumulate, **options), train("lpt-npg", 1, **options)
    )
    task = replace(load_task("in-short", shots=37), max_answer_len=8)

    def generation_losses(n):
        cfg = config(
            method="lpt-npg",
            backbone="tiny-gpt2",
            batch_size=8 // n,
            accumulate=n,
            steps=3,
            eval_every=3,
            prompt_dropout=0.0,
            max_len=48,
        )
        small = replace(task, splits={**task.splits, "validation": task.splits["validation"][:4]})
        return torch.tensor(
            fit(disable_dropout(build_model(cfg, load_backbone(cfg.backbone), small)), small, cfg)[
                "losses"
            ]
        )

    if head == "classification":
        torch.testing.assert_close(
            generation_losses(accumulate), generation_losses(1), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("accumulate", [2, 4, 16])
def test_accumulation_over_the_end_of_an_epoch(accumulate):
    assert_same_run(train("lpt-npg", 1, accumulate=accumulate), train("lpt-npg", 1))


def test_another_precision_than_that_of_the_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(
        ValueError, match=r"launch` was started with precision 'bf16', .* has precision='no'"
    ):
        train("lpt", 1)
    train("lpt", 1, precision="bf16")


# --- configs


def launch_environment(name):
    """Return arguments and environment that `accelerate launch` derives from a config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args, *_ = _validate_launch_command(
        launch_command_parser().parse_args(
            [
                "--config_file",
                str(CONFIGS / f"{name}.yaml"),
                str(CONFIGS / "train.py"),
                "--task",
                "rte",
            ]
        )
    )
    if args.multi_gpu or args.use_fsdp:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize(
    "name,kind", [("one_gpu_bf16", (False, False)), ("ddp", (True, False)), ("fsdp", (False, True))]
)
def test_configs_are_read_by_the_launcher(name, kind):
    args, env = launch_environment(name)
    assert (
        (args.multi_gpu, args.use_fsdp) == kind
        and not args.cpu
        and args.training_script_args == ["--task", "rte"]
    )
    assert (
        env["ACCELERATE_MIXED_PRECISION"] == "bf16"
        and env.get("ACCELERATE_USE_FSDP", "false") == str(name == "fsdp").lower()
        and args.num_processes == (1 if name == "one_gpu_bf16" else 2)
    )


def test_fsdp_wraps_the_layers_of_backbones(monkeypatch):
    from accelerate import FullyShardedDataParallelPlugin

    for k, v in launch_environment("fsdp")[1].items():
        monkeypatch.setenv(k, v)
    plugin = FullyShardedDataParallelPlugin()
    model = build_model(config(method="lpt-npg"), backbone(), small_task())
    plugin.set_auto_wrap_policy(model)
    assert (
        plugin.fsdp_version == 2
        and plugin.reshard_after_forward
        and not plugin.cpu_ram_efficient_loading
    )
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {
        type(l) for l in model.backbone.layers
    }
    for family in ("gpt2", "deberta"):
        # the layers of other families are named in a comment
        assert type(backbone(family).layers[0]).__name__ in (CONFIGS / "fsdp.yaml").read_text()


def test_options_in_scripts_exist(monkeypatch, capsys):
    known = {f"--{k}" for k in inspect.signature(idp_train).parameters}
    used = set()
    for f in [*CONFIGS.glob("*.*"), ROOT / "nbs/engine/efficiency/full_scale.ipynb"]:
        for line in re.findall(
            r"(?:configs/train\.py|train\.slurm|^#? +--)(.*)", f.read_text(), re.M
        ):
            used |= {*re.findall(r"--\w+", line.split("\\n")[0])}
    assert (
        {"--task", "--backbone", "--batch_size", "--save_every", "--out", "--data"}
        <= used
        <= known | {"--help"}
    )
    script = CONFIGS / "train.slurm"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(CONFIGS / "train.py"), run_name="__main__")
    assert "--save_every" in capsys.readouterr().out


# --- recipes


@pytest.mark.parametrize("name", FULL_SCALE_RECIPES)
def test_recipes_build(name):
    cfg = FULL_SCALE_RECIPES[name]
    model = build_model(cfg, load_backbone(cfg.backbone, "meta"), TASKS["sentiment"])
    n = sum(p.numel() for p in model.sources.parameters())
    assert (
        n
        == {
            "lpt-roberta": 791_680,
            "lpt-gpt2": 989_568,
            "lpt-deberta": 791_680,
            "idpg-single": 111_872,
            "idpg-multi": 137_232,
            "id-spam": 3 * 1024**2 + 64 * 1024 * 11,
        }[name]
    )
    assert model.first_trained_layer == (
        {"roberta-large": 12, "gpt2-large": 18, "deberta-large": 12}[cfg.backbone]
        if cfg.layer
        else -1
    )


# --- memory and FLOPs

SMALL = dict(roberta="roberta-base", gpt2="gpt2", deberta="deberta-large")


@pytest.fixture(params=SMALL)
def small(request, monkeypatch):
    """Register a configuration of five layers of 32 dimensions; return its family and a builder."""
    family = request.param
    sizes = dict(
        hidden_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        vocab_size=8192,
        **({} if family == "gpt2" else dict(intermediate_size=64)),
    )
    published_config = FULL_SCALE_CONFIGS[SMALL[family]]

    def small_config():
        c = published_config()
        c.update(sizes)
        return c

    monkeypatch.setitem(FULL_SCALE_CONFIGS, "small", small_config)
    scaling._fit_memory_polynomial.cache_clear()
    return family, lambda cfg, **kw: build_model(
        cfg, load_backbone("small", "random", **kw), TASKS["sentiment"]
    ).train()


def saved_activations(model, B, T):
    return scaling._measure_saved_activations(model, B, T, "no")


ALL_KINDS = [
    ("fine-tuning", None),
    ("prompt-tuning", None),
    ("m-idpg-phm", None),
    ("lpt-npg", 3),
    ("lpt-appg", 2),
    ("id-spam", 0),
    ("lora", None),
    ("adapterdrop", 2),
    ("bitfit", None),
    ("head-only", None),
]
MAIN_KINDS = [("fine-tuning", None), ("m-idpg-phm", None), ("lpt-npg", 3)]


@pytest.mark.parametrize(
    "small,method,layer",
    [(f, m, k) for f in SMALL for m, k in (ALL_KINDS if f == "roberta" else MAIN_KINDS)],
    indirect=["small"],
)
def test_estimated_memory_equals_that_of_a_step(method, layer, small):
    _, make = small
    cfg = RunConfig(
        method,
        backbone="small",
        prompt_length=4,
        bottleneck=8 if method != "adapterdrop" else 4,
        layer=layer,
    )
    for fused in (True, False):
        real = make(
            cfg,
            **(scaling.fused_attention_overrides(FULL_SCALE_CONFIGS["small"]()) if fused else {}),
        )
        memory = estimate_memory(cfg, 5, 37, fused)
        assert memory["activations"] == pytest.approx(saved_activations(real, 5, 37), rel=0.01)
    assert memory["weights"] == sum(p.nbytes for p in real.parameters()) and memory[
        "optimizer"
    ] == 2 * memory["gradients"] == 2 * sum(p.nbytes for p in real.trained_parameters().values())
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


@pytest.mark.parametrize("small", ["roberta", "gpt2"], indirect=True)
def test_memory_of_a_verbalizer_and_of_bf16_is_estimated(small):
    _, make = small
    cfg = RunConfig("lpt", backbone="small", prompt_length=4, layer=2, head="verbalizer")
    real = make(cfg, **scaling.fused_attention_overrides(FULL_SCALE_CONFIGS["small"]()))
    assert estimate_memory(cfg, 3, 29)["activations"] == pytest.approx(
        saved_activations(real, 3, 29), rel=0.01
    )
    bf16_cfg = replace(cfg, precision="bf16")
    assert estimate_memory(bf16_cfg, 3, 29)["activations"] == pytest.approx(
        scaling._measure_saved_activations(real, 3, 29, "bf16"), rel=0.01
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("small", ["roberta"], indirect=True)
def test_estimated_memory_equals_that_of_fit(small, dtype):
    """Compare with `peak_memory_mb` of a run on texts of the same length."""
    cfg = RunConfig(
        "lpt-npg",
        backbone="small",
        prompt_length=4,
        bottleneck=8,
        layer=2,
        steps=2,
        eval_every=2,
        batch_size=8,
        lr=1e-3,
        device="cpu",
        dtype=dtype,
    )
    model = small[1](cfg, dtype=dtype)
    task = small_task()
    e = task.encode([dict(sentence1="a " * 40, label=0)], model.backbone.tokenizer)[0]
    n = len(e["input_ids"])
    task = replace(
        task,
        splits={
            s: [dict(sentence1="a " * 40, label=i % 2) for i in range(16)] for s in task.splits
        },
    )
    assert fit(model, task, cfg).peak_memory_mb == pytest.approx(
        estimate_memory(cfg, 8, n, uses_fused_attention=False)["total"] / 1e6, rel=0.01
    )


@pytest.mark.parametrize("small", ["roberta"], indirect=True)
def test_the_largest_batch_fits_and_a_larger_one_does_not(small):
    cfg = RunConfig("prompt-tuning", backbone="small", prompt_length=4)
    n = largest_batch(cfg, 64, 2.0)
    fixed = estimate_memory(cfg, 1, 64)["total"] - estimate_memory(cfg, 1, 64)["activations"]

    def required_bytes(b):
        return fixed + 1.1 * estimate_memory(cfg, b, 64)["activations"]

    assert (
        n > 10
        and required_bytes(n) <= 0.5e9 < required_bytes(n + 1) + 1e4
        and largest_batch(cfg, 64, 1.0) == 0
        and largest_batch(cfg, 128, 2.0) < n / 1.9
    )


@pytest.mark.parametrize(
    "method,layer,backbone_name",
    [
        ("fine-tuning", None, "roberta-base"),
        ("prompt-tuning", None, "roberta-base"),
        ("s-idpg-dnn", None, "roberta-base"),
        ("lpt-npg", 3, "roberta-base"),
        ("head-only", None, "roberta-base"),
        ("bitfit", None, "roberta-base"),
        ("prompt-tuning", None, "gpt2-large"),
        ("prompt-tuning", None, "llama-3.2-1b"),
        ("lpt-npg", 3, "gemma-2b"),
    ],
    ids=str,
)
def test_estimated_flops_equal_those_of_a_step(method, layer, backbone_name, monkeypatch):
    """PyTorch counts those of a real step; head and generator are not in the estimate."""

    def small_config():
        c = published_config()
        c.update(
            dict(
                hidden_size=128,
                num_hidden_layers=5,
                num_attention_heads=4,
                intermediate_size=512,
                vocab_size=8192,
            )
            | extra_sizes
        )
        return c

    # fewer keys than queries, and heads that are larger than d / n_heads
    extra_sizes = {}
    if backbone_name.startswith(("llama", "gemma")):
        extra_sizes = dict(num_key_value_heads=2, head_dim=48)
    published_config = FULL_SCALE_CONFIGS[backbone_name]
    monkeypatch.setitem(FULL_SCALE_CONFIGS, "small", small_config)
    scaling._count_work.cache_clear()
    cfg = RunConfig(method, backbone="small", prompt_length=4, bottleneck=8, layer=layer)
    model = build_model(
        cfg, load_backbone("small", "random", attn="eager"), TASKS["sentiment"]
    ).train()
    from idp_tutorial.data.encoding import collate

    with FlopCounterMode(display=False) as count:
        model(collate(scaling._make_examples(model, 3, 60), 1), return_loss=True).backward()
    assert estimate_step_flops(cfg, 3, 60) == pytest.approx(count.get_total_flops(), rel=0.03)


def test_seconds_are_flops_by_speed():
    cfg = RunConfig("lpt-npg", backbone="roberta-large", layer=12)
    assert seconds_per_step(cfg, 32, 256, "A100", 0.5) == pytest.approx(
        estimate_step_flops(cfg, 32, 256) / (0.5 * GPU_PEAK_FLOPS["A100"])
    ) and seconds_per_step(cfg, 64, 256) == pytest.approx(2 * seconds_per_step(cfg, 32, 256))


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match="unknown full-scale backbone 'roberta-larg': did you mean 'roberta-large'"
    ):
        estimate_memory(RunConfig(backbone="roberta-larg"), 1, 8)
    with pytest.raises(ValueError, match="unknown GPU 'A10': did you mean 'A100'"):
        seconds_per_step(RunConfig(backbone="roberta-base"), 1, 8, "A10")
    with pytest.raises(
        ValueError, match="batch_size and sequence_length must be at least 1, got 0 and 8"
    ):
        estimate_memory(RunConfig(backbone="roberta-base"), 0, 8)


def test_prompt_vectors_cost_nothing_below_the_prompt_layer():
    def flops_of_one_vector(layer):
        return estimate_step_flops(
            replace(FULL_SCALE_RECIPES["lpt-roberta"], layer=layer, prompt_length=6), 1, 64
        ) - estimate_step_flops(
            replace(FULL_SCALE_RECIPES["lpt-roberta"], layer=layer, prompt_length=5), 1, 64
        )

    assert flops_of_one_vector(12) == 2 * flops_of_one_vector(18) > 0


def test_the_largest_batch_has_a_margin_for_activations(monkeypatch):
    monkeypatch.setattr(
        scaling,
        "estimate_memory",
        lambda cfg, b, *a: dict(activations=(10 + b) * 1e9, total=(12 + b) * 1e9),
    )
    assert (
        largest_batch(None, 64, gpu_memory_gb=24.5, reserved_gb=0.0) == 10
    )  # 2 + 1.1*(10+10) = 24


if __name__ == "__main__":
    run_process(Path(sys.argv[1]))
