"""The code blocks of docs/use_in_your_project.md, and a folder in which they can run."""

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from published_reference import published_weights

from mmcare.checkpoint import convert_checkpoint

PAGE = Path(__file__).parents[1] / 'docs' / 'use_in_your_project.md'
PUBLISHED = 'CARETrans_S0.pth.tar'
CONVERTED = 'checkpoints/care_s0_in1k.pth'


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which it begins."""

    language: str
    text: str
    line: int

    @property
    def filename(self) -> str | None:
        """Name of the file that the block holds: its first line, a comment."""
        match = re.match(r'# (\w+\.py)\n', self.text)
        return match[1] if match else None


def blocks() -> list[Block]:
    """All fenced blocks of the page, in order."""
    page = PAGE.read_text()
    return [
        Block(match[1], match[2], page.count('\n', 0, match.start()) + 1)
        for match in re.finditer(r'^```(\w*)\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    ]


def config_files() -> list[str]:
    """Names of the page's files that are configs of models."""
    return [block.filename for block in blocks() if block.filename and '_base_' in block.text]


def make_project(folder: Path) -> Path:
    """Write the page's files, and S0 weights with random values, published and converted."""
    for block in blocks():
        if block.filename:
            (folder / block.filename).write_text(block.text)
    checkpoint = {
        'state_dict': published_weights('s0'),
        'args': Namespace(model='CARE'),
        'epoch': 1,
    }
    torch.save(checkpoint, folder / PUBLISHED)
    convert_checkpoint(folder / PUBLISHED, folder / CONVERTED)
    return folder
