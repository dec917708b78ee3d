"""Several processes, accumulation, and the configs for Accelerate."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import EACH_METHOD, backbone, config, small_task
from torch import nn
from two_processes import print_stacks_if_stuck, run_two_processes

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli.train import train_command
from idp_tutorial.core.planned_model import trained_state
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training import fit as training
from idp_tutorial.training.distributed import (
    StepProfiler,
    end_process_group,
    iterate_step_batches,
)
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import DivergenceError
from idp_tutorial.utils.tensor_files import read_last_snapshot
from results.pretraining.pretrain import save_backbone

ROOT = Path(__file__).resolve().parents[2]
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
        validation_losses=log.validation_losses,
        sums=[full_tensor(t).sum().item() for t in trained_state(model).values()],
    )


# --- two processes, which run this file


def run_process(folder):
    """Train in each of two processes, and write the results to `RANK.json`."""
    print_stacks_if_stuck()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results = dict(
        methods={m: train(m, 2) for m in json.loads((folder / "methods.json").read_text())},
        accumulated=train("lpt-npg", 2, accumulate=2),
    )

    def train_with_dropout(**options):
        return train("lpt-npg", 2, prepare=lambda model: model, **options)

    results["with dropout"] = train_with_dropout()
    # the largest seed: the other process has a seed of its own too
    results["standardised"] = train("lpt-npg", 2, standardise=True, seed=2**32 - 1)
    results["diverged"] = [fail_in_second_process(e) for e in (DivergenceError, KeyError)]
    results["after divergence"] = train_with_dropout()
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


def fail_in_second_process(error_class):
    """Return the error of a run whose second process alone fails in an evaluation."""
    compute = training.model_outputs

    def fail(*args):
        if os.environ["RANK"] == "1":
            raise error_class("the outputs of this process")
        return compute(*args)

    training.model_outputs = fail
    try:
        train("lpt-npg", 2)
    except Exception as e:
        return type(e).__name__
    finally:
        training.model_outputs = compute


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
def pair(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("two")
    test = "test_two_processes_are_one_with_the_same_texts"
    selected = {item.name for item in request.session.items}
    selected |= {f"{test}[smop]", f"{test}[lpt-npg]"}  # other tests read them
    methods = [m for m in METHODS if f"{test}[{m}]" in selected]
    (folder / "methods.json").write_text(json.dumps(methods))
    train("lpt-npg", 1, save=folder / "one-process")
    bb = backbone()
    save_backbone(bb.model, bb.tokenizer, folder / "backbone")
    errors = run_two_processes(__file__, folder)
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
    assert a["validation_losses"] == pytest.approx(b["validation_losses"], abs=1e-5)
    assert a["losses"] == pytest.approx(b["losses"], abs=1e-5) and [*map(tuple, a["history"])] == [
        *map(tuple, b["history"])
    ]


def test_standardisation_has_the_statistics_of_all_processes(pair):
    a, b = (results["standardised"] for results in pair[:2])
    one = train("lpt-npg", 1, standardise=True, seed=2**32 - 1)
    assert a == b
    assert_same_run(a, one)
    assert a["sums"] == pytest.approx(one["sums"], rel=1e-4, abs=1e-3)


def test_an_error_of_one_process_is_raised_in_all(pair):
    assert pair[0]["diverged"] == ["DivergenceError", "UserError"]
    assert pair[1]["diverged"] == ["DivergenceError", "KeyError"]
    for results in pair[:2]:  # and the next run begins as the first did
        assert results["after divergence"] == results["with dropout"]


# SMoP draws noise in training
@pytest.mark.long
@pytest.mark.parametrize("method", [m for m in EACH_METHOD if m != "smop"])
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
            "FSDPPlannedModel",
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
        model = disable_dropout(build_model(cfg, load_backbone(cfg.backbone), small))
        return torch.tensor(fit(model, small, cfg).losses)

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
    known = {f"--{k}" for k in train_command.options()}
    used = set()
    for f in [*CONFIGS.glob("*.*"), ROOT / "nbs/engine/training/distributed.ipynb"]:
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


if __name__ == "__main__":
    run_process(Path(sys.argv[1]))


# --- time and memory of a step on a GPU, whose clock and allocator are simulated


class SimulatedGPU:
    """A queue that runs as far as it is let, and an allocator that remembers its peak."""

    def __init__(self):
        self.clock = 0.0  # ms of work that was queued
        self.finished = 0.0  # ms of work that is done
        self.waits = 0
        self.allocated = self.peak = 100

    def work(self, ms, extra_bytes):
        """Queue some work, which needs more memory while it runs."""
        self.clock += ms
        self.peak = max(self.peak, self.allocated + extra_bytes)

    def reset_peak(self):
        self.peak = self.allocated

    def wait(self):
        self.waits += 1
        self.finished = self.clock

    def event(self, enable_timing):
        gpu = self
        assert enable_timing

        class Event:
            def record(self):
                self.time = gpu.clock

            def query(self):
                return self.time <= gpu.finished

            def synchronize(self):
                if not self.query():
                    gpu.wait()

            def elapsed_time(self, end):
                assert end.query()
                return end.time - self.time

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimulatedGPU()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset_peak)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gpu.allocated)
    return gpu


def profiler_on_gpu():
    return StepProfiler(nn.Linear(2, 2), SimpleNamespace(device=torch.device("cuda")))


def take_step(profiler, gpu, ms, extra_bytes):
    profiler.start()
    gpu.work(ms, extra_bytes)
    profiler.stop()


def test_peak_memory_is_that_of_training_and_not_of_evaluation(gpu):
    profiler = profiler_on_gpu()
    assert profiler.peak_memory_mb() == 100 / 1e6  # nothing is trained: the weights
    take_step(profiler, gpu, 5, 40)
    gpu.work(50, 900)  # an evaluation
    take_step(profiler, gpu, 5, 60)
    gpu.work(50, 900)
    assert profiler.peak_memory_mb() == 160 / 1e6


def test_peak_memory_is_kept_across_a_resume(gpu):
    profiler = profiler_on_gpu()
    take_step(profiler, gpu, 5, 60)
    resumed = profiler_on_gpu()
    resumed.load_state_dict(profiler.state_dict())
    take_step(resumed, gpu, 7, 20)
    assert resumed.peak_memory_mb() == 160 / 1e6 and resumed.times_ms() == [5, 7]


def test_a_step_on_a_gpu_waits_for_nothing(gpu):
    profiler = profiler_on_gpu()
    for ms in (5, 6, 7):
        take_step(profiler, gpu, ms, 0)
    gpu.work(100, 0)  # an evaluation, which is not in the time of a step
    assert gpu.waits == 0
    gpu.finished = 11
    take_step(profiler, gpu, 8, 0)
    assert profiler.step_times_ms == [5, 6] and gpu.waits == 0  # those that are known by now
    assert profiler.times_ms() == [5, 6, 7, 8] and gpu.waits == 1
