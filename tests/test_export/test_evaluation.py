"""Exported files in the test loops of the three toolboxes: metrics are PyTorch's."""

import json
import re
from collections import OrderedDict
from functools import cache, partial
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT, run_tool
from mmcv.transforms import CenterCrop
from mmengine.config import Config
from mmengine.registry import MODELS, TRANSFORMS, DefaultScope
from toy_configs import make_data, toy_config

from mmcare.export import export_model, load_model, open_exported
from mmcare.export.loading import import_for, read_normalization
from mmcare.export.pipelines import (
    ResizeToFit,
    choose_shape,
    describe_resizing,
    describe_sliding,
    fit_config,
)
from mmcare.export.tasks import make_task
from mmcare.files import size_of
from mmcare_runtime.prepare import resize

SHAPE = (64, 96)  # of the files; images of the data are 64 x 64 and smaller
SCENES = Config.fromfile(ROOT / 'configs' / 'demo' / 'care_s0_fpn_scenes.py')
CHANGES = dict(
    classification={'test_evaluator.topk': [1, 500]},  # of 1000 classes
    detection={'test_evaluator.outfile_prefix': 'found'},
    retinanet={'test_evaluator.outfile_prefix': 'found'},
    rtmdet={
        'test_evaluator.outfile_prefix': 'found',
        'test_dataloader.dataset.pipeline.2.pad_val.img': (10, 114, 200),
    },
    segmentation={
        'test_dataloader.dataset.metainfo': dict(SCENES.metainfo),
        'model.decode_head.num_classes': 8,
    },
)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Make a folder with data, a config and random weights, once for each task."""

    @cache
    def make(task):
        folder = tmp_path_factory.mktemp(task)
        make_data(task, folder / 'data')
        config = toy_config(task, folder / 'data', folder / task, **CHANGES[task])
        lines = [f'{key} = {value!r}' for key, value in config.to_dict().items()]
        (folder / 'toy.py').write_text('\n'.join(lines))
        torch.manual_seed(0)
        model = MODELS.build({**config.model, '_scope_': config.default_scope})
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so that predictions are not all alike
                torch.nn.init.orthogonal_(parameter)
        torch.save(dict(state_dict=model.state_dict()), folder / 'weights.pth')
        return folder

    return make


@pytest.fixture
def evaluate(made, tmp_path, monkeypatch):
    def run(task, file, *options):
        out = tmp_path / 'metrics.json'
        monkeypatch.setattr(DefaultScope, '_instance_dict', OrderedDict())  # one toolbox a run
        monkeypatch.chdir(tmp_path)
        config = made(task) / 'toy.py'
        run_tool(monkeypatch, 'eval_exported', config, file, *options, '--out', out)
        return json.loads(out.read_text())

    return run


def annotate(data, predictions):
    """Make every seventh prediction an annotation: at random, hardly any would be right."""
    path = data / 'annotations' / 'instances_val2017.json'
    boxes = json.loads(predictions.read_text())[::7]
    boxes = [
        dict(box, id=index + 1, area=box['bbox'][2] * box['bbox'][3], iscrowd=0)
        for index, box in enumerate(boxes)
    ]
    path.write_text(json.dumps(dict(json.loads(path.read_text()), annotations=boxes)))


@pytest.mark.parametrize(
    ('task', 'part', 'backend', 'outputs', 'names'),
    [
        *(
            pytest.param(
                *('detection', 'backbone', backend, 'raw', ['coco/bbox_mAP', 'coco/segm_mAP']),
                marks=pytest.mark.slow,
            )
            for backend in ('executorch', 'litert')
        ),
        *(
            pytest.param(*case, marks=pytest.mark.conversion)
            for case in (
                ('classification', 'model', 'coreml', 'decoded', ['accuracy/top500']),
                ('retinanet', 'model', 'litert', 'raw', ['coco/bbox_mAP']),
                ('retinanet', 'model', 'onnx', 'decoded', ['coco/bbox_mAP']),
                ('rtmdet', 'model', 'onnx', 'raw', ['coco/bbox_mAP']),
                ('detection', 'model', 'onnx', 'decoded', ['coco/bbox_mAP', 'coco/segm_mAP']),
            )
        ),
        ('segmentation', 'model', 'onnx', 'decoded', ['mIoU', 'aAcc']),
    ],
)
def test_metrics(
    task, part, backend, outputs, names, made, evaluate, tmp_path, monkeypatch, capsys
):
    """Every image goes through the file, and the metrics, which are not zero, are PyTorch's.

    LiteRT's takes NHWC; that of a model takes pixels, and computes in float16. Padding is as the
    description says.
    """
    config, weights, images = made(task) / 'toy.py', made(task) / 'weights.pth', []
    source, checkpoint = load_model(config, weights, part), ['--checkpoint', weights]
    input_kind = 'image' if backend == 'litert' and part == 'model' else 'tensor'
    precision = None if backend == 'coreml' else 'float32'
    letterbox = 'center' if outputs == 'decoded' and task != 'detection' else 'top-left'
    options = dict(outputs=outputs, letterbox=letterbox, precision=precision)
    options['batch'] = batch = 2 if task == 'segmentation' else 1
    if task == 'retinanet' and outputs == 'decoded':  # untrained, it also has boxes in the padding
        options['max_detections'] = 1000
    # Untrained, a two-stage detector also has proposals there, which mmdet's do not get.
    shape = (64, 64) if task == 'detection' and outputs == 'decoded' else SHAPE
    report = export_model(source, tmp_path, shape, (backend,), input_kind, **options)[backend]
    assert {'picture1', 'picture2'} <= set(report['max_rel_error'])  # of the config's test data
    file, many = tmp_path / report['file'], 'max_detections' in options

    def spy(path, **options):
        program = open_exported(path, **options)
        run = program.run
        program.run = lambda x: images.append(x) or run(x)
        if many:  # of which as many count as in PyTorch
            program.description['test_cfg']['max_per_img'] = 100
        return program

    if 'outfile_prefix' in str(CHANGES[task]):
        evaluate(task, file, *checkpoint)
        masks, boxes = tmp_path / 'found.segm.json', tmp_path / 'found.bbox.json'
        annotate(made(task) / 'data', masks if masks.exists() else boxes)
    trained = made(task) / task / 'toy.py'  # as a training writes its config into its folder
    trained.parent.mkdir(exist_ok=True)
    trained.write_text('# of the training')
    monkeypatch.setattr('mmcare.export.opening.open_exported', spy)
    monkeypatch.setattr('mmcare.analysis.timing.SECONDS', 1e-9)
    half = backend == 'litert' and part == 'model'
    capsys.readouterr()
    table = evaluate(task, file, *checkpoint, *(['--float16'] if half else []))
    rows = capsys.readouterr().out.splitlines()[1 : 1 + len(table)]
    assert rows[-1].startswith(file.name) and all(len(row) <= 100 for row in rows)
    assert 'System environment' in (tmp_path / 'metrics.json.log').read_text()
    assert trained.read_text() == '# of the training'
    at_size = 'PyTorch, {}x{}'.format(*shape)
    fits = at_size not in table
    assert list(table) == ['PyTorch', *([] if fits else [at_size]), str(file)]
    pytorch = table['PyTorch' if fits else at_size]
    shapes = [image.shape for image in images[:4]]
    assert shapes == [(batch, 3, *shape)] * (1 + 3)  # of the outputs' shapes, then of the data
    if shape == SHAPE and task != 'classification':  # whose images fill the input
        corner = images[1][0, :, -1, -1]
        least = 0.51 if input_kind == 'image' else 1e-4  # bytes are rounded
        np.testing.assert_allclose(corner, report['inputs'][0]['padding'], atol=least)
    for name in names:
        assert 0 < table[str(file)][name] < 100
        points = 100 if task == 'segmentation' else 1  # maps of labels are enlarged otherwise
        tolerance = 0.003 * points if outputs == 'decoded' else 1e-3
        if backend == 'litert':  # roundings choose among the equally good boxes of untrained heads
            tolerance = 0.01
        assert table[str(file)][name] == pytest.approx(pytorch[name], abs=tolerance)
    assert table[str(file)]['MB'] == size_of(file) / 1e6 and pytorch['ms'] > 0
    assert ('ms' in table[str(file)]) == (backend != 'coreml')


def test_wide_tables():
    """Each block has a row for each file; names are short where they differ."""
    lay_out = run_path(str(ROOT / 'tools/eval_exported.py'))['lay_out']
    files = ['PyTorch', f'exports/{"s" * 40}.onnx', 'a/s0.pte', 'b/s0.pte']
    metrics = ['MB', 'coco/mAP', 'mAP', *(f'coco/class {number}_precision' for number in range(9))]
    printed = lay_out(pd.DataFrame(0.5, files, metrics))
    names = [line[:45].strip() for line in printed.splitlines()]
    assert names[1:5] == ['PyTorch', f'{"s" * 40}.onnx', *files[2:]] == names[-4:]
    assert all(len(line) <= 100 for line in printed.splitlines())
    assert {'coco/mAP', 'mAP', '8_precision'} <= {*printed.split()}


def test_images_fit_upright():
    """mmcv's Resize would turn the size by 90 degrees."""
    resize = ResizeToFit(scale=(96, 64), keep_ratio=False)
    sizes = {(128, 64): (64, 32), (10, 30): (32, 96), (48, 72): (64, 96), (33, 192): (17, 96)}
    for size, fitted in sizes.items():
        assert resize({'img': np.zeros((*size, 3), np.uint8)})['img'].shape[:2] == fitted


