"""Check modules, README, packaging, versions, `docs/notebooks.py` and `docs/site_pages.py`."""

import ast
import base64
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from idp_tutorial.cli.main import COMMAND_NAMES, load_command
from idp_tutorial.methods.method_registry import CONTROL_METHODS
from idp_tutorial.minimal import NPG
from idp_tutorial.runs.conclusions import advise
from idp_tutorial.runs.statistics import estimate_contrast
from idp_tutorial.utils.records import read_records
from results.depth.who_reads import (
    contrast_by_depth,
    contrast_by_step,
    estimate_slope,
    mechanism_table,
    read_depth_records,
)

ROOT = Path(__file__).resolve().parents[1]
MACHINE_PATH = re.compile(r"(?<![\w.~$}\])/])/(?:home|root|work|tmp|Users)/[\w.-]+")

spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)
settings = notebooks.read_settings()


def list_files():
    """Return the files of the repository, including new ones that git does not ignore."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    process = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [p for p in map(ROOT.joinpath, filter(None, process.stdout.split("\0"))) if p.is_file()]


def list_modules():
    """Return the modules of the package, named as in `core.backbone`."""
    lib = ROOT / settings["lib_path"]
    return sorted(
        ".".join(p.relative_to(lib).with_suffix("").parts) for p in lib.rglob("[a-z]*.py")
    )


def distribution_names(requirements):
    """Return the names of the distributions in a list of requirements."""
    return {re.match(r"[\w.-]+", r)[0].lower().replace("_", "-") for r in requirements}


@pytest.fixture(scope="module")
def problems():
    return notebooks.check_all()


@pytest.mark.parametrize("message", ["exports", "not clean", "index.ipynb", "stored error"])
def test_modules_notebooks_and_readme_are_up_to_date(problems, message):
    reported = [problem for problem in problems if message in problem]
    assert not reported, "\n".join(reported)


def test_ruff_reports_nothing():
    folders = [settings["lib_path"], "tests", "docs", "setup.py"]
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", *folders]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_no_file_contains_a_path_of_one_machine():
    paths = []
    for file in list_files():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for i, line in enumerate(lines, 1):
            name = f"{file.relative_to(ROOT)}:{i}"
            paths += [f"{name}: {match[0]}" for match in MACHINE_PATH.finditer(line)]
    assert not paths, "\n".join(paths)


@pytest.mark.long
def test_every_module_imports_in_a_new_interpreter_and_defines_its_public_names():
    script = f"""import importlib
for name in {list_modules()}:
    m = importlib.import_module('{settings["lib_path"]}.'+name)
    missing = [n for n in getattr(m, '__all__', ()) if not hasattr(m, n)]
    assert not missing, (name, missing)"""
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "tests", capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("script", settings["console_scripts"].split())
def test_a_console_script_names_a_function(script):
    command, module, function = re.fullmatch(r"(\w+)=([\w.]+):(\w+)", script).groups()
    assert callable(getattr(importlib.import_module(module), function)), command


def test_the_wheel_contains_every_file_of_the_package(tmp_path):
    pytest.importorskip("setuptools")
    lib = settings["lib_path"]
    subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "egg_info",
            "--egg-base",
            str(tmp_path),
            "build",
            "--build-base",
            str(tmp_path / "build"),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    built = {
        str(p.relative_to(tmp_path / "build/lib"))
        for p in (tmp_path / "build/lib" / lib).rglob("*")
        if p.is_file()
    }
    files = {str(p.relative_to(ROOT)) for p in list_files() if (ROOT / lib) in p.parents}
    assert files
    assert files <= built, f"missing from the wheel: {sorted(files - built)}"


def test_the_source_distribution_contains_the_files_that_setup_py_reads(tmp_path):
    """`python -m build` builds the wheel from it."""
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    sources = next(tmp_path.glob("*/SOURCES.txt")).read_text().splitlines()
    assert {
        "settings.ini",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
    } <= {*sources}
    assert not [file for file in sources if file.startswith("tests/")]


def test_versions_agree():
    module = ast.parse((ROOT / settings["lib_path"] / "__init__.py").read_text(encoding="utf-8"))
    assignments = [n for n in module.body if isinstance(n, ast.Assign)]
    values = {ast.unparse(n.targets[0]): n.value for n in assignments}
    in_package = ast.literal_eval(values["__version__"])
    in_changelog = re.search(
        r"^## v?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )[1]
    assert settings["version"] == in_package == in_changelog


def test_every_test_that_the_security_policy_names_exists():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(names) > 8
    for file, function in names:
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), function


@pytest.mark.parametrize(
    "group",
    [
        "requirements",
        "dev_requirements",
        "docs_requirements",
        "experiments_requirements",
        "backbones_requirements",
        "serve_requirements",
        "completion_requirements",
    ],
)
def test_every_requirement_has_a_pinned_version(group):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = distribution_names(text for text in lines if text.strip() and not text.startswith("#"))
    assert distribution_names(settings[group].split()) <= pinned, (
        f"add to constraints.txt: {sorted(distribution_names(settings[group].split()) - pinned)}"
    )


DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "pyyaml"}  # name of an import: of its package


def imported_packages(file):
    """Yield the names of the packages that a module imports, at any level."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_every_imported_package_is_declared():
    """A package that another one installs today may be gone with its next version."""
    groups = ("", "experiments_", "backbones_", "serve_", "completion_")
    declared = set()
    for group in groups:
        declared |= distribution_names(settings[f"{group}requirements"].split())
    undeclared = {}
    for file in (ROOT / settings["lib_path"]).rglob("*.py"):
        for name in {*imported_packages(file)} - sys.stdlib_module_names - {settings["lib_path"]}:
            if DISTRIBUTIONS.get(name, name).lower().replace("_", "-") not in declared:
                undeclared.setdefault(name, str(file))
    assert not undeclared


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_a_bundled_model_names_its_licence(name):
    card = (ROOT / "idp_tutorial/assets" / name / "README.md").read_text(encoding="utf-8")
    assert "\nlicense: apache-2.0\n" in card and "**Licence** Apache-2.0" in card


