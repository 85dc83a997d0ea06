"""Necks and whole models of the three toolboxes, exported with a thin backbone."""

import pytest
import torch
from export_helpers import graph_of, operators_of, run_file, run_program, to_coreml
from helpers import THIN, deviation
from mmengine.config import Config
from mmengine.registry import MODELS
from toy_configs import toy_config

from mmcare.export import export_model, load_model
from mmcare.weights.reading import CheckpointError

SHAPE = (64, 96)
CARE_TEACHER = dict(type='mmcare.CARE', arch=THIN, out_indices=(3,), _delete_=True)
# Tasks of toy_configs.py, and what is changed in them.
MODELS_OF = dict(
    retinanet=('retinanet', {'model.neck.num_outs': 3}),
    fpn=('segmentation', {'model.decode_head.num_classes': 5}),
    upernet=('upernet', {}),
    classifier=('classification', {'model.head.num_classes': 5}),
    # Its teacher, also a CARE, takes no part in a prediction.
    distilled=('distillation', {'model.teacher.backbone': CARE_TEACHER}),
)


def write_config(folder, name, **changes):
    path, (task, own) = folder / f'{name}.py', MODELS_OF[name]
    toy_config(task, folder, folder / name, **{**own, **changes}).dump(path)
    return path


@pytest.fixture
def whole(tmp_path):
    """Build a whole model by its toolbox, with weights that all matter; also write both."""

    def build(name):
        path = write_config(tmp_path, name)
        config = Config.fromfile(path)
        model = MODELS.build({**config.model, '_scope_': config.default_scope})
        model.eval().requires_grad_(False)
        for key, value in model.state_dict().items():
            if key.endswith('running_var'):
                value.uniform_(0.5, 2)
            elif value.is_floating_point() and value.dim() < 2:
                value.normal_(0.5, 0.2)
        torch.save(dict(state_dict=model.state_dict()), tmp_path / 'weights.pth')
        return model, path, tmp_path / 'weights.pth'

    return build


def check_coreml(source, names, expected, image):
    model = to_coreml(graph_of(source, tuple(image.shape[2:])), 'float32')
    assert [output.name for output in model.get_spec().description.output] == names
    assert deviation(expected, run_program(model, image)) < 1e-5
    assert not {'batch_norm', 'scatter'} & operators_of(model)


@pytest.mark.conversion
def test_neck_of_a_detector(tmp_path, whole):
    model, config, weights = whole('retinanet')
    source = load_model(config, weights, 'neck')
    report = export_model(source, tmp_path / 'out', SHAPE, ('onnx',))['onnx']
    assert report['part'] == 'neck' and report['file'] == 'retinanet_neck_64x96.onnx'
    image = torch.randn(1, 3, *SHAPE)
    expected = model.extract_feat(image)
    names, outputs = run_file(tmp_path / 'out' / report['file'], image)
    assert names == ['neck1', 'neck2', 'neck3']
    assert deviation(expected, outputs) < 1e-4
    check_coreml(source, names, expected, image)


@pytest.mark.conversion
@pytest.mark.parametrize(
    'name', [pytest.param('upernet', marks=pytest.mark.slow), 'classifier', 'distilled']
)
def test_whole_models(tmp_path, whole, name):
    """Logits as the toolbox's own model has them, before segmentors resize them to the image."""
    model, config, weights = whole(name)
    image = torch.randn(1, 3, *SHAPE)
    expected = model(image, mode='tensor')
    shapes = dict(upernet=(1, 150, 16, 24), classifier=(1, 5), distilled=(1, 1000))
    assert expected.shape == shapes[name]
    source = load_model(config, weights, 'model')
    check_coreml(source, ['logits'], [expected], image)
    if name == 'classifier':
        model.backbone.switch_to_deploy()
        model.head.switch_to_deploy()
        torch.save(dict(state_dict=model.state_dict()), weights)
        network = load_model(config, weights, 'model').task
        assert network.backbone.deploy and deviation([expected], network(image)) < 1e-4
    if name == 'upernet':
        export_model(source, tmp_path / 'out', SHAPE, ('onnx',))
        names, found = run_file(tmp_path / 'out' / 'upernet_model_64x96.onnx', image)
        assert names == ['logits'] and deviation([expected], found) < 1e-4


def test_parts_and_shapes_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match='has no neck'):
        load_model(write_config(tmp_path, 'upernet'), part='neck')
    source = load_model(write_config(tmp_path, 'fpn'), part='model')
    with pytest.raises(ValueError, match='multiples of 32'):
        export_model(source, tmp_path / 'out', (50, 64), ('onnx',))
    assert not (tmp_path / 'out').exists()


def test_a_mean_of_four_channels(tmp_path):
    changes = {f'model.data_preprocessor.{key}': [1.0] * 4 for key in ('mean', 'std')}
    with pytest.raises(ValueError, match=r'cannot be built: .*`mean` should have 1 or 3 values'):
        load_model(write_config(tmp_path, 'retinanet', **changes), part='model')


@pytest.mark.parametrize('lost', ['neck.', 'decode_head.conv_seg'])
def test_weights_of_less(whole, lost):
    model, config, weights = whole('fpn')
    state = {key: v for key, v in model.state_dict().items() if not key.startswith(lost)}
    torch.save(dict(state_dict=state), weights)
    with pytest.raises(CheckpointError, match=lost):
        load_model(config, weights, 'model')
