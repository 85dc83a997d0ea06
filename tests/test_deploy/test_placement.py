"""Where operators are expected: clean and planted programs, a recorded compute plan, bad input."""

import json
import runpy
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from thin import THIN

from mmcare.deploy import export_backbone, placement
from mmcare.deploy.placement import report_placement
from mmcare.deploy.placement_plan import NEVER_RUN, format_plan, load_plan, read_plan
from mmcare.deploy.placement_program import Operator, Program, Tensor, load_program, read_program
from mmcare.deploy.placement_rules import (
    CONVERSION,
    ELSEWHERE,
    NEURAL_ENGINE,
    RULES,
    SOURCES,
    UNCERTAIN,
    judge,
)
from mmcare.deploy.source import IMAGENET, Source
from mmcare.deploy.to_coreml import prepare_coreml
from mmcare.models import CARE

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools' / 'placement_report.py'
RECORDED = ROOT / 'tests' / 'data' / 'compute_plan.json'
SHAPE = (64, 96)


def thin_backbone() -> CARE:
    torch.manual_seed(3)
    return CARE(THIN, layer_scale_init_value=0.3).eval()


@pytest.fixture(scope='module')
def package(tmp_path_factory) -> Path:
    """A thin network as the export writes it."""
    out_dir = tmp_path_factory.mktemp('package')
    source = Source('thin', 'thin', thin_backbone(), 'random', IMAGENET)
    export_backbone(source, out_dir, SHAPE, ('coreml',))
    return out_dir / 'thin_64x96.mlpackage'


def plant(package: Path, folder: Path, change) -> Path:
    """A copy of a package with a change of its protobuf."""
    from coremltools.proto import Model_pb2

    copy = Path(shutil.copytree(package, folder / 'planted.mlpackage'))
    (file,) = copy.rglob('*.mlmodel')
    spec = Model_pb2.Model.FromString(file.read_bytes())
    change(spec)
    file.write_bytes(spec.SerializeToString())
    return copy


def operations(spec):
    function = spec.mlProgram.functions['main']
    return function.block_specializations[function.opset].operations


def first_stages(shape, precision, output=np.float16):
    """The thin network's first two stages, in which no size is settled, converted as it stands."""
    import coremltools as ct

    backbone = thin_backbone()
    backbone.switch_to_deploy()
    maps = prepare_coreml(backbone, None, 'float16', None)
    maps.backbone.stages, maps.names = maps.backbone.stages[:2], maps.names[:2]
    with torch.no_grad():
        traced = torch.jit.trace(maps, torch.zeros(1, 3, *SHAPE), check_trace=False)
    return ct.convert(
        traced,
        inputs=[ct.TensorType(name='image', shape=shape, dtype=np.float16)],
        outputs=[ct.TensorType(name=name, dtype=output) for name in maps.names],
        convert_to='mlprogram',
        minimum_deployment_target=ct.target.iOS16,
        compute_precision=precision,
        skip_model_load=True,
    ).get_spec()


# ------------------------------------------------------------ a clean program


def test_clean_export(package, tmp_path):
    report, text = report_placement(package, tmp_path)
    assert report['all_on_neural_engine'] and 'everything on the neural engine' in text
    assert report['devices'][CONVERSION] == 1  # of the image, which arrives in float32
    assert report['devices'][ELSEWHERE] == report['devices'][UNCERTAIN] == report['switches'] == 0
    assert [one['device'] for one in report['operators']].index(CONVERSION) == 0
    assert not any(one['findings'] for one in report['operators'])
    assert NEVER_RUN in text and 'not read' in report['compute_plan']
    assert json.loads((tmp_path / 'thin_64x96_placement.json').read_text()) == report
    assert (tmp_path / 'thin_64x96_placement.txt').read_text() == text + '\n'
    assert (tmp_path / 'thin_64x96_placement.png').read_bytes().startswith(b'\x89PNG')
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_read(package):
    import coremltools as ct

    program = load_program(package)
    spec = ct.utils.load_spec(str(package))
    types = [one.type.split('.')[-1] for one in operations(spec) if one.type != 'const']
    assert [operator.type for operator in program.operators] == types
    groups = list(dict.fromkeys(operator.group for operator in program.operators))
    assert groups == ['stage1', 'stage2', 'stage3', 'stage4']
    ends = {operator.group: operator for operator in program.operators}
    for name, (channels, height, width) in dict(
        stage1=(16, 16, 24), stage2=(16, 8, 12), stage3=(32, 4, 6), stage4=(128, 2, 3)
    ).items():
        assert ends[name].outputs == (Tensor(name, 'float16', (1, channels, height, width)),)
    stem = next(operator for operator in program.operators if operator.type == 'conv')
    assert stem.inputs[0].shape == (1, 3, 64, 96) and stem.weights['weight'] == (16, 3, 4, 4)
    assert stem.values['strides'] == (4, 4) and stem.values['dilations'] == (1, 1)
    kernels = {one.weights['weight'][2:] for one in program.operators if one.type == 'conv'}
    assert {(1, 1), (3, 3), (7, 7), (11, 1), (1, 11)} <= kernels


