"""Wheel, sdist and editable install, each used through mim from an unrelated folder.

Everything is done in a copy of the checkout and in virtual environments that borrow the packages of
the one the tests run in, without a network.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from forks import FORKS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (
    '.ci',
    '.github',
    '.pre-commit-config.yaml',
    'CHANGELOG.md',
    'CONTRIBUTING.md',
    'LICENSE',
    'MANIFEST.in',
    'Makefile',
    'README.md',
    'configs',
    'docs',
    'mmcare',
    'model-index.yml',
    'pyproject.toml',
    'requirements',
    'setup.py',
    'tests',
    'tools',
)
RESOURCES = ('configs', 'model-index.yml', 'tools')
TOOL = """
import argparse
import importlib.util

argparse.ArgumentParser(description='{description}').parse_args()
print('package:', importlib.util.find_spec('mmcare').origin)
"""
PIP = ('-m', 'pip', '--quiet', '--disable-pip-version-check')
INSTALL = (*PIP, 'install', '--no-deps', '--no-build-isolation', '--no-index', '--ignore-installed')


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONWARNINGS': 'ignore'},
    )
    assert result.returncode == 0, f'{command}\n{result.stdout}\n{result.stderr}'
    return result.stdout


def copy_project(target: Path) -> Path:
    """Copies what is packed, with one more tool, which loads no large package."""
    target.mkdir(parents=True)
    ignore = shutil.ignore_patterns('.mim', '__pycache__', '_build', '_generated')
    for name in PROJECT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, target / name)
    (target / 'tools' / 'say_where.py').write_text(TOOL.format(description='a small tool'))
    return target


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def resources(project: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(project).items() if name.startswith(RESOURCES)}


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def new_environment(folder: Path) -> Path:
    """Makes a virtual environment that borrows this one's packages; returns its interpreter.

    The .pth files of a folder that a .pth file names are not read, so an editable mmcare of this
    environment stays out.
    """
    venv.create(folder, symlinks=os.name != 'nt')
    python = folder / ('Scripts/python.exe' if os.name == 'nt' else 'bin/python')
    packages = run(
        python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))', cwd=folder
    )
    Path(packages.strip(), 'outer.pth').write_text(f'{sysconfig.get_path("purelib")}\n')
    return python


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp('project') / 'mmcare')


@pytest.fixture(scope='module')
def distributions(project: Path) -> dict[str, Path]:
    """Builds wheel and sdist beside the remains of an earlier build."""
    for name in ('mmcare/gone.py', 'mmcare/.mim/configs/gone.py'):
        (project / 'build' / 'lib' / name).parent.mkdir(parents=True, exist_ok=True)
        (project / 'build' / 'lib' / name).touch()
    backend = 'from setuptools import build_meta'
    build = f'{backend}; build_meta.build_sdist("dist"); build_meta.build_wheel("dist")'
    run(sys.executable, '-c', build, cwd=project)
    (sdist,) = (project / 'dist').glob('*.tar.gz')
    (wheel,) = (project / 'dist').glob('*.whl')
    return {'sdist': sdist, 'wheel': wheel}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / 'elsewhere'
    folder.mkdir()
    yield folder
    assert not any(folder.iterdir())


def test_wheel_holds_resources(project: Path, distributions: dict[str, Path]) -> None:
    prefix = 'mmcare/.mim/'
    packed = {
        name.removeprefix(prefix): data
        for name, data in wheel_files(distributions['wheel']).items()
        if name.startswith(prefix)
    }
    assert packed == resources(project)


def test_sdist_holds_the_project_once(distributions: dict[str, Path], tmp_path: Path) -> None:
    """With all that the tests read, so that they can be run from it."""
    with tarfile.open(distributions['sdist']) as archive:
        names = {name.partition('/')[2] for name in archive.getnames()}
    assert not files(copy_project(tmp_path / 'mmcare')).keys() - names
    assert not [name for name in names if '.mim' in name]


def test_data_of_the_package_is_packed(project: Path, distributions: dict[str, Path]) -> None:
    """Files beside the modules must each be named in pyproject.toml."""
    data = {name for name in files(project) if name.startswith('mmcare/') and name[-3:] != '.py'}
    data = {name for name in data if not re.search(r'__pycache__|^mmcare/\.mim/', name)}
    assert 'mmcare/deploy/peers.csv' in data
    assert data <= wheel_files(distributions['wheel']).keys()
    with tarfile.open(distributions['sdist']) as archive:
        assert data <= {name.partition('/')[2] for name in archive.getnames()}


def test_wheel_from_sdist_equals_wheel_from_checkout(
    distributions: dict[str, Path], tmp_path: Path
) -> None:
    options = ('wheel', '--no-deps', '--no-build-isolation', '--no-index', '--wheel-dir', tmp_path)
    run(sys.executable, *PIP, *options, distributions['sdist'], cwd=tmp_path)
    (wheel,) = tmp_path.glob('*.whl')
    assert wheel_files(wheel) == wheel_files(distributions['wheel'])


def test_requirements_name_nothing_of_torch_or_mm(distributions: dict[str, Path]) -> None:
    contents = wheel_files(distributions['wheel'])
    (metadata,) = (name for name in contents if name.endswith('.dist-info/METADATA'))
    fields = Parser().parsestr(contents[metadata].decode())
    required = defaultdict(set)
    for requirement in fields.get_all('Requires-Dist'):
        name = re.match(r'[\w.-]+', requirement)[0].lower()
        extra = re.search(r'extra == "(\w+)"', requirement)
        required[extra[1] if extra else ''].add(name)
    assert {'numpy', 'safetensors'} <= required['']
    assert required.keys() >= {'', 'docs', 'export', 'mim', 'tests'}
    for extra in required.keys() - {'mim'}:
        assert not [name for name in required[extra] if name.startswith(('mm', 'openmim', 'torch'))]
    assert required['mim'] == {'mmcv', 'mmengine'}
    assert fields['License-Expression'] == 'Apache-2.0'


@pytest.mark.parametrize('kind', ['editable', 'wheel', 'sdist'])
def test_mim_finds_the_installed_package(
    kind: str, distributions: dict[str, Path], tmp_path: Path, elsewhere: Path
) -> None:
    if FORKS and kind != 'editable':
        pytest.xfail('onedl-mim looks for model-index.yml in the folder of the metadata')
    python = new_environment(tmp_path / 'environment')
    site_packages = next((tmp_path / 'environment').rglob('outer.pth')).parent
    before = set(site_packages.iterdir())
    if kind == 'editable':
        project = copy_project(tmp_path / 'mmcare')
        source = files(project)
        run(python, *INSTALL, '--editable', project, cwd=elsewhere)
        package = project / 'mmcare'
        configs = project / 'configs'
    else:
        run(python, *INSTALL, distributions[kind], cwd=elsewhere)
        package = site_packages / 'mmcare'
        configs = package / '.mim' / 'configs'

    found = run(python, '-m', 'mim', 'search', 'mmcare', '--valid-config', cwd=elsewhere)
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
    assert 'a small tool' in run(*tool, '--', '--help', cwd=elsewhere)
    assert f'package: {package / "__init__.py"}' in run(*tool, cwd=elsewhere)

    first = models[0]['Config']
    printed = run(python, '-m', 'mmcare.shipped', first, cwd=elsewhere).strip()
    assert printed == str(configs / first.removeprefix('configs/'))

    if kind == 'editable':
        # What the developer changes afterwards is there at once.
        (project / 'tools' / 'later.py').write_text(TOOL.format(description='a later tool'))
        later = run(python, '-m', 'mim', 'run', 'mmcare', 'later', '--', '--help', cwd=elsewhere)
        assert 'a later tool' in later
        (project / 'tools' / 'later.py').unlink()
        # The folder that holds a clone does not hide the package in it.
        find = 'import importlib.util; print(importlib.util.find_spec("mmcare").origin)'
        assert run(python, '-c', find, cwd=tmp_path).strip() == str(package / '__init__.py')

    run(python, *PIP, 'uninstall', '--yes', 'mmcare', cwd=elsewhere)
    assert set(site_packages.iterdir()) == before
    if kind == 'editable':
        shutil.rmtree(package / '.mim')
        made = {name for name in files(project).keys() - source.keys() if '.pyc' not in name}
        assert not made


def test_editable_install_copies_where_links_are_refused(tmp_path: Path) -> None:
    project = copy_project(tmp_path / 'mmcare')
    script = (
        'import pathlib\n'
        'from setuptools import build_meta\n'
        'def refuse(*arguments, **options): raise OSError("no links here")\n'
        'pathlib.Path.symlink_to = refuse\n'
        'build_meta.build_editable(".")\n'
    )
    run(sys.executable, '-c', script, cwd=project)
    assert files(project / 'mmcare' / '.mim') == resources(project)
    (wheel,) = project.glob('*.whl')
    assert f'{project / "mmcare"}\nmmcare\n'.encode() in wheel_files(wheel).values()


@pytest.fixture
def wheel_python(distributions: dict[str, Path], tmp_path: Path) -> Path:
    """An interpreter that has mmcare from the wheel, beside this environment's packages."""
    python = new_environment(tmp_path / 'environment')
    run(python, *INSTALL, distributions['wheel'], cwd=tmp_path)
    return python


