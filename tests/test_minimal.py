"""`idp_tutorial.minimal` computes what the package computes, in one file that needs no package."""

import ast
import csv
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from small_models import random_batch, small_backbone

from idp_tutorial import minimal
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.methods.all_methods import METHODS

SOURCE = Path(minimal.__file__).read_text(encoding="utf-8")
TINY = Path(minimal.__file__).parent / "assets/tiny"
LATE_METHODS = ["lpt", "lpt-npg", "lpt-appg", "lpt-mppg", "id-spam"]


def package_model(method, bb):
    """Return the package's model of a method, and its prompt source."""
    cfg = RunConfig(method, pooling=bb.default_pooling)
    plan = cfg.method_config.plan(bb, cfg)
    model = PlannedModel(bb, ClassificationHead(bb.d, 3, bb.default_pooling), plan).eval()
    return model, plan[min(plan)].source


def minimal_state(source):
    """Return the parameters of a prompt source under the names that `minimal` gives them."""
    renamed = {"down.bias": "b1"} if "generator.b2" in source.state_dict() else {}
    names = {name: re.sub("^(generator|pool)\\.", "", name) for name in source.state_dict()}
    return {renamed.get(names[key], names[key]): p for key, p in source.state_dict().items()}


def minimal_generator(method, bb):
    """Return the generator of a method, and the layer at which `minimal` inserts its prompt."""
    make_generator, is_late, _ = minimal.PROMPTS[method]
    return make_generator(bb.config), bb.n_layers // 2 if is_late else -1