def test_sizes_in_configs():
    """A crop keeps its share of the longer side; the pipeline pads nothing."""
    steps = [dict(type='mmpretrain.ResizeEdge', scale=256), dict(type=CenterCrop, crop_size=224)]
    steps.append(dict(type='mmseg.ResizeToMultiple', size_divisor=32))  # padding comes instead
    steps.append(dict(type='Pad', size_divisor=32, pad_val=114))
    model = dict(test_cfg=dict(mode='slide'), data_preprocessor=dict(pad_size_divisor=32))
    loader = dict(batch_size=8, dataset=dict(pipeline=steps))
    config = Config(dict(model=model, test_dataloader=loader))
    fit_config(config, (192, 448))
    edge, crop = config.test_dataloader.dataset.pipeline
    assert edge.scale == 512 and crop.crop_size == (448, 192)
    assert config.test_dataloader.batch_size == 1
    assert config.model == dict(test_cfg=dict(mode='whole'), data_preprocessor={})


@pytest.mark.parametrize(
    ('step', 'words'),
    [
        (dict(type='mmpretrain.ResizeEdge', scale=256, edge='long'), "edge='long'"),
        (dict(type='CenterCrop', crop_size=224), 'CenterCrop without a ResizeEdge'),
        (dict(type='Resize', scale_factor=0.5), 'scale_factor=0.5'),
        (dict(type='mmseg.ResizeShortestEdge', scale=512, max_size=2048), 'describe ResizeShort'),
        (dict(type='RandomCenterCropPad', test_mode=True), 'describe RandomCenterCropPad: use'),
        (dict(type='mmpretrain.EfficientNetCenterCrop', crop_size=224), 'makes squares'),
    ],
)
def test_sizes_that_files_cannot_describe(step, words):
    config = Config(dict(model={}, test_dataloader=dict(dataset=dict(pipeline=[step]))))
    with pytest.raises(ValueError, match=words):
        describe_resizing(config, (192, 448))


