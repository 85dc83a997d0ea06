"""Build steps that put configs, tools and the model index into mmcare/.mim, for mim to find.

A wheel holds copies. An editable install must show the checkout as it is now, so mmcare/.mim gets
links there, and mim has to be led to the checkout. Both mim and mmengine take the folder of a
package to be ``join(site_packages, 'mmcare')`` or, if that does not exist, ``join(site_packages,
line)`` with the first line of the distribution's top_level.txt. An editable install (PEP 660) has
its metadata in site-packages, but no ``mmcare`` next to it. Its top_level.txt therefore starts with
the absolute path of the checkout's package, which ``join`` returns unchanged. (A folder ``mmcare``
in the editable wheel would be found too, but it could hold only copies.) The file is listed in
RECORD like any other, so uninstalling removes it.
"""

import shutil
import warnings
from pathlib import Path

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
PACKAGES = ('mmcare', 'mmcare_runtime')
# From version 77 on (Python 3.9), setuptools has PEP 639's field, and warns of the older one.
HAS_EXPRESSION = int(setuptools.__version__.split('.')[0]) >= 77
LICENSE = {'license_expression' if HAS_EXPRESSION else 'license': 'Apache-2.0'}
RESOURCES = ('configs', 'model-index.yml', 'tools')


def copy_resource(name: str, folder: Path) -> None:
    """Copy one of the RESOURCES, a file or a folder, into `folder`."""
    if (ROOT / name).is_dir():
        ignore = shutil.ignore_patterns('__pycache__', '*.py[cod]')
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    else:
        shutil.copy2(ROOT / name, folder / name)


class BuildPy(build_py):
    """Copy the resources into wheels."""

    def run(self) -> None:
        if self.editable_mode:  # nothing is built: the package stays in the checkout
            return
        package = Path(self.build_lib, 'mmcare')
        # setuptools keeps this folder between builds, with files that the checkout no longer has.
        for name in PACKAGES:
            shutil.rmtree(Path(self.build_lib, name), ignore_errors=True)
        super().run()
        (package / '.mim').mkdir()
        for name in RESOURCES:
            copy_resource(name, package / '.mim')


class EditableWheel(editable_wheel):
    """Link the resources into the checkout's package, and lead mim and mmengine there."""

    def run(self) -> None:
        self.link_resources(ROOT / 'mmcare' / '.mim')
        if self.dist_info_dir is None:
            self.reinitialize_command('dist_info', output_dir=self.dist_dir)
            self.run_command('dist_info')
            self.dist_info_dir = self.get_finalized_command('dist_info').dist_info_dir
        # The names follow on lines of their own for importlib.metadata.packages_distributions().
        top_level = Path(self.dist_info_dir, 'top_level.txt')
        lines = [str(ROOT / 'mmcare'), *PACKAGES, '']
        top_level.write_text('\n'.join(lines), encoding='utf-8')
        super().run()

    def link_resources(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in RESOURCES:
            source = ROOT / name
            try:
                (folder / name).symlink_to(
                    Path('..', '..', name), target_is_directory=source.is_dir()
                )
            except OSError:  # Windows lets only some users make links
                copy_resource(name, folder)
                warnings.warn(
                    f'no link to {source} could be made, so {folder / name} is a copy: '
                    'run `pip install -e .` again after changing it',
                    stacklevel=2,
                )


setup(cmdclass={'build_py': BuildPy, 'editable_wheel': EditableWheel}, **LICENSE)