def test_padding_is_told_but_moves_nothing(package):
    """Stage 4 has rows of 3 values of 2 bytes, padded to 64."""
    last = judge(load_program(package))[-1]
    assert last.padding == pytest.approx(64 / 6) and last.device == NEURAL_ENGINE


# ------------------------------------------------------------ planted problems


@pytest.fixture(scope='module')
def island():
    """All GELUs and the outputs in float32, by the means of coremltools."""
    import coremltools as ct

    transform = ct.transform.FP16ComputePrecision(op_selector=lambda op: op.op_type != 'gelu')
    return first_stages((1, 3, *SHAPE), transform, np.float32)


def test_float32_island(island):
    verdicts = judge(read_program(island, 'island'))
    caught = [one for one in verdicts if one.device == ELSEWHERE]
    assert {one.operator.type for one in caught} == {'gelu', 'cast'}
    assert all(one.findings == (('float32', 'float32'),) for one in caught)
    assert sum(one.operator.type == 'gelu' for one in caught) == 4
    conversions = [one.operator for one in verdicts if one.device == CONVERSION]
    assert {one.name: one.group for one in conversions} == dict(stage1='stage1', stage2='stage2')
    # They stand at the end, but what they convert is the end of its stage.
    groups = [one.operator.group for one in verdicts[:-2]]
    assert groups == sorted(groups)
    last = verdicts[groups.count('stage1') - 1].operator
    assert last.outputs == next(one.inputs for one in conversions if one.name == 'stage1')


def test_float32_model(island):
    spec = deepcopy(island)
    for operation in operations(spec):
        for output in operation.outputs:
            if output.type.tensorType.dataType == 10:
                output.type.tensorType.dataType = 11
    verdicts = judge(read_program(spec, 'all'))
    assert all(one.device == ELSEWHERE for one in verdicts if one.operator.type != 'cast')


def test_rank_6_reshape(package, tmp_path):
    def change(spec):
        reshape = next(one for one in operations(spec) if one.type == 'reshape')
        tensor = reshape.outputs[0].type.tensorType
        while len(tensor.dimensions) < 6:
            tensor.dimensions.add().constant.size = 1
        tensor.rank = 6

    report, text = report_placement(plant(package, tmp_path, change), tmp_path / 'out')
    caught = [one for one in report['operators'] if one['findings']]
    assert caught[0]['type'] == 'reshape'
    assert all(one['findings'] == [dict(rule='rank', found='rank 6')] for one in caught)
    assert not report['all_on_neural_engine'] and report['switches'] >= 2
    assert 'coremltools 1723' in text and 'NOT everything' in text


@pytest.mark.parametrize('kind', ['range', 'enumerated'])
def test_free_sizes(kind):
    import coremltools as ct

    side = ct.RangeDim(32, 128, default=64)
    shape = dict(
        range=ct.Shape((1, 3, side, side)),
        enumerated=ct.EnumeratedShapes([[1, 3, 64, 64], [1, 3, 96, 64]]),
    )[kind]
    program = read_program(first_stages(shape, ct.precision.FLOAT16), kind)
    assert program.flexible == {'image': kind}
    assert program.operators[0].inputs[0].shape[2] is None
    verdicts = judge(program)
    device, rule = dict(range=(ELSEWHERE, 'free size'), enumerated=(UNCERTAIN, 'enumerated size'))[
        kind
    ]
    assert all(one.device == device for one in verdicts)
    assert {name for one in verdicts for name, _ in one.findings} == {rule}