USER = """
from mmcare.models import CARE

channels: tuple[int, ...] = CARE('s0').out_channels
wrong: str = CARE('s0').out_channels
CARE(arch=3)
"""


def test_wheel_says_that_it_is_typed(distributions: dict[str, Path]) -> None:
    assert wheel_files(distributions['wheel'])['mmcare/py.typed'] == b''


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('mypy') is None, reason='mypy is not installed')
def test_type_checkers_see_the_types_of_the_wheel(wheel_python: Path, elsewhere: Path) -> None:
    """A user's code is checked against mmcare as it is installed."""
    user = elsewhere.parent / 'user.py'
    user.write_text(USER)
    options = ('--config-file=', '--cache-dir', elsewhere.parent / 'cache')
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', '--python-executable', wheel_python, *options, user],
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    errors = [
        line.partition('user.py:')[2] for line in done.stdout.splitlines() if 'user.py' in line
    ]
    assert [error.partition(':')[0] for error in errors] == ['5', '6'], done.stdout + done.stderr
    assert '"tuple[int, ...]"' in errors[0] and '"arch"' in errors[1]


@pytest.mark.slow
def test_a_shipped_config_is_trained_from_the_wheel(wheel_python: Path, tmp_path: Path) -> None:
    """Data by ``mim run``, training by ``mim train``, in a folder of its own."""
    folder = tmp_path / 'project'
    folder.mkdir()
    mim = (wheel_python, '-m', 'mim')
    data = ('make_sample_data', 'imagenet', 'data/imagenet', '--train=8', '--val=4', '--size=64')
    assert 'Written to data/imagenet' in run(*mim, 'run', 'mmcare', *data, cwd=folder)
    config = run(wheel_python, '-m', 'mmcare.shipped', 'imagenet/care_s0_in1k', cwd=folder).strip()
    package = run(wheel_python, '-c', 'import mmcare; print(mmcare.__file__)', cwd=folder).strip()
    for path in (config, package):
        assert tmp_path / 'environment' in Path(path).parents
    options = (
        'train_cfg.max_epochs=1',
        'train_dataloader.batch_size=4',
        'train_dataloader.num_workers=0',
        'val_dataloader.num_workers=0',
        'val_dataloader.persistent_workers=False',
    )
    run(*mim, 'train', 'mmpretrain', config, '--cfg-options', *options, cwd=folder)
    assert (folder / 'work_dirs' / 'care_s0_in1k' / 'epoch_1.pth').is_file()


def test_ruff_has_one_version() -> None:
    places = (ROOT / '.pre-commit-config.yaml', ROOT / 'requirements' / 'lint.txt')
    pinned = [re.findall(r'ruff==(\S+)\b', place.read_text()) for place in places]
    assert all(pinned), 'a file does not name the version'
    assert len(set().union(*pinned)) == 1
