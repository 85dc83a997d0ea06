"""Sphinx, for `make docs`: the pages of this folder and the docstrings of the package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mmcare.version import __version__  # noqa: E402 (found through the path above)

project = 'mmcare'
copyright = 'the authors of mmcare, Apache-2.0'
version = release = __version__

extensions = [
    'myst_parser',
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
]
exclude_patterns = ['_build', '_templates']
templates_path = ['_templates']
html_theme = 'furo'
html_title = f'mmcare {release}'

myst_enable_extensions = ['colon_fence', 'dollarmath']
myst_heading_anchors = 3

autodoc_default_options = {'members': True, 'show-inheritance': True}
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