def test_sizes_that_only_the_description_frees(package, tmp_path):
    def change(spec):
        sizes = spec.description.input[0].type.imageType.imageSizeRange
        sizes.heightRange.lowerBound, sizes.heightRange.upperBound = 64, 128

    report, text = report_placement(plant(package, tmp_path, change), tmp_path / 'out')
    assert report['flexible_inputs'] == {'image': 'range'}
    assert not report['all_on_neural_engine'] and 'input image: any size of a range' in text


# ------------------------------------------------------------ the rules, one by one


def conv(kernel=(3, 3), **values) -> Operator:
    return Operator(
        name='y',
        type='conv',
        group='y',
        inputs=(Tensor('x', 'float16', (1, 8, 64, 64)),),
        outputs=(Tensor('y', 'float16', (1, 8, 64, 64)),),
        weights=dict(weight=(8, 8, *kernel)),
        values=values,
        nested='',
        converts=False,
    )


def of_type(name: str, dtype='float16', shape=(1, 8, 64, 64), **values) -> Operator:
    return replace(conv(**values), type=name, weights={}, outputs=(Tensor('y', dtype, shape),))


@pytest.mark.parametrize(
    ('operator', 'rule'),
    [
        (conv((29, 13), strides=(4, 16), dilations=(1, 1)), None),
        (conv((11, 1)), None),
        (conv((13,)), None),
        (conv((1, 14)), 'kernel'),
        (conv((30, 1)), 'kernel'),
        (conv((14,)), 'kernel'),
        (conv(strides=(5, 5)), 'stride'),
        (conv(dilations=(2, 2)), 'dilation'),
        (conv(dilations=(1, 9)), 'large dilation'),
        (of_type('reshape', shape=(1, 8, 1, 64, 64)), None),
        (of_type('reshape', shape=(1, 8, 1, 1, 64, 64)), 'rank'),
        (of_type('reshape', shape=(1, 2, 16384)), None),
        (of_type('reshape', shape=(1, 2, 16385)), 'axis'),
        (of_type('reshape', shape=(1, None, 64)), 'free size'),
        (of_type('greater', dtype='bool'), None),
        (of_type('cast', dtype='int32'), 'data type'),
        (of_type('cast', dtype='float32'), 'float32'),
        (of_type('max_pool', kernel_sizes=(3, 3), strides=(2, 2)), None),
        (of_type('max_pool', kernel_sizes=(14, 1), strides=(1, 1)), 'pooling'),
        (of_type('avg_pool', kernel_sizes=(4, 4), strides=(4, 4)), 'pooling'),
        (of_type('gather'), 'operator'),
        (of_type('scatter_nd'), 'operator'),
        (of_type('while_loop'), 'operator'),
        (replace(of_type('add'), nested='cond'), 'operator'),
        (of_type('sin'), 'newer operator'),
        (of_type('a_new_one'), 'unknown operator'),
    ],
)
def test_rules(operator, rule):
    (verdict,) = judge(Program('program', 'CoreML7', (operator,), {}))
    assert [name for name, _ in verdict.findings] == ([rule] if rule else [])
    devices = {one.name: one.device for one in RULES}
    assert verdict.device == (devices[rule] if rule else NEURAL_ENGINE)


def test_upsampling():
    program = Program(
        'program',
        'CoreML7',
        tuple(
            of_type('upsample_bilinear', scale_factor_height=(factor,), scale_factor_width=(2.0,))
            for factor in (2.0, 4.0)
        ),
        {},
    )
    names = [[name for name, _ in verdict.findings] for verdict in judge(program)]
    assert names == [['newer operator'], ['newer operator', 'upsampling']]


def test_every_rule_has_a_source():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert {source for rule in RULES for source in rule.sources} <= SOURCES.keys()
    assert all(rule.sources for rule in RULES)
    page = (ROOT / 'docs' / 'placement.md').read_text()
    for rule in RULES:
        assert f'| {rule.name} |' in page
    for link in SOURCES.values():
        assert link in page


# ------------------------------------------------------------ a small program and its plan