@pytest.mark.parametrize('size', [(90, 131), (300, 200), (31, 33)])
def test_the_square_of_efficientnet(size):
    """Files cut and resize as mmpretrain does, for the size of the file."""
    pytest.importorskip('mmpretrain')
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    step = dict(type='mmpretrain.EfficientNetCenterCrop', crop_size=224, crop_padding=40)
    config = Config(dict(model={}, test_dataloader=dict(dataset=dict(pipeline=[step]))))
    assert choose_shape(config, 1)[0] == (224, 224)
    fitted = fit_config(config, (64, 64))['EfficientNetCenterCrop']
    expected = TRANSFORMS.build(dict(fitted)).transform(dict(img=pixels))['img']
    described = describe_resizing(config, (64, 64))
    assert_array_equal = np.testing.assert_array_equal
    assert_array_equal(resize(pixels, described, (64, 64)), expected)


def test_a_resize_by_another_name():
    step = dict(type='FixScaleResize', scale=(800, 1333), keep_ratio=True)
    config = Config(dict(model={}, test_dataloader=dict(dataset=dict(pipeline=[step]))))
    assert describe_resizing(config, (96, 64))['interpolation'] == 'bilinear'
    fit_config(config, (96, 64))
    assert config.test_dataloader.dataset.pipeline[0].type == 'mmcare.ResizeToFit'


