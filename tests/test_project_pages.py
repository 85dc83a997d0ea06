"""The front pages, the documentation's index and the workflow agree with what is there."""

import pkgutil
import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import mmcare
from mmcare.deploy.requirements import INSTALL

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob('*.md'),
        *(ROOT / 'docs').glob('*.md'),
        *(ROOT / 'configs').glob('*/README.md'),
    ]
)
# Modules in packages that have a page of their own.
BEHIND_TOOLS = {
    'mmcare.analysis.architecture',
    'mmcare.analysis.architecture_plot',
    'mmcare.analysis.memory',
    'mmcare.analysis.plots',
    'mmcare.analysis.report',
    'mmcare.demo.detection',
    'mmcare.demo.segmentation',
    'mmcare.deploy.latency',
    'mmcare.deploy.placement',
}
WORKFLOW = yaml.safe_load((ROOT / '.github/workflows/ci.yml').read_text())


def make_targets() -> set[str]:
    """Targets that `make help` lists."""
    return set(re.findall(r'^([a-z.-]+):.*## ', (ROOT / 'Makefile').read_text(), re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MyST name them."""
    headings = re.findall(r'^#+ (.+)$', page.read_text(), re.MULTILINE)
    return {
        re.sub(r'[^\w\- ]', '', heading).strip().lower().replace(' ', '-') for heading in headings
    }


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r'\]\(([^)\s]+)\)', page.read_text())
    for link in links:
        if '://' in link:
            continue
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_questions_cite_threads():
    """Every answer of the FAQ names the threads that it comes from."""
    page = (ROOT / 'docs/faq.md').read_text()
    sections = re.split(r'^## ', page, flags=re.MULTILINE)[1:]
    assert len(sections) >= 5
    thread = re.compile(
        r'\[([\w-]*)#(\d+)\]\(https://github\.com/([\w-]+)/([\w-]+)/(?:issues|pull)/(\d+)\)'
    )
    for section in sections:
        found = thread.findall(section)
        assert found, section.splitlines()[0]
        for name, number, _, repository, linked in found:
            assert number == linked and name in ('', repository)


def test_reference_lists_every_module():
    listed = re.findall(r'^   (mmcare[\w.]+)$', (ROOT / 'docs/api.md').read_text(), re.MULTILINE)
    modules = {f'mmcare.{module.name}' for module in pkgutil.iter_modules(mmcare.__path__)}
    assert set(listed) >= (modules - {'mmcare.version'}) | BEHIND_TOOLS
    for name in listed:
        assert (ROOT / (name.replace('.', '/') + '.py')).is_file() or (
            ROOT / name.replace('.', '/') / '__init__.py'
        ).is_file(), name


def test_every_page_is_in_the_index():
    """Pages beside the index are found by a pattern; those it leaves out are named."""
    index = (ROOT / 'docs/index.md').read_text()
    named = re.findall(r'^([\w]+|\[b-z\]\*)$', index, re.MULTILINE)
    assert '[b-z]*' in named
    pages = {page.stem for page in (ROOT / 'docs').glob('*.md')} - {'index'}
    assert {page for page in pages if not 'b' <= page[0] <= 'z'} <= set(named)


def test_changelog_begins_with_this_version():
    version = mmcare.__version__
    assert str(Version(version)) == version, 'not in the normal form of PEP 440'
    heads = re.findall(r'^## (\S+)', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    assert heads[0] == version
    assert heads == sorted(heads, key=Version, reverse=True)


def test_workflow_runs_make_targets():
    (job,) = WORKFLOW['jobs'].values()
    commands = [step['run'] for step in job['steps'] if 'run' in step]
    targets = [command.split()[1] for command in commands if command.startswith('make ')]
    assert len(targets) == len(commands), 'the workflow runs nothing but make'
    assert {'lint', 'typecheck', 'test', 'docs', 'dist'} <= set(targets) <= make_targets()
    page = ' '.join((ROOT / 'CONTRIBUTING.md').read_text().split())
    named = re.search(r'runs nothing but such targets: (.*?)\. The others', page)[1]
    assert re.findall(r'`(.+?)`', named) == targets


def test_contributing_names_the_targets():
    page = (ROOT / 'CONTRIBUTING.md').read_text()
    table = [line.split('|')[1] for line in page.splitlines() if line.startswith('| `make ')]
    named = re.findall(r'`make ([a-z.-]+)`', ''.join(table))
    # The rest are what others call first, or another name for it.
    assert {*named, 'help', 'install', '.venv-onedl'} == make_targets()


def test_advice_needs_no_package_index():
    """mmcare is not published there: extras are installed from a clone."""
    for page in PAGES:
        assert not re.search(r"""install ["']?mmcare""", page.read_text()), page
    assert 'install mmcare' not in INSTALL and 'install "mmcare' not in INSTALL


def test_names_that_look_like_python_are_python():
    """Or they are types in a config: hooks and the like, which the registries have."""
    text = (ROOT / 'CHANGELOG.md').read_text()
    for name in re.findall(r'`mmcare\.([A-Z]\w+)`', text):
        assert hasattr(mmcare, name), name


def test_what_builds_the_docs_is_what_the_extra_installs():
    wanted = (ROOT / 'requirements/docs.txt').read_text()
    configuration = (ROOT / 'docs/conf.py').read_text()
    for package, setting in (('sphinx', 'sphinx.ext.autodoc'), ('myst-parser', 'myst_parser')):
        assert package in wanted and setting in configuration
    theme = re.search(r"html_theme = '(\w+)'", configuration)[1]
    assert re.search(rf'^{theme}\b', wanted, re.MULTILINE)