@pytest.fixture(scope='module')
def small(tmp_path_factory) -> Path:
    """Named operators, one of them gathering, and one within a condition."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    weight = np.ones((4, 3, 1, 15), np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 3, 32, 64))], opset_version=ct.target.iOS16)
    def program(image):
        stem = mb.conv(x=image, weight=weight, pad_type='same', name='stem')
        bent = mb.gelu(x=stem, mode='EXACT', name='bent')
        chosen = mb.gather(x=bent, indices=np.array([2, 0], np.int32), axis=1, name='chosen')
        doubled = mb.mul(x=chosen, y=np.float32(2), name='doubled')
        large = mb.reduce_max(x=doubled, keep_dims=False)
        return mb.cond(
            pred=mb.greater(x=large, y=np.float32(0)),
            _true_fn=lambda: mb.add(x=doubled, y=np.float32(1), name='result'),
            _false_fn=lambda: mb.relu(x=doubled, name='other'),
            name='either',
        )

    path = tmp_path_factory.mktemp('small') / 'small.mlpackage'
    model = ct.convert(
        program,
        convert_to='mlprogram',
        minimum_deployment_target=ct.target.iOS16,
        skip_model_load=True,
    )
    model.save(str(path))
    return path


def test_blocks_and_kernels_are_found(small):
    found = {one.operator.type: one for one in judge(load_program(small))}
    assert found['conv'].findings == (('kernel', 'kernel 1x15'),)
    assert found['gather'].findings == (('operator', 'gather'),)
    assert found['cond'].device == ELSEWHERE
    assert ('operator', 'add within cond') in found['add'].findings
    assert ('operator', 'relu within cond') in found['relu'].findings
    assert found['gelu'].device == NEURAL_ENGINE


class FakePlan:
    """The documented interface of MLComputePlan, filled from a recording."""

    def __init__(self, recorded):
        from coremltools.models import compute_device, compute_plan

        class Engine(compute_device.MLNeuralEngineComputeDevice):
            def __init__(self):
                pass

        class Gpu(compute_device.MLGPUComputeDevice):
            def __init__(self):
                pass

        class Cpu(compute_device.MLCPUComputeDevice):
            def __init__(self):
                pass

        devices = {'neural engine': Engine(), 'GPU': Gpu(), 'CPU': Cpu()}
        self.usages, self.costs, operations = {}, {}, []
        for one in recorded.operators:
            operation = self.operation(one.name, f'ios16.{one.type}', ())
            if one.device in devices:
                self.usages[one.name] = compute_plan.MLComputePlanDeviceUsage(
                    devices[one.device], [devices[device] for device in one.supported]
                )
            if one.cost is not None:
                self.costs[one.name] = compute_plan.MLComputePlanCost(one.cost)
            operations.append(operation)
        # The last stands in the block of another: constants and nested blocks as on a Mac.
        inner = compute_plan.MLModelStructureProgramBlock([], operations[-1:], ['result'])
        holder = replace(operations[-2], blocks=[inner])
        constant = self.operation('weight', 'const', ())
        block = compute_plan.MLModelStructureProgramBlock(
            [], [constant, *operations[:-2], holder], ['result']
        )
        function = compute_plan.MLModelStructureProgramFunction([], block)
        self.model_structure = compute_plan.MLModelStructure(
            None, compute_plan.MLModelStructureProgram({'main': function}), None
        )

    @staticmethod
    def operation(name, kind, blocks):
        from coremltools.models import compute_plan

        value = compute_plan.MLModelStructureProgramNamedValueType(
            name, compute_plan.MLModelStructureProgramValueType()
        )
        return compute_plan.MLModelStructureProgramOperation({}, kind, [value], list(blocks), None)

    def get_compute_device_usage_for_mlprogram_operation(self, operation):
        return self.usages.get(operation.outputs[0].name)

    def get_estimated_cost_for_mlprogram_operation(self, operation):
        return self.costs.get(operation.outputs[0].name)


def test_plan_is_read_as_recorded(tmp_path):
    recorded = load_plan(RECORDED)
    assert tuple(read_plan(FakePlan(recorded))) == recorded.operators
    (tmp_path / 'again.json').write_text(format_plan(recorded))
    assert load_plan(tmp_path / 'again.json') == recorded
    fake = FakePlan(recorded)
    fake.model_structure = replace(fake.model_structure, program=None)
    with pytest.raises(ValueError, match='not of an ML Program'):
        list(read_plan(fake))


def test_recorded_plan_is_reported(small, tmp_path):
    report, text = report_placement(small, tmp_path, recorded_plan=RECORDED)
    assert report['compute_plan']['operators'][1]['device'] == 'neural engine'
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Core ML's own"))
    assert '2 neural engine' in lines[start] and NEVER_RUN in lines[start + 1]
    # The most expensive first; the conversion of the image does not count.
    assert lines[start + 2].split()[:3] == ['CPU', 'gather', 'chosen_cast_fp16']
    assert '25.00 % of the cost, not on the engine' in lines[start + 2]
    assert lines[start + 3].split()[:3] == ['GPU', 'gelu', 'bent_cast_fp16']
    assert '9.00 % of the cost, the engine could' in lines[start + 3]
    # The convolution and what stands in the condition: the rules expect them elsewhere; and GELU.
    assert lines[start + 4] == '  it differs from the rules for 3 operators'
    assert not (tmp_path / 'small_plan.json').exists()


def test_plan_decides_too(package, tmp_path):
    """A program that keeps all rules, of which Core ML leaves one operator to the GPU."""
    name = next(one.name for one in load_program(package).operators if one.type == 'gelu')
    recorded = load_plan(RECORDED)
    for device, expected in (('neural engine', True), ('GPU', False)):
        one = replace(recorded.operators[1], name=name, type='gelu', device=device)
        (tmp_path / 'plan.json').write_text(format_plan(replace(recorded, operators=(one,))))
        report, text = report_placement(package, tmp_path, tmp_path / 'plan.json')
        assert report['all_on_neural_engine'] is expected
        assert ('nothing leaves the neural engine' in text) is expected


def test_coreml_is_asked_on_macos(small, tmp_path, monkeypatch):
    import coremltools as ct
    from coremltools.models import compute_plan, utils

    recorded, asked = load_plan(RECORDED), []
    monkeypatch.setattr(placement.platform, 'system', lambda: 'Darwin')
    monkeypatch.setattr(utils, 'compile_model', lambda model, to: asked.append(model) or to)

    def load(path, compute_units):
        asked.append((path.endswith('small.mlmodelc'), compute_units))
        return FakePlan(recorded)

    monkeypatch.setattr(compute_plan.MLComputePlan, 'load_from_path', load)
    report, _ = report_placement(small, tmp_path, compute_units='CPU_AND_NE')
    assert asked == [str(small), (True, ct.ComputeUnit.CPU_AND_NE)]
    written = load_plan(tmp_path / 'small_plan.json')
    assert written.operators == recorded.operators and written.compute_units == 'CPU_AND_NE'
    assert report['compute_plan']['compute_units'] == 'CPU_AND_NE'

    def refuse(path, compute_units):
        raise ValueError('no plan here')

    monkeypatch.setattr(compute_plan.MLComputePlan, 'load_from_path', refuse)
    report, text = report_placement(small, tmp_path / 'again')
    assert 'Core ML gave none (ValueError: no plan here)' in text
    assert not (tmp_path / 'again' / 'small_plan.json').exists()


# ------------------------------------------------------------ bad input, and the tool


def neural_network(spec):
    spec.neuralNetwork.SetInParent()


def nothing(spec):
    spec.Clear()


@pytest.mark.parametrize(
    ('change', 'words'),
    [(neural_network, 'a model of the type neuralNetwork'), (nothing, 'holds no model')],
)
def test_other_models(package, tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        report_placement(plant(package, tmp_path, change), tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_what_cannot_be_read(package, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'gone\.mlpackage does not exist'):
        report_placement(tmp_path / 'gone.mlpackage', tmp_path)
    (tmp_path / 'old.mlmodel').write_bytes(b'anything')
    with pytest.raises(ValueError, match=r'old\.mlmodel is not an \.mlpackage'):
        report_placement(tmp_path / 'old.mlmodel', tmp_path)
    (tmp_path / 'empty.mlpackage').mkdir()
    with pytest.raises(ValueError, match=r'empty\.mlpackage cannot be read'):
        report_placement(tmp_path / 'empty.mlpackage', tmp_path)
    broken = plant(package, tmp_path, lambda spec: None)
    (file,) = broken.rglob('*.mlmodel')
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r'planted\.mlpackage cannot be read'):
        report_placement(broken, tmp_path)
    with pytest.raises(ValueError, match='compute units must be'):
        report_placement(package, tmp_path, compute_units='GPU')


@pytest.mark.parametrize(
    'content', ['{', '[]', '{"format": "another"}', '{"format": "mmcare compute plan 1"}']
)
def test_plans_that_are_none(package, tmp_path, content):
    (tmp_path / 'plan.json').write_text(content)
    with pytest.raises(ValueError, match=r'plan\.json is not a compute plan'):
        report_placement(package, tmp_path / 'out', tmp_path / 'plan.json')
    with pytest.raises(ValueError, match=r'of another model than thin_64x96\.mlpackage'):
        report_placement(package, tmp_path / 'out', RECORDED)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(operators=[]), r'"operators" must list at least one, got \[\]'),
        (dict(operators={}), '"operators" must list at least one, got {}'),
        (dict(compute_units='GPU'), '"compute_units" must be one of .* got \'GPU\''),
        (dict(system=None), '"system" text, got .* None'),
        (dict(device='abacus'), r'operators\[1\]: "device" must be one of .* got \'abacus\''),
        (dict(supported=['abacus']), r'operators\[1\]: "supported" must be a list of .*abacus'),
        (dict(supported='CPU'), r'operators\[1\]: "supported" must be a list of .* got \'CPU\''),
        (dict(cost='0.5'), r'operators\[1\]: "cost" must be a number .* got \'0.5\''),
        (dict(cost=float('nan')), r'operators\[1\]: "cost" must be a number .* got nan'),
        (dict(cost=True), r'operators\[1\]: "cost" must be a number .* got True'),
        (dict(name=3), r'operators\[1\]: "name" must be text, got 3'),
        (dict(type=None), r'operators\[1\]: "type" must be text, got None'),
        (dict(more=1), r'operators\[1\] must have exactly the keys .*\'more\''),
    ],
)
def test_plans_that_cannot_be_used(tmp_path, changes, words):
    content = json.loads(RECORDED.read_text())
    changed = content if changes.keys() <= content.keys() else content['operators'][1]
    changed.update(changes)
    (tmp_path / 'plan.json').write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf'plan\.json is not a compute plan .*{words}'):
        load_plan(tmp_path / 'plan.json')


def test_missing_packages(package, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setitem(sys.modules, 'coremltools', None)
        with pytest.raises(ImportError, match=r'needs coremltools.*mmcare\[export\]'):
            report_placement(package, tmp_path / 'out')
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(ImportError, match='matplotlib, which is not installed'):
        report_placement(package, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_interruption_leaves_the_older_picture(package, tmp_path, monkeypatch):
    older = tmp_path / 'thin_64x96_placement.png'
    older.write_text('older')

    def interrupted(name, verdicts, plan, filename):
        filename.write_text('hal')
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, 'draw_placement', interrupted)
    with pytest.raises(KeyboardInterrupt):
        report_placement(package, tmp_path)
    assert older.read_text() == 'older'
    assert not list(tmp_path.glob('.*'))


def run_tool(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, 'argv', [str(TOOL), *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(TOOL), run_name='__main__')
    return stop.value.code


def test_tool(package, small, tmp_path, monkeypatch, capsys):
    assert run_tool(monkeypatch, package, '--out-dir', tmp_path) == 0
    assert capsys.readouterr().out.endswith(f'Written to {tmp_path}\n')
    assert run_tool(monkeypatch, small, '--out-dir', tmp_path) == 1
    assert 'NOT everything' in capsys.readouterr().out
    assert run_tool(monkeypatch, tmp_path / 'gone', '--out-dir', tmp_path) == 2
    errors = capsys.readouterr().err
    assert errors.startswith('error: ') and errors.count('\n') == 1
    (tmp_path / 'file').touch()
    assert run_tool(monkeypatch, package, '--out-dir', tmp_path / 'file') == 2
    assert 'is not a directory' in capsys.readouterr().err
    assert run_tool(monkeypatch, '--help') == 0
    told = capsys.readouterr().out
    assert 'Exit status' in told and 'never run on a Mac' in ' '.join(told.split())