def test_every_requirement_has_a_lower_bound():
    """Otherwise `uv pip install --resolution lowest-direct` installs the oldest release."""
    groups = [key for key in settings if key.endswith("requirements")]
    requirements = [text for key in groups for text in settings[key].split()]
    assert len(groups) == 7
    assert not [text for text in requirements if not re.match(r"[\w.-]+(>=|==)\d|fastgit<", text)]


# ---- docs/notebooks.py itself

v4 = notebooks.nbformat.v4


def cell(source):
    return v4.new_code_cell(source)


def notebook(path, *cells):
    """Write a notebook with these cells, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notebooks.nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return path


@pytest.mark.parametrize(
    "source,skip",
    [
        ("#| slow\nx", True),
        ("#|eval:false\nx", True),
        ("#| gpu\nx", True),
        ("#| export\nx", False),
        ("x # | slow", False),
    ],
)
def test_cells_with_a_test_flag_are_skipped(source, skip):
    assert notebooks.is_skipped(cell(source)) is skip


NAMES = [
    "index",
    "course/03_reading",
    "course/09_idpg",
    "course/10_idpg_in_every_layer",
    "course/solutions/03_reading",
    "engine/utils/checks",
    "engine/core/backbone",
    "engine/methods/registry",
    "engine/cli/compare",
    "lab/claims",
]


@pytest.fixture
def notebook_folders(tmp_path, monkeypatch):
    """Create a folder of empty notebooks, some of which are not published."""
    monkeypatch.setattr(notebooks, "NOTEBOOKS_FOLDER", tmp_path)
    for name in [
        *NAMES,
        "lab/_scratch",
        "_old/03_gone",
        "course/.ipynb_checkpoints/03_reading-checkpoint",
    ]:
        notebook(tmp_path / f"{name}.ipynb")


def names_of(*names):
    return [notebooks.notebook_name(p) for p in notebooks.list_notebooks(names)]


def test_notebooks_come_in_reading_order(notebook_folders):
    assert names_of() == NAMES


@pytest.mark.parametrize(
    "name,expected",
    [
        ("03", ["course/03_reading", "course/solutions/03_reading"]),
        ("09_i", ["course/09_idpg"]),
        ("idpg", ["course/09_idpg"]),
        ("idpg_in", ["course/10_idpg_in_every_layer"]),
        ("engine/core/backbone", ["engine/core/backbone"]),
        ("backbone.ipynb", ["engine/core/backbone"]),
        ("methods", ["engine/methods/registry"]),
        ("nbs/course/09_idpg.ipynb", ["course/09_idpg"]),
        ("../nbs/lab/", ["lab/claims"]),
        ("course/1", ["course/10_idpg_in_every_layer"]),
    ],
)
def test_a_notebook_is_found_by_number_name_folder_and_path(notebook_folders, name, expected):
    assert names_of(name) == expected


def test_an_unknown_name_lists_the_notebooks(notebook_folders):
    message = "starts with nonsense. The notebooks are: index, course/03_reading, "
    with pytest.raises(SystemExit, match=message):
        names_of("nonsense", "09")


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    """Return the problems of a small project: never exported, exported, and then changed.

    The changes are modules without a notebook, and a module that was edited.
    """
    root = tmp_path_factory.mktemp("project")
    lib = root / settings["lib_path"]
    shutil.copy(ROOT / "settings.ini", root)
    notebook(
        root / "nbs/engine/core/backbone.ipynb",
        cell("#| default_exp core.backbone"),
        cell("#| export\nx = 1"),
    )
    notebook(
        root / "nbs/engine/utils/config.ipynb",
        cell("#| default_exp utils.config"),
        cell("#| export\ny = 1"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "ROOT", root)
        patch.setattr(notebooks, "NOTEBOOKS_FOLDER", root / "nbs")
        (lib / "core").mkdir(parents=True)
        (lib / "__init__.py").write_text('__version__ = "0"\n')
        first = notebooks.check_all()
        notebooks.run_nbdev("nbdev_export", cwd=root)
        fresh = notebooks.check_all()
        module = (lib / "core/backbone.py").read_text()
        (lib / "gone").mkdir()
        (lib / "gone/__init__.py").touch()
        (lib / "gone/old.py").write_text(f'"""A docstring comes first."""\n\n{module}')
        (lib / "by_hand.py").write_text("z = 1\n")
        (lib / "utils/config.py").write_text((lib / "utils/config.py").read_text() + "# by hand\n")
        return first, fresh, notebooks.check_all()


def test_a_module_that_was_never_exported_is_reported(stale):
    first, fresh, _ = stale
    assert {f.split(" ")[0] for f in first if "exports" in f} == {
        f"{settings['lib_path']}/{n}.py"
        for n in (
            "_modidx",
            "core/__init__",
            "core/backbone",
            "utils/__init__",
            "utils/config",
            "__init__",
        )
    }
    assert not [f for f in fresh if "exports" in f]


@pytest.mark.parametrize("name", ["gone/old.py", "gone/__init__.py"])
def test_a_module_without_its_notebook_is_reported(stale, name):
    assert f"{settings['lib_path']}/{name}: no notebook exports it: delete it" in stale[2]


def test_an_edited_module_is_reported_and_a_plain_module_is_not(stale):
    assert sum("config.py is not what its notebook exports" in f for f in stale[2]) == 1
    assert not [f for f in stale[2] if "by_hand" in f]


def test_readme_hides_directives_and_moves_links(tmp_path):
    text = (
        "# T\n\n[a](course/00_why.ipynb#x) [b](../CHANGELOG.md) [c](https://e.org) [d](#x) "
        "`m[0](y)`"
    )
    shown = cell("#| echo: false\nsecret = 1")
    shown.outputs = [
        v4.new_output("stream", text="seen\n"),
        v4.new_output("display_data", {"text/markdown": "[e](lab/claims.ipynb)"}),
    ]
    notebook(
        tmp_path / "index.ipynb",
        v4.new_markdown_cell(text),
        cell("#| hide\nhidden = 1"),
        shown,
        cell("#| export\nx = names[0](3)"),
    )
    out, images = notebooks.render_readme(tmp_path / "index.ipynb")
    links = "[a](nbs/course/00_why.ipynb#x) [b](CHANGELOG.md) [c](https://e.org) [d](#x) `m[0](y)`"
    assert links in out
    assert "[e](nbs/lab/claims.ipynb)" in out
    assert "```text\nseen\n```" in out
    assert "```python\nx = names[0](3)\n```" in out
    assert not images
    assert not re.search("secret|hidden|#[|]", out)


def test_links_of_the_front_page_resolve():
    links = list_targets(read_readme())
    assert len(links) > 20
    assert not [link for link in links if not (ROOT / link).exists()]


def read_readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def mean_of(file, method, **fields):
    """Return the mean score of stored runs at the learning rate that has the most seeds."""
    records = read_records(ROOT / "results" / file)
    fields |= dict(method=method, status="done")
    rates = {}
    for record in records:
        if all(record.get(name) == value for name, value in fields.items()):
            rates.setdefault(record["lr"], {})[record["seed"]] = record["score"]
    scores = [*max(rates.values(), key=len).values()]
    assert len(scores) == 5
    return sum(scores) / 5


def test_the_front_page_states_stored_scores():
    smollm2, minilm = "why/layers-trec-600.jsonl", "claims/converged-trec-minilm.jsonl"
    at_input, half_way = (mean_of(smollm2, "lpt", layer=layer) for layer in (0, 15))
    generated = [mean_of(smollm2, "lpt-npg", layer=layer) for layer in (15, 24, 29)]
    fine_tuning = mean_of(smollm2, "fine-tuning")
    controls = [f"claims/controls-{model}.jsonl" for model in ("smollm2", "minilm")]
    probes = [mean_of(file, "probe", task="trec") for file in controls]
    lora = mean_of(minilm, "lora", task="trec")
    advice = read_readme().split("## What to use when")[1].split("\n## ")[0]
    runs = [
        r | dict(folder=ROOT / "results/why")
        for r in read_records(ROOT / "results" / smollm2, with_logits=True)
    ]
    best = estimate_contrast(runs, "lpt layer=0", "lpt-npg layer=15")
    expected = {at_input, half_way, fine_tuning, generated[0], *probes, lora}
    expected |= {abs(best[key]) for key in ("effect", "low", "high")}
    stated = {float(number) for number in re.findall(r"\d+\.\d", advice)}
    assert stated == {round(number, 1) for number in expected}
    caption = read_readme().split("crossing.svg)")[1].split("```")[0]
    same_size = mean_of("why/constant-input-trec-600.jsonl", "lpt-npg-constant", layer=29)
    expected = {generated[0], generated[-1], probes[0], same_size}
    stated = {float(number) for number in re.findall(r"\d+\.\d", caption)}
    assert stated == {round(number, 1) for number in expected}
    (reader,) = (
        r
        for r in mechanism_table(
            ROOT / "results/crossing/readers-trec-smollm2-600.jsonl"
        ).itertuples()
        if (r.method, r.layer) == ("lpt-npg", 29)
    )
    follows = f"{reader.follows_prompt:.0f} % of the predictions follow the prompt"
    assert f"{follows} and {reader.follows_text:.0f} % the text" in read_readme()


def test_the_first_paragraph_states_stored_differences():
    introduction = read_readme().split("![")[0]
    by_layers_above = {}
    for task in ("trec-600", "subj-k1000-600"):
        records = read_depth_records(ROOT / f"results/why/layers-{task}.jsonl")
        for row in contrast_by_depth(records).itertuples():
            by_layers_above[task[:4], row.layers_above] = row.effect, row.low, row.high
    records_of_subj = records
    growth = estimate_slope(records, layers=(24, 29))  # of Subj, in points for each layer
    between = [5 * growth[key] for key in ("effect", "low", "high")]
    stated = [float(n.replace("−", "-")) for n in re.findall(r"−?\d+\.\d", introduction)]
    smollm2 = "why/layers-trec-600.jsonl"
    precise = [mean_of(smollm2, "lpt", layer=layer) for layer in (0, 29)]
    precise.append(mean_of("claims/controls-smollm2.jsonl", "probe", task="trec"))
    precise += [*by_layers_above["trec", 15], *by_layers_above["subj", 6]]
    assert stated == [round(value, 1) for value in precise]
    places = [("trec", 1), ("trec", 6), ("subj", 3), ("subj", 1)]
    repeated = read_depth_records(ROOT / "results/why/constant-input-trec-600.jsonl")
    (again,) = contrast_by_depth(repeated)[["effect", "low", "high"]].to_numpy()
    for values in (*(by_layers_above[place] for place in places), between, again):
        effect, low, high = (f"{value:.0f}" for value in values)
        assert re.search(rf"\b{effect}\b[^.]*?\b{low} to {high}\b", introduction)
    half_way_on = [mean_of("why/layers-trec-600.jsonl", "lpt-npg", layer=k) for k in (15, 24, 29)]
    assert f"{min(half_way_on):.0f} to {max(half_way_on):.0f} %" in introduction
    gains = {}
    for model in ("tiny", "tiny-gpt2"):
        records = read_depth_records(ROOT / f"results/crossing/questions-{model}-600.jsonl")
        for row in contrast_by_depth(records).itertuples():
            gains[model, row.layers_above] = round(row.effect)
    assert gains["tiny", 4] == gains["tiny", 1]
    assert f"`tiny` it is {gains['tiny', 4]} points" in introduction
    falls = f"falls from {gains['tiny-gpt2', 4]} to {gains['tiny-gpt2', 1]}"
    assert falls in introduction
    by_step = contrast_by_step(records_of_subj, 29).set_index("step").effect
    shrinks = f"from {by_step[240]:.0f} points after 240 steps to {by_step[600]:.0f} after 600"
    assert shrinks in introduction


def test_the_front_page_says_on_how_many_data_sets_a_prompt_is_advised():
    folders = [file.parent for file in (ROOT / "results/when").glob("*/compare.jsonl")]
    advised = [advise(read_records(folder / "compare.jsonl"), folder).method for folder in folders]
    prompts = [method for method in advised if method not in (*CONTROL_METHODS, "lora")]
    assert (len(folders), len(prompts)) == (6, 1)
    assert "recommends a prompt on one of six data sets" in read_readme()


def test_the_front_page_prints_the_stored_comparison(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results/crossing")
    who_reads = importlib.import_module("who_reads")
    who_reads.print_stored(ROOT / "results/crossing/first_run")
    assert capsys.readouterr().out.strip() in read_readme()


def test_the_commands_of_the_front_page_exist():
    text = read_readme()
    targets = re.findall(r"^make (\w+)", text, re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"compare", "lab", "test"} <= {*targets}
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    for line in re.findall(r"^idp (.*)$", text, re.M):
        name, *arguments = shlex.split(line, comments=True)
        assert name in COMMAND_NAMES
        options = {f"--{option}" for option in load_command(name).options()}
        assert {a for a in arguments if a.startswith("--")} <= options


def test_links_to_hosted_notebooks_follow_the_setting(monkeypatch):
    assert "colab.research" not in read_readme() and "mybinder" not in read_readme()
    assert notebooks.render_online_links() == ""
    public = {**settings, "is_public": "True"}
    parser = notebooks.ConfigParser(interpolation=None)
    parser.read_dict({"DEFAULT": public})
    monkeypatch.setattr(notebooks, "read_settings", lambda: parser["DEFAULT"])
    links = notebooks.render_online_links()
    assert "colab.research.google.com/github/idp-tutorial/idp_tutorial/blob/main/nbs" in links
    assert "mybinder.org/v2/gh/idp-tutorial/idp_tutorial/main?labpath=nbs%2Fcourse" in links


def test_the_table_of_chapters_has_a_row_for_each():
    pattern = r"^\| (◆?) *\| \[(\d\d) · ([^\]]+)\]\(nbs/(\S+)\.ipynb\) \| (\d+) \| \S.* \|$"
    rows = re.findall(pattern, read_readme(), re.M)
    paths = [p for p in notebooks.list_notebooks() if notebooks.notebook_folder(p) == "course"]
    assert [name for *_, name, _ in rows] == [notebooks.notebook_name(p) for p in paths]
    for (core, number, title, *_), path in zip(rows, paths):
        assert path.stem.startswith(number) and title == notebooks.read_title_and_summary(path)[0]
        assert bool(core) == notebooks._load_course().summarise_chapter(path)["is_core"]


def test_a_summary_is_not_read_from_a_comment(tmp_path):
    text = "# What?\n\n<!-- The first line of the module:\n> A module.\n-->\n\n> An answer. More."
    path = tmp_path / "a.ipynb"
    nb = notebooks.nbformat.v4.new_notebook(cells=[notebooks.nbformat.v4.new_markdown_cell(text)])
    notebooks.nbformat.write(nb, path)
    assert notebooks.read_title_and_summary(path) == ("What?", "An answer.")


def test_old_titles_on_the_front_page_are_replaced():
    old = "before\n<!-- lab -->\nan old list\n<!-- end -->\nafter"
    new = notebooks.update_generated_parts(old)
    assert "an old list" not in new and "lab/claims.ipynb" in new
    assert new.startswith("before\n<!-- lab -->") and new.endswith("<!-- end -->\nafter")


def test_the_code_of_the_front_page_trains_a_model(capsys):
    """Run it with the bundled model, for fewer steps."""
    from idp_tutorial.backbones.load import find_local_backbone

    generator, script = re.findall(r"```python\n(.*?)```", read_readme(), re.S)
    assert generator.strip() == inspect.getsource(NPG).strip()
    tiny = str(find_local_backbone("tiny"))
    script = script.replace("FacebookAI/roberta-base", tiny).replace("range(100)", "range(2)")
    script = script.replace("(0, 99)", "(0, 1)")
    namespace = {}
    exec(compile(script, "README.md", "exec"), namespace)
    model = namespace["model"]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{trained:,} trained parameters"
    first, last = (float(line.split()[-1]) for line in lines[1:])
    assert last < first
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_failing_notebook_is_reported_and_unchanged(tmp_path, monkeypatch, capsys):
    check_folder = cell("import os\nassert os.path.basename(os.getcwd())=='course'")
    bad = notebook(tmp_path / "course/90_bad.ipynb", check_folder, cell("fine = 1"), cell("1/0"))
    before = bad.read_bytes()
    monkeypatch.setattr(notebooks, "NOTEBOOKS_FOLDER", tmp_path)
    assert notebooks.run_notebooks([]) == 1
    assert bad.read_bytes() == before
    out = capsys.readouterr().out
    assert "course/90_bad" in out
    assert "1/0" in out
    assert "ZeroDivisionError" in out
    assert "fine = 1" not in out


def test_only_the_notebook_that_ran_is_cleaned(tmp_path):
    """`nbdev_clean` without a file would clean all of them."""
    shutil.copy(ROOT / "settings.ini", tmp_path)
    (tmp_path / "nbs").mkdir()
    both = [tmp_path / "nbs" / name for name in ("a.ipynb", "b.ipynb")]
    for p in both:
        c = cell("x = 1")
        c.execution_count = 3
        notebooks.nbformat.write(notebooks.nbformat.v4.new_notebook(cells=[c]), p)
    before = both[1].read_bytes()
    notebooks.run_nbdev("nbdev_clean", cwd=tmp_path, fname=str(both[0]))
    assert b'"execution_count": 3' not in both[0].read_bytes()
    assert both[1].read_bytes() == before


def test_pictures_are_stored_with_at_most_128_colours():
    from PIL import Image

    def png(im):
        out = io.BytesIO()
        im.save(out, "png")
        return base64.b64encode(out.getvalue()).decode()

    def opened(data):
        return Image.open(io.BytesIO(base64.b64decode(data)))

    ramp = Image.linear_gradient("L").convert("RGB")
    noisy = Image.merge("RGB", [Image.effect_noise((64, 64), s) for s in (30, 60, 90)])
    plot = Image.new("RGB", (200, 100), "white")
    plot.paste((31, 119, 180), (20, 20, 180, 60))
    shown = cell("plot")
    shown.outputs = [
        v4.new_output("display_data", {"image/png": png(im)}) for im in (ramp, noisy, plot)
    ]
    nb = notebooks.compress_pictures(v4.new_notebook(cells=[shown]))
    pictures = [o.data["image/png"] for o in shown.outputs]
    for p, im in zip(pictures[1:], (noisy, plot), strict=True):
        assert len(p) <= len(png(im))
        assert len(opened(p).getcolors()) <= 128
    # a plot that has less than 128 colours is unchanged
    assert opened(pictures[2]).convert("RGB").tobytes() == plot.tobytes()
    assert notebooks.compress_pictures(nb).cells[0].outputs[2].data["image/png"] == pictures[2]


def test_styled_tables_have_the_same_names_in_every_run():
    def notebook(name):
        html = f'<style>#{name}_row0 {{}}</style><table id="{name}"></table>'
        output = v4.new_output("display_data", {"text/html": html})
        return v4.new_notebook(cells=[v4.new_code_cell(outputs=[output])])

    tables = [
        notebooks.number_tables(notebook(name)).cells[0].outputs[0].data["text/html"]
        for name in ("T_01fed", "T_9a8bc")
    ]
    assert tables[0] == tables[1] and tables[0].count("T_00000") == 2


def test_cells_of_tables_without_styles_have_no_names():
    table = pandas.DataFrame({"x": [1.5]}).style
    output = v4.new_output("display_data", {"text/html": table.to_html()})
    nb = v4.new_notebook(cells=[v4.new_code_cell(outputs=[output])])
    html = notebooks.number_tables(nb).cells[0].outputs[0].data["text/html"]
    assert "1.5" in html and not re.search("id=|class=", html)


def test_stored_outputs_are_small():
    def outputs(p):
        return (o for c in notebooks.nbformat.read(p, 4).cells for o in c.get("outputs", ()))

    sizes = {
        notebooks.notebook_name(p): sum(len(str(output)) for output in outputs(p))
        for p in notebooks.list_notebooks()
    }
    assert {name: size for name, size in sizes.items() if size > 100_000} == {}


# ---- docs/site_pages.py

REPO = f"{settings['git_url']}/blob/{settings['branch']}"


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("site_pages")


def test_the_site_shows_no_directives(site):
    nb = v4.new_notebook(
        cells=[v4.new_markdown_cell("# T"), cell("#| hide\nhidden = 1"), cell("#| export\nx = 1")]
    )
    cells = site.prepare_notebook(nb, "nbs/lab/a.ipynb", {}).cells
    assert [c.source for c in cells] == ["# T", "x = 1"]


def test_the_site_keeps_the_output_of_a_cell_whose_input_is_hidden(site):
    shown = cell("#| echo: false\nsecret = 1")
    shown.outputs = [
        v4.new_output("stream", text="seen\n"),
        v4.new_output("display_data", {"text/markdown": "[e](lab/claims.ipynb)"}),
    ]
    (c,) = site.prepare_notebook(v4.new_notebook(cells=[shown]), "nbs/lab/a.ipynb", {}).cells
    assert c.source.strip()  # myst-nb skips a cell without a source
    assert "secret" not in c.source
    assert c.outputs
    assert "remove-input" in c.metadata["tags"]


def test_a_plot_has_an_alternative_text_on_the_site(site):
    drawn = cell("ax.set(title='Lines $n$', ylabel='loss')")
    bare = cell("draw()")
    for c in (drawn, bare):
        c.outputs = [v4.new_output("display_data", data={"image/png": ""})]
    head = v4.new_markdown_cell("# T\n\n## [By](a.md) hand")
    nb = v4.new_notebook(cells=[head, drawn, bare])
    _, *plots = site.prepare_notebook(nb, "nbs/a.ipynb", {}).cells
    assert [c.metadata["mystnb"]["image"]["alt"] for c in plots] == [
        "Plot. Lines n; vertical axis: loss",
        "Plot. By hand",
    ]


@pytest.mark.parametrize(
    "file,target,expected",
    [
        ("nbs/index.ipynb", "course/00_why.ipynb#now", "course/00_why.ipynb#now"),
        (
            "nbs/engine/core/backbone.ipynb",
            "../../course/00_why.ipynb",
            "../../course/00_why.ipynb",
        ),
        ("nbs/engine/core/backbone.ipynb", "../../../settings.ini", f"{REPO}/settings.ini"),
        ("nbs/engine/core/backbone.ipynb", "../../../CHANGELOG.md", "../../changelog.md"),
        ("nbs/lab/claims.ipynb", "../../README.md", "../index.ipynb"),
        ("nbs/lab/claims.ipynb", "../../docs/images/costs.svg", "../images/costs.svg"),
        ("nbs/lab/claims.ipynb", "https://e.org/a", "https://e.org/a"),
        (
            "nbs/course/00_why.ipynb",
            "https://idp-tutorial.github.io/idp_tutorial/playground.html",
            "../playground.md",
        ),
        (
            "nbs/course/06_idpg.ipynb",
            "https://idp-tutorial.github.io/idp_tutorial/playground.html#pg-whose",
            "../playground.md#pg-whose",
        ),
        ("nbs/lab/claims.ipynb", "#a", "#a"),
        ("CONTRIBUTING.md", "nbs/course/00_why.ipynb", "course/00_why.ipynb"),
        ("CONTRIBUTING.md", "configs/", f"{REPO}/configs"),
    ],
)
def test_links_lead_to_a_page_or_to_the_repository(site, file, target, expected):
    assert site.site_link(target, file) == expected


def test_names_link_to_their_entry_and_code_is_unchanged(site):
    prose = "`Backbone` [late prompt tuning](../course/11_lpt.ipynb) `other`\n"
    text = f"{prose}```\n`Backbone` [x](../a.ipynb)\n```"
    full_names = {"Backbone": "idp_tutorial.core.backbone.Backbone"}
    out = site.render_site_markdown(text, "nbs/lab/a.ipynb", full_names)
    assert out == text.replace(
        "`Backbone`", "{py:obj}`Backbone <idp_tutorial.core.backbone.Backbone>`", 1
    )


class Node(list):
    """Node of a Sphinx page, with the methods that `escape_formulas` uses."""

    def __init__(self, tagname, *children):
        super().__init__(children)
        self.tagname = tagname

    def findall(self, condition):
        return filter(condition, self)

    def get(self, name):
        return None

    def astext(self):
        return "".join(self)


def test_a_formula_contains_no_tags(site):
    doc = Node("document", Node("math_block", r"h_{\texttt{<s>}} & 1>0"), Node("paragraph", "<s>"))
    site.escape_formulas(None, doc, "page")
    assert [n.astext() for n in doc] == [r"h_{\texttt{&lt;s&gt;}} &amp; 1&gt;0", "<s>"]


@pytest.mark.parametrize(
    "markdown,rst",
    [
        ("`a` b", "``a``\\  b"),
        ("$x_1$s", ":math:`x_1`\\ s"),
        ("*args, a_", "\\*args, a\\_"),
        ("*args, **kwargs", "\\*args, \\*\\*kwargs"),
        ("a *new a_* is 2*3*4", "a \\ *new a\\_*\\  is 2\\*3\\*4"),
        ("plain", "plain"),
    ],
)
def test_docstrings_are_markdown(site, markdown, rst):
    assert site.markdown_to_rst(markdown) == rst


def test_every_module_has_a_page(site):
    pages = site.render_generated_pages()
    assert sorted(site.list_modules()) == list_modules()
    assert {f"api/{m}.md" for m in list_modules()} <= set(pages)


def test_every_page_is_in_the_sidebar(site):
    pages = {"index.md": site.render_sidebar(), **site.render_generated_pages()}
    listed = set()
    for page, text in pages.items():
        for entries in re.findall(r"```{toctree}\n(.*?)```", text, re.S):
            for entry in filter(None, re.sub(r"^:.*\n", "", entries, flags=re.M).splitlines()):
                target = re.sub(r".*<(.+)>$", r"\1", entry)
                listed.add(os.path.normpath(os.path.join(os.path.dirname(page), target)))
    names = {notebooks.notebook_name(p) for p in notebooks.list_notebooks()}
    names |= {page.removesuffix(".md") for page in pages}
    assert sorted(names - listed) == ["index"]


def test_the_home_page_and_the_engine_list_link_to_every_notebook():
    home = (ROOT / "nbs/index.ipynb").read_text(encoding="utf-8")
    engine = (ROOT / "nbs/engine/README.md").read_text(encoding="utf-8")
    assert "](engine/README.md)" in home
    for path in notebooks.list_notebooks():
        name = path.relative_to(ROOT / "nbs").as_posix()
        if name.startswith(("course/", "lab/")) and "/solutions/" not in name:
            assert f"]({name})" in home, "run `python docs/notebooks.py readme`"
        elif name.startswith("engine/"):
            link = f"]({name.removeprefix('engine/')})"
            assert link in engine, "run `python docs/notebooks.py readme`"


def list_targets(markdown):
    """Return the relative targets of links and pictures of a Markdown text."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.S)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)|\b(?:src|srcset|href)=\"([^\"\s]+)\"", text)
    joined = [inline or attribute for inline, attribute in targets]
    return [t.partition("#")[0] for t in joined if not re.match(r"[a-z]+:|#", t)]


