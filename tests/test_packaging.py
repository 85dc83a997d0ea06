"""Wheel, sdist and editable install, each used through mim from an unrelated folder.

Everything is done in a copy of the checkout and in virtual environments that borrow the packages of
the one the tests run in, without a network.
"""

import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from functools import partial

import helpers
import pytest
import yaml
from helpers import FORKS, ROOT

RESOURCES = ('configs', 'model-index.yml', 'tools')
TOOL = """
import argparse, importlib.util
argparse.ArgumentParser(description='a small tool').parse_args()
print('package:', importlib.util.find_spec('mmcare').origin)
"""
PIP = ('-m', 'pip', '--quiet', '--disable-pip-version-check')
run = partial(helpers.run, PYTHONPATH='')  # where a checkout would come before what is installed
INSTALL = (*PIP, 'install', '--no-deps', '--no-build-isolation', '--no-index', '--ignore-installed')


def copy_project(target):
    """Copy what git tracks, with one more tool, which loads no large package.

    What else is in a clone that someone works in, such as a config, is no part of the project.
    """
    tracked = run('git', 'ls-files', cwd=ROOT).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / 'tools' / 'say_where.py').write_text(TOOL)
    return target


def files(folder):
    paths = (path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def new_environment(folder):
    """Make a virtual environment that borrows this one's packages; return its interpreter.

    The .pth files of a folder that a .pth file names are not read, so an editable mmcare of this
    environment stays out.
    """
    venv.create(folder, symlinks=True)
    python = folder / 'bin' / 'python'
    (packages,) = folder.glob('lib/python*/site-packages')
    (packages / 'outer.pth').write_text(f'{sysconfig.get_path("purelib")}\n')
    return python


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp('project') / 'mmcare')


@pytest.fixture(scope='module')
def distributions(project):
    """Build sdist and wheel over the remains of an earlier build."""
    for name in ('mmcare/gone.py', 'mmcare/.mim/configs/gone.py'):
        (project / 'build' / 'lib' / name).parent.mkdir(parents=True, exist_ok=True)
        (project / 'build' / 'lib' / name).touch()
    backend = 'from setuptools import build_meta'
    build = f'{backend}; build_meta.build_sdist("dist"); build_meta.build_wheel("dist")'
    run(sys.executable, '-c', build, cwd=project)
    (sdist,) = (project / 'dist').glob('*.tar.gz')
    (wheel,) = (project / 'dist').glob('*.whl')
    return {'sdist': sdist, 'wheel': wheel}


def test_wheel_and_sdist_hold_what_they_should(project, distributions, tmp_path):
    """``make dist`` builds the wheel from the sdist."""
    packed = wheel_files(distributions['wheel'])
    expected = files(project)
    resources = {f'mmcare/.mim/{n}': d for n, d in expected.items() if n.startswith(RESOURCES)}
    assert {n: d for n, d in packed.items() if n.startswith('mmcare/.mim/')} == resources
    pattern = r'mmcare(_runtime)?/(?!\.mim/)'
    package = {n for n in expected if re.match(pattern, n) and '__pycache__' not in n}
    assert package == {n for n in packed if re.match(pattern, n)}
    assert packed['mmcare/py.typed'] == b''
    with tarfile.open(distributions['sdist']) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert not files(copy_project(tmp_path / 'mmcare')).keys() - names
    assert not [name for name in names if '.mim' in name]


def test_git_ignores_what_the_pages_make():
    files = 'mine.py', 'curves.png', 'predictions/1.jpg', 'look/1.jpg', 'pictures/1.jpg'
    folders = 'data/mine', 'work_dirs/mine', 'exports', 'downloads/mine', 'convert'
    for name in (*files, *(f'{folder}/file' for folder in folders)):
        run('git', 'check-ignore', '--quiet', name, cwd=ROOT)


def test_requirements_name_nothing_of_torch_or_mm(distributions):
    """An environment that has them is left as it is."""
    contents = wheel_files(distributions['wheel'])
    (metadata,) = (name for name in contents if name.endswith('.dist-info/METADATA'))
    fields = Parser().parsestr(contents[metadata].decode())
    for requirement in fields.get_all('Requires-Dist'):
        assert not requirement.startswith(('mm', 'openmim', 'torch')), requirement


@pytest.mark.parametrize('kind', ['editable', pytest.param('wheel', marks=pytest.mark.slow)])
def test_mim_finds_the_installed_package(kind, distributions, tmp_path):
    if FORKS and kind != 'editable':
        pytest.xfail('onedl-mim looks for model-index.yml in the folder of the metadata')
    python, elsewhere = new_environment(tmp_path / 'environment'), tmp_path / 'elsewhere'
    elsewhere.mkdir()
    site_packages = next((tmp_path / 'environment').rglob('outer.pth')).parent
    before = set(site_packages.iterdir())
    if kind == 'editable':
        project = copy_project(tmp_path / 'mmcare')
        run(python, *INSTALL, '--editable', project, cwd=elsewhere)
        package, configs = project / 'mmcare', project / 'configs'
    else:
        run(python, *INSTALL, distributions[kind], cwd=elsewhere)
        package = site_packages / 'mmcare'
        configs = package / '.mim' / 'configs'

    found = run(python, '-m', 'mim', 'search', 'mmcare', '--valid-config', cwd=elsewhere).stdout
    index = yaml.safe_load((package / '.mim' / 'model-index.yml').read_text())
    models = [
        model
        for metafile in index['Import']
        for model in yaml.safe_load((package / '.mim' / metafile).read_text())['Models']
    ]
    assert models
    assert not [model['Name'] for model in models if repr(model['Name']) not in found]

    # Without the two dashes mim takes --help for itself.
    tool = (python, '-m', 'mim', 'run', 'mmcare', 'say_where')
    assert 'a small tool' in run(*tool, '--', '--help', cwd=elsewhere).stdout
    assert f'package: {package / "__init__.py"}' in run(*tool, cwd=elsewhere).stdout
    first = models[0]['Config']
    printed = run(python, '-m', 'mmcare.shipped', first, cwd=elsewhere).stdout.strip()
    assert printed == str(configs / first.removeprefix('configs/'))

    if kind == 'editable':  # the folder that holds a clone does not hide the package in it
        find = 'import importlib.util; print(importlib.util.find_spec("mmcare").origin)'
        origin = run(python, '-c', find, cwd=tmp_path).stdout.strip()
        assert origin == str(package / '__init__.py')
    run(python, *PIP, 'uninstall', '--yes', 'mmcare', cwd=elsewhere)
    assert set(site_packages.iterdir()) == before
    assert not any(elsewhere.iterdir())


def test_the_license_is_named_once(distributions):
    contents = wheel_files(distributions['wheel'])
    (metadata,) = (name for name in contents if name.endswith('.dist-info/METADATA'))
    fields = Parser().parsestr(contents[metadata].decode())
    old, new = fields.get_all('License', []), fields.get_all('License-Expression', [])
    assert old + new == ['Apache-2.0']
    assert not any(each.startswith('License') for each in fields.get_all('Classifier'))