def test_a_resize_that_changes_nothing():
    steps = [dict(type='Resize', scale_factor=1.0)]
    config = Config(dict(model={}, test_dataloader=dict(dataset=dict(pipeline=steps))))
    assert describe_resizing(config, (192, 448)) is None
    config.model.test_cfg = dict(mode='slide', stride=(64, 64), crop_size=(96, 96))
    assert describe_sliding(config)['other_steps'] == []
    config.test_dataloader.dataset.pipeline[0].scale_factor = 0.5
    describe_resizing(config, (96, 96))
    assert describe_sliding(config)['other_steps'] == ['Resize by scale_factor']


def test_one_mean_for_all_channels():
    preprocessor = dict(mean=[3.0], std=[2.0])
    config = Config(dict(model=dict(data_preprocessor=preprocessor)))
    expanded = read_normalization(config).expand(5)
    assert (expanded.mean, expanded.std) == ((3.0,) * 5, (2.0,) * 5)
    assert len(expanded.describe('tensor')['padding']) == 5
    for name in ('pad_value', 'pad_val'):  # of normalized images, in mmdet and mmseg
        config.model.data_preprocessor = dict(preprocessor, **{name: 0.5})
        padded = read_normalization(config).expand(2)
        assert (padded.fill, padded.describe('image')['padding']) == ([0.5] * 2, [4.0] * 2)
    pad = dict(type='Pad', size=(64, 64), pad_val=dict(img=(1.0, 3.0, 5.0)))
    config.test_dataloader = dict(dataset=dict(pipeline=[pad]))
    assert read_normalization(config).fill == [-1.0, 0.0, 1.0]


def test_imports_that_may_fail():
    imports = dict(imports=['no_such_module'], allow_failed_imports=True)
    with pytest.warns(UserWarning, match='no_such_module'):
        import_for(Config(dict(custom_imports=imports)), 'model')
    with pytest.raises(ImportError, match='no_such_module'):
        import_for(Config(dict(custom_imports=dict(imports, allow_failed_imports=False))), 'model')


@pytest.mark.parametrize('name', ['bgr_to_rgb', 'rgb_to_bgr', 'to_rgb'])
def test_each_of_the_toolboxes_words_swaps_channels(name):
    preprocessor = {'mean': [0] * 3, 'std': [1] * 3, name: True}
    config = Config(dict(model=dict(data_preprocessor=preprocessor)))
    assert read_normalization(config).channels == 'RGB'
    branches = dict(type='MultiBranchDataPreprocessor', data_preprocessor=preprocessor)
    preprocessor['pad_size_divisor'] = 32
    config = Config(dict(model=dict(data_preprocessor=branches), test_dataloader={}))
    assert read_normalization(config).channels == 'RGB'
    config.test_dataloader.dataset = {}
    fit_config(config, (64, 64))
    assert 'pad_size_divisor' not in config.model.data_preprocessor.data_preprocessor


