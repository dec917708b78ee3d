"The course is what it promises: each chapter has a picture, a score, a summary and exercises, and needs no later one."
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
spec = importlib.util.spec_from_file_location('course_pages', ROOT/'docs/course.py')
course = importlib.util.module_from_spec(spec)
spec.loader.exec_module(course)
CHAPTERS = course.chapters()
DONE = [p for p in CHAPTERS if course.solution(p).exists()] # chapters that have their last form


def read(path):
    return nbformat.read(path, 4)


def test_chapters_are_numbered_without_a_gap_up_to_the_last_one_in_its_last_form():
    numbers = [p.stem[:2] for p in CHAPTERS]
    assert len(numbers)==len(set(numbers)) and numbers[0]=='00'


@pytest.mark.parametrize('path', DONE, ids=lambda p: p.stem)
def test_a_chapter_has_a_picture_a_score_a_summary_and_three_exercises(path):
    nb = read(path)
    assert course.drawings(nb), 'a drawing of docs/pictures.py'
    assert course.exercises(nb)==['Predict', 'Modify', 'Invent']
    heads = re.findall(r'^## (.+)$', '\n'.join(c.source for c in nb.cells if c.cell_type=='markdown'), re.M)
    assert [h for h in heads if h in course.CLOSING]==list(course.CLOSING)
    assert f'](solutions/{path.name})' in course.prose_with_links(path)
    code = '\n'.join(c.source for c in nb.cells if c.cell_type=='code')
    assert re.search(r'\bnote\(', code) and re.search(r"score_table\('\d\d'\)", code), 'a score in the table'


@pytest.mark.parametrize('path', DONE, ids=lambda p: p.stem)
def test_a_chapter_says_what_it_takes_and_who_may_skip_it(path):
    text = course.prose_with_links(path)
    assert '**It takes**' in text and '**You need**' in text and '**Skip it if**' in text


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_needs_no_later_one(path):
    later = [n for n in course.needs(path) if n>=int(path.stem[:2])]
    assert not later, f'{path.stem} needs {later}'


def test_what_a_later_chapter_builds_is_used_with_a_word_on_where():
    "`from idp_tutorial.methods.idpg import …` in chapter 00: its text links to the chapter that exports the module"
    built = {}
    for path in CHAPTERS:
        for module in re.findall(r'#\| default_exp (\S+)', '\n'.join(c.source for c in read(path).cells)):
            built[f'idp_tutorial.{module}'] = path
    assert len(built)>=7
    for path in CHAPTERS:
        code = '\n'.join(c.source for c in read(path).cells if c.cell_type=='code')
        used = re.findall(r'^from (\S+) import', code, re.M)
        later = {built[m].name for m in used if m in built and built[m].name>path.name}
        assert all(f']({name})' in course.prose_with_links(path) for name in later), (path.name, later)


@pytest.mark.parametrize('path', DONE, ids=lambda p: p.stem)
def test_an_idea_fits_into_25_lines(path):
    long = {name: n for name,n in course.ideas(read(path)).items() if n>25}
    assert not long


@pytest.mark.parametrize('path', DONE, ids=lambda p: p.stem)
def test_the_three_closing_texts_have_three_sentences(path):
    text = course.prose_with_links(path)
    for head in course.CLOSING[:2]:
        body = re.search(rf'## {head}\n\n(.*?)\n\n', text, re.S)[1]
        sentences = re.split(r'(?<=[.?!])\s+', re.sub(r'`[^`]*`|\]\([^)]*\)', 'x', body.replace('\n', ' ')).strip())
        assert len(sentences)==3, (head, sentences)


@pytest.mark.parametrize('path', DONE, ids=lambda p: p.stem)
def test_solutions_answer_all_three(path):
    text = course.prose_with_links(course.solution(path))
    assert [kind in text for kind in ('**1. Predict.**', '**2. Modify.**', '**3. Invent.**')]==[True]*3


