"""Where operators are expected: exports of CARE, planted problems, each rule, bad input."""

import json
import sys

import numpy as np
import pytest
from helpers import ROOT, run, thin_backbone

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


def convert(function, shape, path, size=None):
    """Write a float16 program of one input x as a package, without passes that change it."""
    model = ct.convert(
        program(function, shape),
        inputs=[ct.TensorType(name='x', shape=size or shape, dtype=HALF)],
        convert_to='mlprogram',
        minimum_deployment_target=ct.target.iOS16,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def conv(x, kernel=(3, 3), **options):
    shape = (8, x.shape[1], *kernel)
    return mb.conv(x=x, weight=np.ones(shape, HALF), pad_type='same', **options)


def devices(operators):
    return {one['name']: one['device'] for one in operators}


def rules(operators):
    return [finding['rule'] for one in operators for finding in one['findings']]


# ------------------------------------------------------------------------------ exports of CARE


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


def test_tool(exported, tmp_path):
    precision, package = exported
    done = run(sys.executable, TOOL, package, '--out-dir', tmp_path, check=False)
    assert done.returncode == (0 if precision == 'float16' else 1), done.stderr
    assert done.stdout.endswith(f'on the neural engine\nWritten to {tmp_path}\n')


# ------------------------------------------------------------------------------ planted problems


def test_float32_island():
    """A GELU in float32, between conversions: those at the edge of the model do not count."""

    def function(x):
        inner = mb.cast(x=mb.relu(x=x), dtype='fp32', name='to32')
        inner = mb.cast(x=mb.gelu(x=inner, name='gelu'), dtype='fp16', name='to16')
        return mb.cast(x=mb.relu(x=inner, name='relu'), dtype='fp32', name='output')

    found = judge(program(function))
    assert [one['device'] for one in found] == [
        NEURAL_ENGINE,
        *3 * [ELSEWHERE],
        NEURAL_ENGINE,
        CONVERSION,
    ]
    assert rules(found) == 3 * ['float32']


def test_rank_6_reshape():
    def function(x):
        x = mb.reshape(x=x, shape=(1, 2, 4, 2, 32, 64), name='six')
        return mb.relu(x=mb.reshape(x=x, shape=(1, 8, 64, 64), name='four'), name='relu')

    found = judge(program(function))
    assert devices(found) == dict(six=ELSEWHERE, four=ELSEWHERE, relu=NEURAL_ENGINE)
    assert rules(found) == ['rank', 'rank']


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
    package = convert(
        lambda x: mb.relu(x=conv(x)),
        (1, 8, mil.get_new_symbol(), 64),
        tmp_path / 'free.mlpackage',
        size,
    )
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
            _true_fn=lambda: mb.add(x=x, y=HALF(1), name='added'),
            _false_fn=lambda: mb.relu(x=x, name='cut'),
            name='either',
        )

    found = devices(judge(program(function)))
    assert found['either'] == found['added'] == found['cut'] == ELSEWHERE


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
        (lambda x: mb.reshape(x=x, shape=(1, 2, 16384)), None),
        (lambda x: mb.reshape(x=x, shape=(1, 32768)), 'axis'),
        (lambda x: mb.greater(x=x, y=HALF(1)), None),
        (lambda x: mb.cast(x=mb.relu(x=x), dtype='int32'), 'data type'),
        (lambda x: mb.max_pool(x=x, kernel_sizes=(3, 3), strides=(2, 2), pad_type='same'), None),
        (lambda x: mb.max_pool(x=x, kernel_sizes=(14, 1), pad_type='same'), 'pooling'),
        (
            lambda x: mb.avg_pool(x=x, kernel_sizes=(4, 4), strides=(4, 4), pad_type='same'),
            'pooling',
        ),
        (lambda x: mb.gather(x=x, indices=np.array([2, 0], np.int32), axis=1), 'operator'),
        (lambda x: mb.sin(x=x), 'newer operator'),
        (lambda x: mb.cumsum(x=x), 'unknown operator'),
    ],
)
def test_rules(function, rule):
    last = judge(program(function))[-1]
    assert ' '.join(rules([last])) == (rule or '')
    assert last['device'] == (RULES[rule][0] if rule else NEURAL_ENGINE)


@pytest.mark.parametrize('factor', [2.0, 4.0])
def test_upsampling(factor):
    def function(x):
        return mb.upsample_bilinear(x=x, scale_factor_height=factor, scale_factor_width=2.0)

    found = rules(judge(program(function)))
    assert found == ['newer operator', *(['upsampling'] if factor > 2 else [])]


def test_every_rule_has_its_sources_on_the_page():
    page = (ROOT / 'docs' / 'placement.md').read_text()
    for name, (_, sources, _) in RULES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f'| {name} |'))
        assert all(SOURCES[source][1] in row for source in sources.split('; '))


# ------------------------------------------------------------------------------------ bad input


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
    package = convert(lambda x: mb.relu(x=x), (1, 8, 64, 64), tmp_path / 'cut.mlpackage')
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


def test_tool_refuses(tmp_path):
    done = run(sys.executable, TOOL, tmp_path / 'gone', '--out-dir', tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.startswith('error: ')