@pytest.mark.parametrize(('to_rgb', 'channels'), [(False, 'RGB'), (True, 'BGR')])
def test_pictures_of_cifar_are_rgb(to_rgb, channels):
    """Of mmpretrain; others are read as BGR."""
    preprocessor = dict(mean=[0] * 3, std=[1] * 3, to_rgb=to_rgb)
    config = Config(dict(model={}, data_preprocessor=preprocessor))
    config.test_dataloader = dict(dataset=dict(type='RepeatDataset', dataset=dict(type='CIFAR10')))
    assert read_normalization(config).channels == channels


STAGES, LOGITS = [(1, 16, 16, 24), (1, 16, 8, 12), (1, 32, 4, 6), (1, 128, 2, 3)], [(1, 8, 16, 24)]
RESIZE = 'test_dataloader.dataset.pipeline.1'
LARGER = ['--cfg-options', f'{RESIZE}.type=RandomChoiceResize', f'{RESIZE}.scales=[(160,160)]']
IMAGE = dict(kind='tensor', dtype='float32')
NO_DATA, SLIDE = ['--cfg-options', 'test_dataloader=None'], ['--tile', 'slide']


@pytest.mark.parametrize(
    ('task', 'file', 'options', 'words'),
    [
        ('detection', 'gone.onnx', [], 'gone.onnx does not exist'),
        ('detection', 'a.pt', [], 'a.pt is not .onnx, .tflite, .ncnn, .pte, .mlpackage'),
        *(
            ('detection', f'damaged.{end}', [], rf'damaged\.{end} (cannot be opened|has no valid)')
            for end in ('onnx', 'pte', 'ncnn', 'tflite', 'mlpackage')
        ),
        ('detection', 'damaged.onnx', ['--float16'], 'ONNX Runtime has no float16 for'),
        ('segmentation', ('backbone', STAGES[:3]), [], r'outputs are \[\[1, 16.*2, 3\]\]$'),
        ('segmentation', ('', LOGITS), [], 'the file does not say what it is: export it'),
        ('detection', ('model', LOGITS), [], "of another model: its outputs are .*'s MaskRCNN"),
        ('detection', ('backbone', STAGES), [], 'holds the backbone alone: .* --checkpoint CHECK'),
        ('segmentation', ('model', LOGITS), ['--checkpoint', 'weights.pth'], 'pth does not fit'),
        ('segmentation', ('model', LOGITS), LARGER, 'an image of 160x160, the file takes 64x96'),
        ('segmentation', ('model', LOGITS), ['--checkpoint'], 'of other weights than the check'),
        ('detection', ('model', LOGITS), [*SLIDE, '--checkpoint'], 'of other weights than the'),
        ('segmentation', ('model', LOGITS), NO_DATA, 'toy.py has no test_dataloader'),
        *(
            ('segmentation', ('model', LOGITS, said), [], f'is not of this config: {words}')
            for said, words in (
                (dict(classes=['a', 'b']), r'classes is \[.a., .b.\] in the file, '),
                (dict(inputs=[IMAGE | dict(mean=[0, 0, 0])]), r'inputs\[0\].mean is \[0'),
                (dict(inputs=[IMAGE | dict(channels='BGR')]), "inputs.0..channels is 'BGR'"),
                (dict(align_corners=True), 'align_corners is True in the file, False'),
            )
        ),
    ],
)
def test_bad_input(task, file, options, words, made, evaluate, capsys, tmp_path, monkeypatch):
    options = options + [made(task) / 'weights.pth'] * (options[-1:] == ['--checkpoint'])
    if not isinstance(file, str):
        part, shapes, *said = file
        outputs = [np.zeros(shape, np.float32) for shape in shapes]
        boxes = dict(kind='boxes') if options[:2] == SLIDE else {}
        about = dict(part=part, sha256='', outputs=[boxes]) if part else {}
        about.update(*said)
        program = SimpleNamespace(run=lambda _: outputs, input_shape=(1, 3, *SHAPE))
        program.__dict__.update(description=about, input_kind='tensor', letterbox='top-left')
        monkeypatch.setattr('mmcare.export.opening.open_exported', lambda *_, **__: program)
    elif 'damaged' in file:
        (tmp_path / file).write_bytes(b'not a program')
    torch.save({'state_dict': {'backbone.x': torch.ones(1)}}, tmp_path / 'weights.pth')
    with pytest.raises(SystemExit) as stop:
        evaluate(task, file, *options)
    assert stop.value.code == 2 and not (tmp_path / 'metrics.json').exists()
    assert re.search(words, capsys.readouterr().err.strip().splitlines()[-1])


