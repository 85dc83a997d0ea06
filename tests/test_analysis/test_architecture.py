"""The picture of the architecture: its numbers come from the modules, and the tool draws it."""

import runpy
import sys
from pathlib import Path

import cv2
import pytest

from mmcare.analysis import architecture_plot
from mmcare.analysis.architecture import describe_architecture
from mmcare.models import CARE

ROOT = Path(__file__).parents[2]
TOOL = ROOT / 'tools/draw_architecture.py'
PICTURE = ROOT / 'docs/images/architecture.png'
SMALL = dict(
    depths=(1, 2, 1, 1),
    widths=(12, 12, 24, 36),
    memory_widths=(4, 2, 8, 12),
    expansions=((2, 2), (2, 3), (1, 2), (2, 5)),
    head_channels=(1, 1, 4, 12),
)


@pytest.mark.parametrize('arch', ['s0', 's2', SMALL], ids=['s0', 's2', 'small'])
def test_stages_are_those_of_the_arch(arch):
    found = describe_architecture(arch, (64, 96))
    backbone = CARE(arch)
    for stage, index in zip(found.stages, range(4), strict=True):
        width = backbone.arch['widths'][index]
        assert stage.depth == backbone.arch['depths'][index]
        assert stage.memory_width == backbone.arch['memory_widths'][index]
        assert (stage.global_width, stage.local_width) == (width // 3, 2 * width // 3)
        assert stage.expansions == backbone.arch['expansions'][index]
        stride = 4 * 2**index
        assert stage.out_shape == (backbone.out_channels[index], 64 // stride, 96 // stride)
        assert stage.keeps_latent is (index == 3)
        if index > 1:
            head = backbone.arch['head_channels'][index]
            heads = width // 3 // head
            plural = 's' if heads > 1 else ''
            assert stage.global_learner == f'linear attention, {heads} head{plural} of {head}'
        else:
            assert stage.global_learner == 'depth-wise convs 11x1 and 1x11'
    counted = sum(parameter.numel() for parameter in backbone.parameters())
    assert found.params == counted == sum(stage.params for stage in found.stages)


@pytest.mark.parametrize('number', [1, 3])
def test_the_opened_block_is_a_block_of_the_network(number):
    block = describe_architecture(SMALL, (64, 64), number).block
    modules = dict(CARE(SMALL).named_modules())
    parts = (block.global_learner, block.local_learner, block.inter1, block.inter2)
    for layer in (layer for part in parts for layer in part):
        module = modules[layer.path]
        assert layer.params == sum(parameter.numel() for parameter in module.parameters())
        if hasattr(module, 'in_channels'):
            assert (layer.in_shape[0], layer.out_shape[0]) == (
                module.in_channels,
                module.out_channels,
            )
    gamma = block.stage.memory_width + block.stage.global_width + block.stage.local_width
    assert block.params == gamma + sum(layer.params for part in parts for layer in part)
    assert [layer.path.rpartition('.')[2] for layer in block.inter2] == [
        'norm',
        'expand',
        'act',
        'depthwise',
        'project',
    ]


def words(arch, stage: int, monkeypatch, folder: Path) -> list[str]:
    """What a picture says."""
    written = []
    write = architecture_plot._Canvas.write

    def keep(canvas, x, y, text, *arguments, **style):
        written.append(text)
        write(canvas, x, y, text, *arguments, **style)

    monkeypatch.setattr(architecture_plot._Canvas, 'write', keep)
    architecture = describe_architecture(arch, (64, 96), stage)
    architecture_plot.plot_architecture(architecture, folder / 'picture.png')
    return written


def test_what_is_drawn_follows_the_arch(tmp_path, monkeypatch):
    small = words(SMALL, 3, monkeypatch, tmp_path)
    for text in ('16 x 16 x 24', '14 x 8 x 12', '240 x 2 x 3'):
        assert text in small
    assert 'linear attention,\n2 heads of 4' in small
    assert 'stages.2.blocks.0' in small and 'mixer.local_learner.conv7x7' in small
    bare = words(SMALL, 4, monkeypatch, tmp_path)  # its only block keeps the latent channels
    assert 'next state' in small and 'next state' not in bare
    assert 'γ ×' in small and 'γ ×' not in bare
    strips = words(SMALL, 1, monkeypatch, tmp_path)
    assert 'depth-wise conv 11x1 +\ndepth-wise conv 1x11' in strips


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


def test_the_picture_of_the_docs_is_what_the_tool_draws(tmp_path, monkeypatch, capsys):
    run(monkeypatch, '--out', tmp_path / 'new' / 'care.png')
    assert capsys.readouterr().out == f'Written to {tmp_path / "new" / "care.png"}\n'
    drawn, shipped = (cv2.imread(str(path)) for path in (tmp_path / 'new' / 'care.png', PICTURE))
    assert drawn.shape == shipped.shape
    # Fonts are those of matplotlib; its versions may differ in some pixels.
    assert (cv2.absdiff(drawn, shipped).max(axis=2) > 64).mean() < 0.02
    assert PICTURE.stat().st_size < 200_000
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['care.png']


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['s3'], "invalid choice: 's3'"),
        (['--shape', '16', '224'], 'must be at least 32'),
        (['--block', '5'], 'the stage to open must be 1 to 4, got 5'),
        (['--out', 'picture.jpg'], 'must end in .png'),
    ],
)
def test_bad_input_is_refused(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(SystemExit):
        run(monkeypatch)
    assert 'pip install matplotlib' in capsys.readouterr().err
