"""Where operators are expected: exports of CARE, planted problems, each rule, bad input."""

import json
import runpy
import sys

import numpy as np
import pytest
from helpers import ROOT, thin_backbone

from mmcare.export import export_backbone
from mmcare.export.placement import (
    CONVERSION,
    ELSEWHERE,
    NEURAL_ENGINE,
    RULES,
    SOURCES,
    UNCERTAIN,
    judge,
    report_placement,
)
from mmcare.export.source import IMAGENET, Network, Source

ct = pytest.importorskip('coremltools')
mb = pytest.importorskip('coremltools.converters.mil').Builder
mil = pytest.importorskip('coremltools.converters.mil.mil')
TOOL = ROOT / 'tools' / 'placement_report.py'
HALF = np.float16


def program(function, shape=(1, 8, 64, 64)):
    """Build a float16 program of one input x."""
    spec = mb.TensorSpec(shape, dtype=mil.types.fp16)
    return mb.program(input_specs=[spec], opset_version=ct.target.iOS16)(function)


def convert(path, shape=(1, 8, 64, 64), size=None):
    """Write a small package, without passes that change it."""
    model = ct.convert(
        program(lambda x: mb.relu(x=conv(x)), shape),
        inputs=[ct.TensorType(name='x', shape=size or shape, dtype=HALF)],
        convert_to='mlprogram',
        minimum_deployment_target=ct.target.iOS16,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def upsample(x, factor):
    return mb.upsample_bilinear(x=x, scale_factor_height=factor, scale_factor_width=2.0)


def pool(x, sizes, strides=(1, 1)):
    return mb.max_pool(x=x, kernel_sizes=sizes, strides=strides, pad_type='same')


def conv(x, kernel=(3, 3), **options):
    shape = (8, x.shape[1], *kernel)
    return mb.conv(x=x, weight=np.ones(shape, HALF), pad_type='same', **options)


def rules(operators):
    return [finding['rule'] for one in operators for finding in one['findings']]


@pytest.fixture(scope='module', params=['float16', 'float32'])
def exported(request, tmp_path_factory):
    """A thin network as the export writes it."""
    out_dir = tmp_path_factory.mktemp(request.param)
    source = Source('thin', 'random', Network(thin_backbone()), IMAGENET)
    export_backbone(source, out_dir, (64, 96), ('coreml',), request.param)
    return request.param, out_dir / 'thin_64x96.mlpackage'


def test_exports(exported, tmp_path):
    precision, package = exported
    report, text = report_placement(package, tmp_path)
    placed, stays = report['devices'], precision == 'float16'
    number = len(report['operators'])
    expected = {NEURAL_ENGINE: number - 1, CONVERSION: 1} if stays else {ELSEWHERE: number}
    assert number > 50 and {key: n for key, n in placed.items() if n} == expected
    assert report['all_on_neural_engine'] is stays and report['switches'] == 0
    assert ('NOT everything' in text) is not stays
    groups = [one['group'] for one in report['operators']]
    assert groups == sorted(groups)
    outputs = {one['name']: one['outputs'] for one in report['operators']}
    for name, shape in dict(stage1='1, 16, 16, 24', stage4='1, 128, 2, 3').items():
        assert name in groups and outputs[name] == [f'{precision} ({shape})']
    if stays:  # stage 4 has rows of 3 values of 2 bytes, padded to 64
        assert report['operators'][-1]['padding'] == pytest.approx(64 / 6, abs=1e-3)
    assert json.loads((tmp_path / 'thin_64x96_placement.json').read_text()) == report
    assert (tmp_path / 'thin_64x96_placement.txt').read_text() == text + '\n'


def run_tool(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [str(TOOL), *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(TOOL), run_name='__main__')
    return stop.value.code


def test_tool(exported, tmp_path, monkeypatch, capsys):
    precision, package = exported
    code = run_tool(monkeypatch, package, '--out-dir', tmp_path)
    assert code == (0 if precision == 'float16' else 1)
    assert capsys.readouterr().out.endswith(f'on the neural engine\nWritten to {tmp_path}\n')
    assert run_tool(monkeypatch, tmp_path / 'gone', '--out-dir', tmp_path) == 2
    assert capsys.readouterr().err == f'error: {tmp_path / "gone"} does not exist\n'


def test_float32_island():
    """A GELU in float32, between conversions: those at the edge of the model do not count."""

    def function(x):
        x = mb.gelu(x=mb.cast(x=mb.relu(x=x), dtype='fp32'))
        return mb.cast(x=mb.relu(x=mb.cast(x=x, dtype='fp16')), dtype='fp32')

    found = judge(program(function))
    caught = [one['type'] for one in found if one['device'] == ELSEWHERE]
    assert caught == ['cast', 'gelu', 'cast'] and found[-1]['device'] == CONVERSION
    assert rules(found) == 3 * ['float32']


@pytest.mark.parametrize(
    ('kind', 'device', 'rule'),
    [('range', ELSEWHERE, 'free size'), ('enumerated', UNCERTAIN, 'enumerated size')],
)
def test_free_sizes(kind, device, rule, tmp_path):
    side = ct.RangeDim(32, 128, default=64)
    size = dict(
        range=ct.Shape((1, 8, side, 64)),
        enumerated=ct.EnumeratedShapes([[1, 8, 64, 64], [1, 8, 96, 64]]),
    )[kind]
    shape = (1, 8, mil.get_new_symbol(), 64)
    package = convert(tmp_path / 'free.mlpackage', shape, size)
    report, text = report_placement(package, tmp_path)
    assert report['flexible_inputs'] == {'x': kind} and not report['all_on_neural_engine']
    assert {one['device'] for one in report['operators']} == {device}
    assert set(rules(report['operators'])) == {rule}
    assert f'free sizes ({kind})' in text and RULES[rule][2] in text


def test_condition():
    """Operators in the branches of a condition leave the engine with it."""

    def function(x):
        positive = mb.greater(x=mb.reduce_max(x=x, keep_dims=False), y=HALF(0))
        return mb.cond(
            pred=positive,
            _true_fn=lambda: mb.add(x=x, y=HALF(1)),
            _false_fn=lambda: mb.relu(x=x),
        )

    found = {one['type']: one['device'] for one in judge(program(function))}
    assert found['cond'] == found['add'] == found['relu'] == ELSEWHERE


@pytest.mark.parametrize(
    ('function', 'rule'),
    [
        (lambda x: conv(x, (29, 13), strides=(4, 16)), None),
        (lambda x: conv(x, (11, 1)), None),
        (lambda x: conv(x, (1, 14)), 'kernel'),
        (lambda x: conv(x, (30, 1)), 'kernel'),
        (lambda x: conv(mb.squeeze(x=x, axes=[0]), (14,)), 'kernel'),
        (lambda x: conv(x, strides=(5, 5)), 'stride'),
        (lambda x: conv(x, dilations=(2, 2)), 'dilation'),
        (lambda x: conv(x, dilations=(1, 9)), 'large dilation'),
        (lambda x: mb.reshape(x=x, shape=(1, 8, 1, 64, 64)), None),
        (lambda x: mb.reshape(x=x, shape=(1, 2, 4, 1, 64, 64)), 'rank'),
        (lambda x: mb.reshape(x=x, shape=(1, 2, 16384)), None),
        (lambda x: mb.reshape(x=x, shape=(1, 32768)), 'axis'),
        (lambda x: mb.greater(x=x, y=HALF(1)), None),
        (lambda x: mb.cast(x=mb.relu(x=x), dtype='int32'), 'data type'),
        (lambda x: pool(x, (3, 3), (2, 2)), None),
        (lambda x: pool(x, (14, 1)), 'pooling'),
        (lambda x: pool(x, (4, 4), (4, 4)), 'pooling'),
        (lambda x: upsample(x, 2.0), 'newer operator'),
        (lambda x: upsample(x, 4.0), 'newer operator, upsampling'),
        (lambda x: mb.gather(x=x, indices=np.array([2, 0], np.int32), axis=1), 'operator'),
        (lambda x: mb.sin(x=x), 'newer operator'),
        (lambda x: mb.cumsum(x=x), 'unknown operator'),
    ],
)
def test_rules(function, rule):
    last = judge(program(function))[-1]
    assert ', '.join(rules([last])) == (rule or '')
    assert last['device'] == (RULES[rule.split(',')[0]][0] if rule else NEURAL_ENGINE)


def test_page_has_the_rules():
    page = (ROOT / 'docs' / 'placement.md').read_text()
    for name, (device, sources, text) in RULES.items():
        assert f'| {name} | {text} | {device} | {sources} |' in page
        assert all(f'[{one}]({SOURCES[one][1]})' in page for one in sources.split('; '))


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('gone.mlpackage', 'does not exist'),
        ('empty.mlpackage', 'cannot be read'),
        ('cut.mlpackage', 'cannot be read'),
        ('network.mlmodel', 'cannot be read'),
    ],
)
def test_bad_input(name, words, tmp_path):
    package = convert(tmp_path / 'cut.mlpackage')
    (file,) = package.rglob('*.mlmodel')
    file.write_bytes(file.read_bytes()[:300])
    (tmp_path / 'empty.mlpackage').mkdir()
    spec = ct.proto.Model_pb2.Model(specificationVersion=4)
    spec.neuralNetwork.SetInParent()
    (tmp_path / 'network.mlmodel').write_bytes(spec.SerializeToString())
    out_dir = tmp_path / 'out'
    with pytest.raises((FileNotFoundError, ValueError), match=rf'{name} {words}'):
        report_placement(tmp_path / name, out_dir)
    assert not out_dir.exists()