def test_the_course_takes_six_hours_and_no_chapter_more_than_25_minutes_or_60_seconds():
    rows = [course.row(p) for p in CHAPTERS]
    assert max(r['minutes'] for r in rows)<=25 and sum(r['minutes'] for r in rows)<=6*60
    assert max(r['seconds'] for r in rows)<60
    assert course.first_score()<=5


def test_headings_home_and_the_page_of_chapters_say_what_the_table_says():
    notebooks,page = course.made()
    assert not notebooks, 'run `python docs/course.py write`'
    assert page==(course.COURSE/'chapters.md').read_text(encoding='utf-8'), 'run `python docs/course.py write`'
    home = course.HOME.read_text(encoding='utf-8')
    assert set(re.findall(r'course/(\d\d_\w+)\.ipynb\) \d+′', home))=={p.stem for p in CHAPTERS}


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_links_to_every_other_that_it_names_and_sets_itself_up(path):
    text = course.prose_with_links(path)
    named = set(re.findall(r'[Cc]hapters?\s+\[?(\d\d)', text))-{path.stem[:2]}
    linked = set(re.findall(r'\]\((\d\d)_\w+\.ipynb', text))
    assert named<=linked
    first = next(c.source for c in read(path).cells if c.cell_type=='code' and 'default_exp' not in c.source)
    assert "find_spec('idp_tutorial') is None" in first and '%pip install' in first


@pytest.mark.parametrize('path', [*CHAPTERS, *map(course.solution, DONE)], ids=lambda p: f'{p.parent.name}/{p.stem}')
def test_code_is_read_aloud_one_statement_a_line(path):
    for c in read(path).cells:
        if c.cell_type=='code':
            assert max(map(len, c.source.split('\n')))<=100, c.source
            tree = ast.walk(ast.parse(re.sub(r'^(\s*)[%!].*$', r'\1pass', c.source, flags=re.M)))
            lines = [n.lineno for n in tree if isinstance(n, ast.stmt)]
            assert len(lines)==len(set(lines)), c.source


def test_binder_finds_what_its_requirements_name():
    "pip reads a path behind `-c` from the folder of the file that names it, and `.` from the repository's root"
    lines = (ROOT/'.binder/requirements.txt').read_text().splitlines()
    named = [line.split()[1] for line in lines if line.startswith(('-c', '-r'))]
    assert named and all((ROOT/'.binder'/path).is_file() for path in named)
    assert '.[experiments]' in lines and (ROOT/'setup.py').is_file()


@pytest.mark.slow
def test_the_first_chapter_runs_in_an_empty_environment(tmp_path):
    asked = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '-d', tmp_path, 'fastcore']
    if subprocess.run(asked).returncode:
        pytest.skip('no package registry')
    subprocess.run([sys.executable, ROOT/'.ci/first_chapter', tmp_path], check=True)


def test_stored_scores_are_of_chapters_that_are_there_and_the_controls_of_several_seeds():
    rows = json.loads((course.COURSE/'scores.json').read_text(encoding='utf-8'))
    there = {p.stem[:2] for p in CHAPTERS}
    assert {r['chapter'] for r in rows}<=there
    assert all(r['scores'] and all(0<=s<=100 for s in r['scores']) for r in rows)
    controls = [r for r in rows if r['method'] in ('majority', 'probe', 'side network')]
    assert len(controls)==6 and all(len(r['scores'])>=5 for r in controls)


def test_the_variant_of_the_running_task_needs_a_model_that_reads():
    "A network on the mean of the words guesses there, a probe hardly does better, and a written prompt answers"
    rows = json.loads((course.COURSE/'scores.json').read_text(encoding='utf-8'))
    mean = {r['method']: sum(r['scores'])/len(r['scores']) for r in rows if r['task']=='two-domains-order'}
    written = max(score for name,score in mean.items() if name.startswith('IDPG'))
    assert written>mean['probe']+20 and written>mean['side network']+20
