"""The front pages and the documentation: links lead somewhere, code blocks work.

Code blocks are run by Sybil, see conftest.py at the root.
"""

import re

import pytest
from helpers import ROOT

PLACES = '*.md', 'docs/*.md', 'configs/*/README.md', 'projects/*/README.md'
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))


def anchors(page):
    """Anchors of a page's headings, as GitHub and MyST name them."""
    headings = re.findall(r'^#+ (.+)$', page.read_text(), re.MULTILINE)
    plain = (re.sub(r'[^\w\- ]', '', heading).strip().lower() for heading in headings)
    return {heading.replace(' ', '-') for heading in plain}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        name, _, anchor = link.partition('#')
        if '://' in name:
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f'{link} does not exist'
        assert not anchor or anchor in anchors(target), f'{link} has no such heading'