# What a config can say of images, classes and results, and where: of each, a file has one value,
# the config another.
OTHERS = {
    'segmentation': {
        'model.data_preprocessor.mean': ([0, 0, 0], [1, 2, 3]),
        'model.data_preprocessor.std': ([1, 1, 1], [1, 1, 2]),
        'model.data_preprocessor.bgr_to_rgb': (True, False),
        'model.decode_head.align_corners': (False, True),
        'test_dataloader.dataset.metainfo.classes': ([*'abcdefgh'], [*'abcdefhg']),
        'test_dataloader.dataset.reduce_zero_label': (False, True),
    },
    'rtmdet': {
        'model.data_preprocessor.mean': ([0, 0, 0], [1, 2, 3]),
        'model.data_preprocessor.bgr_to_rgb': (False, True),
        'test_dataloader.dataset.pipeline.2.pad_val.img': ((1, 2, 3), (3, 2, 2)),
        'test_dataloader.dataset.metainfo.classes': ([*'ab'], [*'ba']),
    },
}
FUZZED = 8  # pairs of a config and a file, for each task


@pytest.mark.parametrize('task', OTHERS)
def test_files_of_other_configs_are_refused(task, tmp_path):
    """Any difference is found, alone or with others; equal configs have none."""
    tool = run_path(str(ROOT / 'tools/eval_exported.py'))
    rng = np.random.default_rng(0)
    size = {'model.bbox_head.num_classes': 2} if task == 'rtmdet' else {}

    def draw(values):
        changes = {key: OTHERS[task][key][value] for key, value in values.items()}
        config = toy_config(task, tmp_path, tmp_path / 'run', **size, **CHANGES[task])
        config.merge_from_dict(dict(changes))
        model = MODELS.build({**config.model, '_scope_': config.default_scope})
        return config, make_task(model, 'model')

    for number in range(FUZZED):
        first = {key: int(rng.integers(2)) for key in OTHERS[task]}
        changed = {key for key in first if rng.random() < 0.3} if number else set()
        second = {key: value ^ (key in changed) for key, value in first.items()}
        config, network = draw(first)
        images = read_normalization(config).describe('tensor')
        outputs = network(torch.zeros(1, 3, *SHAPE))
        said = dict(network.describe(config, outputs), part='model', inputs=[images])
        program = SimpleNamespace(description=said, input_shape=(1, 3, *SHAPE))
        config, network = draw(second)
        compare = partial(tool['compare_with_config'], Path('a.onnx'), program)
        found = ''
        try:
            compare(config, read_normalization(config), network.model)
        except ValueError as error:
            found = str(error)
        names = {key.split('.')[-1] for key in changed}
        names = {dict(bgr_to_rgb='channels', img='padding').get(name, name) for name in names}
        assert all(f'{name} is ' in found for name in names) and bool(found) == bool(names)