@pytest.mark.parametrize("path", notebooks.list_notebooks(), ids=notebooks.notebook_name)
def test_links_and_pictures_of_a_notebook_resolve(path):
    """JupyterLab, VS Code and GitHub resolve them by path; `make lab` serves the repository."""
    served = ROOT / re.search(r"--notebook-dir=(\S+)", (ROOT / "Makefile").read_text())[1]
    missing = []
    for c in notebooks.nbformat.read(path, 4).cells:
        texts = [c.source] if c.cell_type == "markdown" else []
        for output in c.get("outputs", ()):
            texts += [output.get("data", {}).get("text/markdown", "")]
        for target in list_targets("\n".join(texts)):
            file = (path.parent / target).resolve()
            if not file.exists() or served.resolve() not in [file, *file.parents]:
                missing.append(target)
    assert not missing, f"{path.name} links to files that JupyterLab does not serve: {missing}"


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("nbs/**/*.md")])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_pictures_of_a_page_resolve(path):
    targets = list_targets(path.read_text(encoding="utf-8"))
    assert not [t for t in targets if not (path.parent / t).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_a_heading_of_a_page_resolve(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*\.md|)#([^)\s]+)\)", text):
        page = path.parent / target if target else path
        headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
        anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        assert anchor in anchors, f"{page.name} has no heading {anchor!r}"


def test_no_stored_output_is_a_warning():
    for path in notebooks.list_notebooks():
        for c in notebooks.nbformat.read(path, 4).cells:
            streams = [o.name for o in c.get("outputs", ()) if o.output_type == "stream"]
            assert "stderr" not in streams, f"{path.name}: {c.id}"
