"""Each chapter has a picture, a score, a summary and exercises, and depends on no later chapter."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("course_pages", ROOT / "docs/course.py")
course = importlib.util.module_from_spec(spec)
spec.loader.exec_module(course)
CHAPTERS = course.list_chapters()
CLOSING_SECTIONS = ("What you saw", "What you can do now", "Next", "Exercises")


def solution_path(path: Path) -> Path:
    """Return the path of the notebook with a chapter's solutions."""
    return course.COURSE_FOLDER / "solutions" / path.name


def count_definition_lines(nb: nbformat.NotebookNode) -> dict[str, int]:
    """Return the number of lines of each function and class that is not exported.

    Comments do not count.
    """
    counts = {}
    for cell in nb.cells:
        if cell.cell_type != "code" or re.match(r"#\|\s*export", cell.source):
            continue
        for node in ast.parse(course.replace_magics(cell.source)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                counts[node.name] = len(ast.unparse(node).split("\n"))
    return counts


def list_prerequisites(path: Path) -> list[int]:
    """Return the numbers of the chapters that the line *You need* links to."""
    text = course.read_markdown(path)
    paragraph = re.search(r"\*\*You need\*\*.*?(?=\*\*|\n\n|\Z)", text, re.S)
    if paragraph is None:
        return []
    return [int(number) for number in re.findall(r"\]\((\d\d)_\w+\.ipynb", paragraph[0])]


DONE = [p for p in CHAPTERS if solution_path(p).exists()]  # chapters with solutions


def read(path):
    return nbformat.read(path, 4)


def join_cells(path, cell_type):
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == cell_type)


def load_scores():
    return json.loads((course.COURSE_FOLDER / "scores.json").read_text(encoding="utf-8"))


def test_chapters_have_different_numbers_from_00():
    numbers = [p.stem[:2] for p in CHAPTERS]
    assert len(numbers) == len(set(numbers))
    assert numbers[0] == "00"


@pytest.mark.parametrize("path", DONE, ids=lambda p: p.stem)
def test_a_chapter_has_a_picture_a_score_a_summary_and_three_exercises(path):
    nb = read(path)
    assert course.list_drawings(nb), "show a drawing of docs/pictures.py"
    assert course.list_exercises(nb) == ["Predict", "Modify", "Invent"]
    headings = re.findall(r"^## (.+)$", join_cells(path, "markdown"), re.M)
    closing = [heading for heading in headings if heading in CLOSING_SECTIONS]
    assert closing == list(CLOSING_SECTIONS)
    assert f"](solutions/{path.name})" in course.read_markdown(path)
    if path.stem == "17_one_file":  # it trains another task
        return
    code = join_cells(path, "code")
    assert re.search(r"\bstore_or_compare_scores\(", code)
    assert re.search(r"""build_score_table\(["']\d\d["']\)""", code), "show the table of scores"


@pytest.mark.parametrize("path", DONE, ids=lambda p: p.stem)
def test_a_chapter_states_time_prerequisites_and_who_may_skip_it(path):
    text = course.read_markdown(path)
    assert "**It takes**" in text and "**You need**" in text and "**Skip it if**" in text


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_depends_on_no_later_chapter(path):
    later = [n for n in list_prerequisites(path) if n >= int(path.stem[:2])]
    assert not later, f"{path.stem} needs {later}"


def test_a_chapter_links_to_the_later_chapter_whose_module_it_imports():
    exporting_chapter = {}
    for path in CHAPTERS:
        for module in re.findall(r"#\| default_exp (\S+)", join_cells(path, "code")):
            exporting_chapter[f"idp_tutorial.{module}"] = path
    assert len(exporting_chapter) >= 7
    for path in CHAPTERS:
        imported = re.findall(r"^from (\S+) import", join_cells(path, "code"), re.M)
        chapters = {exporting_chapter[m].name for m in imported if m in exporting_chapter}
        later = {name for name in chapters if name > path.name}
        text = course.read_markdown(path)
        assert all(f"]({name})" in text for name in later), (path.name, later)


@pytest.mark.parametrize("path", DONE, ids=lambda p: p.stem)
def test_a_definition_in_a_chapter_has_at_most_25_lines(path):
    counts = count_definition_lines(read(path))
    assert {name: n for name, n in counts.items() if n > 25} == {}