@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("method", minimal.PROMPTS)
def test_logits_equal_those_of_the_package(method, family):
    """In float32 the largest difference is 6e-7; float64 shows that it is rounding."""
    bb = small_backbone(family)
    model, source = package_model(method, bb)
    generator, layer = minimal_generator(method, bb)
    generator.load_state_dict(minimal_state(source))
    model.double()
    generator.double().eval()
    batch = random_batch()  # with padding
    del batch["mask_position"]  # without a template
    with torch.no_grad():
        z = minimal.run(bb.base, batch["input_ids"], batch["attention_mask"], generator, layer)
        expected = model(batch)
    torch.testing.assert_close(model.head.net(z), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("method", minimal.PROMPTS)
def test_logits_equal_those_of_the_package_in_training_mode(method, family, monkeypatch):
    """Dropout multiplies by 1-p here, so it must be on in the same modules, and nowhere else."""
    monkeypatch.setattr(
        torch.nn.functional,
        "dropout",
        lambda x, p=0.5, training=True, inplace=False: x * (1 - p) if training else x,
    )
    bb = small_backbone(family, "eager")  # fused attention has a dropout of its own
    model, source = package_model(method, bb)
    generator, layer = minimal_generator(method, bb)
    generator.load_state_dict(minimal_state(source))
    batch = random_batch()
    del batch["mask_position"]
    run = partial(minimal.run, bb.base, batch["input_ids"], batch["attention_mask"], generator)
    with torch.no_grad():
        model.double().eval()
        generator.double().eval()
        in_eval_mode = run(layer)
        generator.train()
        z = run(layer)
        model.train()
        expected = model.head(run_layers(bb, batch, model.plan))
    torch.testing.assert_close(model.head.net(z), expected, rtol=0, atol=1e-10)
    if family not in ("llama", "qwen3") or method not in ("prompt-tuning", "lpt"):
        # the others have a dropout in the generator or in the model
        assert not torch.allclose(z, in_eval_mode)


def test_methods_have_the_learning_rates_of_the_package():
    for method, (_, is_late, lr) in minimal.PROMPTS.items():
        assert lr == METHODS[method].default_learning_rate
        assert is_late == (METHODS[method].insertion_point == "middle")


def test_phm_equals_the_layer_of_the_package():
    from idp_tutorial.methods.phm import PHMLinear

    expected = PHMLinear(32, 48, 4, bias=False)
    layer = minimal.PHM(32, 48, 4)
    layer.load_state_dict(expected.state_dict())
    x = torch.randn(3, 32)
    torch.testing.assert_close(layer(x), expected(x))


@pytest.mark.parametrize(
    "generator, expected",
    [
        (partial(minimal.IDPG, t=5, m=256, n=16), 111_872),
        (partial(minimal.NPG, t=5, m=128), 791_680),
        (partial(minimal.IDSPAM, t=5, m=64), 3_538_944),
        (partial(minimal.PPG, t=10, m=128), 263_296),
        (partial(minimal.StaticPrompt, t=134), 137_216),
    ],
)
def test_generators_have_the_papers_numbers_of_parameters(generator, expected):
    assert sum(p.numel() for p in generator(1024).parameters()) == expected


@pytest.mark.parametrize("method", minimal.PROMPTS)
def test_only_generator_and_layers_above_the_prompt_enter_the_graph(method):
    bb = small_backbone("roberta")
    generator, layer = minimal_generator(method, bb)
    requires_grad = {}
    for k, block in enumerate(bb.layers):
        block.register_forward_hook(
            lambda _, __, h, k=k: requires_grad.update({k: h.requires_grad})
        )
    batch = random_batch()
    z = minimal.run(bb.base, batch["input_ids"], batch["attention_mask"], generator.train(), layer)
    z.square().sum().backward()
    assert requires_grad == {k: k >= layer for k in range(bb.n_layers)}
    assert all(p.grad is not None and p.grad.any() for p in generator.parameters())
    assert all(p.grad is None for p in bb.model.parameters())


def test_dropout_is_on_above_the_prompt_and_off_in_eval_mode():
    bb = small_backbone("roberta")
    generator, layer = minimal_generator("lpt-npg", bb)
    batch = random_batch()
    run = partial(minimal.run, bb.base, batch["input_ids"], batch["attention_mask"], generator)
    generator.train()
    first, second = run(layer), run(layer)
    assert [block.training for block in bb.layers] == [k >= layer for k in range(bb.n_layers)]
    assert not torch.equal(first, second)
    generator.eval()
    torch.testing.assert_close(run(layer), run(layer), rtol=0, atol=0)
    assert not any(block.training for block in bb.layers)


def test_the_file_has_about_200_lines():
    assert len(SOURCE.splitlines()) <= 220
    assert max(map(len, SOURCE.splitlines())) <= 100


def test_the_file_imports_only_torch_transformers_and_the_standard_library():
    roots = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    assert {"torch", "transformers"} == roots - sys.stdlib_module_names


def test_the_mean_of_the_states_takes_the_place_of_the_first_state():
    bb = small_backbone("roberta")
    batch = random_batch()  # with padding
    ids, mask = batch["input_ids"], batch["attention_mask"]
    h = bb.base(ids, attention_mask=mask).last_hidden_state
    expected = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(minimal.run(bb.base, ids, mask, mean=True), expected)
    generator = minimal.PROMPTS["s-idpg-phm"][0](bb.config).eval()
    read = []
    generator.register_forward_pre_hook(lambda _, arguments: read.append(arguments[2]))
    minimal.run(bb.base, ids, mask, generator, mean=True)
    torch.testing.assert_close(read, [expected])


def test_a_mean_is_standardised_and_no_batch_has_a_single_text(capsys):
    bb = small_backbone("roberta")
    batch = random_batch((7,) * 21)  # 17 of them train: a batch of 16 and one text that is left out
    labels = torch.arange(21) % 2
    data = torch.utils.data.TensorDataset(batch["input_ids"], batch["attention_mask"], labels)
    bb.base.requires_grad_(False)
    generator, _ = minimal.train(bb.base, data, 2, "lpt-npg", epochs=1, mean=True)
    assert generator.scale.num_batches_tracked == 1
    assert "validation accuracy" in capsys.readouterr().out


# ---- the command


@pytest.fixture
def csv_file(tmp_path):
    """Return a CSV file of 100 texts; one word of each indicates the class."""
    words = {"pos": ["great", "lovely"], "neg": ["awful", "boring"]}
    path = tmp_path / "train.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "text", "source"])
        for i in range(100):
            label = ["pos", "neg"][i % 2]
            writer.writerow([label, f"the film, they say, was {words[label][i // 2 % 2]}", i])
    return path


def test_command_trains_and_prints_a_falling_loss(csv_file, monkeypatch, capsys):
    arguments = ["--data", csv_file, "--backbone", TINY, "--method", "lpt-appg", "--epochs", 3]
    monkeypatch.setattr(sys, "argv", ["minimal", *map(str, arguments)])
    runpy.run_path(minimal.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    values = [
        re.fullmatch(r"loss (.*), validation accuracy (.*)%", line).groups() for line in lines
    ]
    losses, accuracies = zip(*[map(float, pair) for pair in values])
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    assert accuracies[-1] > 80  # 50 by chance


def test_a_seed_repeats_the_training(csv_file, capsys):
    printed = []
    for seed in (0, 0, 1):
        torch.rand(1)  # another random state
        arguments = ["--data", csv_file, "--backbone", TINY, "--epochs", 1, "--seed", seed]
        minimal.train_from_csv([*map(str, arguments)])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def test_training_runs_on_a_decoder_without_a_padding_token(csv_file, capsys):
    folder = TINY.parent / "tiny-gpt2"
    minimal.train_from_csv(["--data", str(csv_file), "--backbone", str(folder), "--epochs", "1"])
    assert "validation accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "missing.csv"], "No such file or directory: 'missing.csv'"),
        (["--data", "columns.csv"], "columns.csv needs the columns text and label"),
        (["--data", "short.csv"], "short.csv needs the columns text and label, and 10 rows"),
        (["--data", "short.csv", "--method", "lpt-x"], "--method: invalid choice: 'lpt-x'"),
        (["--data", "train.csv", "--backbone", "no/such/folder"], "no/such/folder"),
        (["--data", "train.csv", "--backbone", "electra"], "electra is not one of"),
        ([], "required: --data"),
    ],
)
def test_user_errors_are_one_line_and_status_2(
    arguments, message, csv_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("columns.csv").write_text("text,topic\n" + "a,b\n" * 20)
    Path("short.csv").write_text("text,label\na,b\n")
    if "electra" in arguments:
        from transformers import AutoTokenizer

        small_backbone("electra").model.save_pretrained("electra")
        AutoTokenizer.from_pretrained(TINY).save_pretrained("electra")
        capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        minimal.train_from_csv(arguments)
    assert exit_.value.code == 2
    *others, line = capsys.readouterr().err.splitlines()
    assert message in line
    assert all("Loading weights" in other for other in filter(None, others))  # a progress bar