@pytest.mark.parametrize("path", DONE, ids=lambda p: p.stem)
def test_the_first_two_closing_sections_have_three_sentences(path):
    text = course.read_markdown(path)
    for heading in CLOSING_SECTIONS[:2]:
        body = re.search(rf"## {heading}\n\n(.*?)\n\n", text, re.S)[1].replace("\n", " ")
        without_code = re.sub(r"`[^`]*`|\]\([^)]*\)", "x", body).strip()
        sentences = re.split(r"(?<=[.?!])\s+", without_code)
        assert len(sentences) == 3, (heading, sentences)


@pytest.mark.parametrize("path", DONE, ids=lambda p: p.stem)
def test_a_solution_notebook_solves_all_three_exercises(path):
    text = course.read_markdown(solution_path(path))
    assert all(kind in text for kind in ("**1. Predict.**", "**2. Modify.**", "**3. Invent.**"))


def test_the_course_takes_six_hours_and_no_chapter_more_than_25_minutes_or_60_seconds():
    rows = [course.summarise_chapter(p) for p in CHAPTERS]
    assert max(row["minutes"] for row in rows) <= 25
    assert sum(row["minutes"] for row in rows) <= 6 * 60
    assert max(row["seconds"] for row in rows) < 60
    assert course.minutes_to_first_score() <= 5


def test_pages_state_the_minutes_and_seconds_of_the_table():
    notebooks, page = course.render_updates()
    assert not notebooks, "run `python docs/course.py write`"
    assert page == (course.COURSE_FOLDER / "chapters.md").read_text(encoding="utf-8"), (
        "run `python docs/course.py write`"
    )
    home = course.HOME_NOTEBOOK.read_text(encoding="utf-8")
    assert set(re.findall(r"course/(\d\d_\w+)\.ipynb\) \d+′", home)) == {p.stem for p in CHAPTERS}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_links_to_every_chapter_that_it_names_and_installs_the_package(path):
    text = course.read_markdown(path)
    named = set(re.findall(r"[Cc]hapters?\s+\[?(\d\d)", text)) - {path.stem[:2]}
    linked = set(re.findall(r"\]\((\d\d)_\w+\.ipynb", text))
    assert named <= linked
    code_cells = [cell.source for cell in read(path).cells if cell.cell_type == "code"]
    set_up = next(source for source in code_cells if "default_exp" not in source)
    assert re.search(r"""find_spec\(["']idp_tutorial["']\) is None""", set_up)
    assert "%pip install" in set_up


@pytest.mark.parametrize(
    "path", [*CHAPTERS, *map(solution_path, DONE)], ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_code_has_one_statement_a_line_of_at_most_100_columns(path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert max(map(len, cell.source.split("\n"))) <= 100, cell.source
            nodes = ast.walk(ast.parse(course.replace_magics(cell.source)))
            lines = [node.lineno for node in nodes if isinstance(node, ast.stmt)]
            assert len(lines) == len(set(lines)), cell.source


def test_binder_finds_the_files_that_its_requirements_name():
    """Pip resolves a path after `-c` from the folder of the file, and `.` from the root."""
    lines = (ROOT / ".binder/requirements.txt").read_text().splitlines()
    files = [line.split()[1] for line in lines if line.startswith(("-c", "-r"))]
    assert files and all((ROOT / ".binder" / file).is_file() for file in files)
    assert ".[experiments]" in lines
    assert (ROOT / "setup.py").is_file()


@pytest.mark.slow
def test_the_first_chapter_runs_in_an_empty_environment(tmp_path):
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", tmp_path]
    if subprocess.run([*download, "fastcore"]).returncode:
        pytest.skip("no package registry")
    subprocess.run([sys.executable, ROOT / ".ci/first_chapter", tmp_path], check=True)


def test_stored_scores_belong_to_chapters_and_controls_have_several_seeds():
    rows = load_scores()
    assert {row["chapter"] for row in rows} <= {p.stem[:2] for p in CHAPTERS}
    for row in rows:
        assert row["scores"]
        assert all(0 <= score <= 100 for score in row["scores"])
    controls = [row for row in rows if row["method"] in ("majority", "probe", "side network")]
    assert len(controls) == 6
    assert all(len(row["scores"]) >= 5 for row in controls)


def test_a_generated_prompt_beats_the_controls_on_the_task_with_word_order():
    """A network on the mean of the words has chance accuracy there, and a probe hardly more."""
    mean = {
        row["method"]: sum(row["scores"]) / len(row["scores"])
        for row in load_scores()
        if row["task"] == "two-domains-order"
    }
    generated = max(score for name, score in mean.items() if name.startswith("IDPG"))
    assert generated > mean["probe"] + 20
    assert generated > mean["side network"] + 20
