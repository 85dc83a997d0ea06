"""MMCV's operators by torchvision, next to the compiled ones where these are installed."""

import sys

import pytest
import torch
from helpers import assert_equal
from mmengine.runner import Runner

from mmcare import mmcv_ext

ops = pytest.importorskip('mmcv.ops')
HAS_COMPILED = not sys.modules['mmcv._ext'].__file__.endswith('.py')
compiled = pytest.mark.skipif(not HAS_COMPILED, reason='MMCV is not compiled; see make test-mmcv')


@pytest.fixture
def use_ours(monkeypatch):
    """Put our operators in the place of the compiled ones, from the call on."""

    def use():
        for name in ('nms', 'roi_align', 'focal_loss', 'deform_conv', 'modulated_deform_conv'):
            monkeypatch.setattr(sys.modules[f'mmcv.ops.{name}'], 'ext_module', mmcv_ext)

    return use


def draw_boxes(number, dtype=torch.float32):
    """Draw boxes (N, 4) that overlap, some of them empty or twice the same."""
    corners = torch.randint(0, 60, (number, 2)).to(dtype)
    boxes = torch.cat([corners, corners + torch.randint(0, 40, (number, 2)) + 0.25], 1)
    boxes[number // 2 :: 5, 2:] = boxes[number // 2 :: 5, :2]
    boxes[: number // 4] = boxes[number // 2 : number // 2 + number // 4]
    return boxes


@compiled
@pytest.mark.parametrize('number', [0, 1, 8, 500])
def test_nms_as_compiled(use_ours, number):
    boxes, scores = draw_boxes(number), torch.rand(number)
    scores[::3] = 0.5  # ties
    classes = torch.randint(0, 3, (number,))
    cases = [dict(iou_threshold=iou) for iou in (0.0, 0.3, 0.7, 1.0)]
    cases += [dict(iou_threshold=0.5, score_threshold=0.4, max_num=20)]

    def results():
        # An index is all that autocast's scores in float16 change.
        yield ops.nms(boxes, scores.half(), 0.5)[1]
        for case in cases:
            yield from ops.nms(boxes, scores, **case)
            for threshold in (10000, 7):
                config = dict(type='nms', split_thr=threshold, **case)
                yield from ops.batched_nms(boxes, scores, classes, config) if number else ()

    expected = [*results()]
    use_ours()
    assert_equal([*results()], expected)


@compiled
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('number', [0, 1, 40])
@pytest.mark.parametrize('deterministic', [False, True])
def test_roi_align_as_compiled(use_ours, monkeypatch, dtype, number, deterministic):
    """Values and gradients, boxes that are empty, or reach over the border of the map."""
    if deterministic:
        monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    images = torch.randn(3, 5, 19, 23, dtype=dtype)
    rois = torch.cat([torch.randint(0, 3, (number, 1)).to(dtype), draw_boxes(number, dtype)], 1)

    def results():
        for size in ((7, 7), (1, 3)):
            for sampling in (0, 2):
                for aligned in (True, False):
                    x = images.clone().requires_grad_()
                    out = ops.roi_align(x, rois, size, 0.25, sampling, 'avg', aligned)
                    weights = torch.arange(out.numel()).to(out).cos().reshape(out.shape)
                    yield from (out.detach(), *torch.autograd.grad((out * weights).sum(), x))

    expected = [*results()]
    use_ours()
    torch.testing.assert_close([*results()], expected, rtol=0, atol=1e-5)


# Strides, paddings, dilations, groups and groups of offsets.
CONVOLUTIONS = ((1, 1, 1, 1, 1), (2, 1, 1, 2, 1), ((1, 2), (0, 2), (2, 1), 1, 2), (1, 2, 2, 4, 4))


def draw_deformed(case, modulated):
    """Draw what a deformable convolution takes, and return a function of it."""
    groups, offset_groups = case[3:]
    x = torch.randn(2, 8, 7, 6).double()
    weight, bias = torch.randn(4, 8 // groups, 3, 2).double(), torch.randn(4).double()
    plain = torch.nn.functional.conv2d(x, weight, None, *case[:4])
    offset = torch.randn(2, offset_groups * 12, *plain.shape[2:]).double() * 2
    mask = torch.rand(2, offset_groups * 6, *plain.shape[2:]).double()
    if not modulated:
        tensors = x, offset, weight
        return plain, tensors, lambda x, o, w: ops.deform_conv2d(x, o, w, *case, False, 2)
    tensors = x, offset, mask, weight, bias
    return plain, tensors, lambda *tensors: ops.modulated_deform_conv2d(*tensors, *case)


@pytest.mark.parametrize('modulated', [False, True])
@pytest.mark.parametrize('case', CONVOLUTIONS)
def test_gradients_of_deformable_convolutions(use_ours, case, modulated):
    use_ours()
    plain, tensors, compute = draw_deformed(case, modulated)
    for tensor in tensors:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(compute, tensors)
    if not modulated:  # without offsets, it is a convolution
        x, offset, weight = tensors
        torch.testing.assert_close(compute(x, 0 * offset, weight), plain)


@compiled
@pytest.mark.parametrize('modulated', [False, True])
@pytest.mark.parametrize('case', CONVOLUTIONS)
def test_deformable_convolutions_as_compiled(use_ours, case, modulated):
    _, tensors, compute = draw_deformed(case, modulated)

    def results():
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = compute(*leaves)
        weights = torch.arange(output.numel()).to(output).cos().reshape(output.shape)
        return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]

    expected, _ = results(), use_ours()
    torch.testing.assert_close(results(), expected)


def test_focal_loss_as_by_mmdet(use_ours):
    """mmdet computes it by PyTorch on CPUs. MMCV's is for GPUs only."""
    losses = pytest.importorskip('mmdet.models.losses.focal_loss')
    use_ours()
    target = torch.tensor([0, 3, 2, 3, 1])  # 3: background
    one_hot = torch.nn.functional.one_hot(target, 4)[:, :3]
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(5, 3, dtype=dtype).mul(5).requires_grad_()
        for number in (5, 0):
            arguments = dict(weight=torch.rand(number), gamma=1.5, alpha=0.3, reduction='mean')
            found = losses.sigmoid_focal_loss(logits[:number], target[:number], **arguments)
            expected = losses.py_sigmoid_focal_loss(logits[:number], one_hot[:number], **arguments)
            assert_close = torch.testing.assert_close
            assert_close(found, expected, equal_nan=True)
            grads = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
            assert_close(*grads, equal_nan=True)


@compiled
@pytest.mark.parametrize('task', ['detection', 'retinanet'])
def test_detectors_train_as_on_the_compiled_ones(use_ours, tmp_path, task):
    """To the last bit: weights after two epochs, and what they score."""
    toy_configs = pytest.importorskip('toy_configs')
    toy_configs.make_data(task, tmp_path / 'data')

    def train(name):
        config = toy_configs.toy_config(task, tmp_path / 'data', tmp_path / name)
        runner = Runner.from_cfg(config)
        runner.train()
        return runner.model.state_dict(), runner.test()

    (state, scores), _ = train('compiled'), use_ours()
    found_state, found_scores = train('ours')
    assert_equal(found_state, state)
    assert found_scores == scores and 'coco/bbox_mAP' in scores


def test_a_missing_operator_is_named(use_ours):
    use_ours()
    boxes = torch.rand(1, 5)
    calls = {
        'carafe_forward': lambda: mmcv_ext.carafe_forward(boxes),
        'offset=1': lambda: ops.nms(boxes[:, :4], boxes[:, 4], 0.5, offset=1),
        "pool_mode='max'": lambda: ops.roi_align(torch.rand(1, 1, 4, 4), boxes, 2, 1.0, 0, 'max'),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f'{name}.* MMCV_WITH_OPS=1 pip install'):
            call()
    assert 'torchvision' in mmcv_ext.get_compiler_version()
    assert not hasattr(mmcv_ext, '__path__')


def test_the_file_comes_and_goes(tmp_path, monkeypatch, capsys):
    """Beside a compiled file, or in place of somebody else's, it is not written."""
    monkeypatch.setattr(mmcv_ext.mmcv, '__file__', str(tmp_path / '__init__.py'))
    path, library = tmp_path / '_ext.py', tmp_path / '_ext.cpython-311-x86_64-linux-gnu.so'

    def call(*arguments):
        monkeypatch.setattr(sys, 'argv', ['mmcv_ext', *arguments])
        try:
            mmcv_ext.main()
        except SystemExit as stopped:
            assert stopped.code == 2
        return ''.join(capsys.readouterr())

    for _ in range(2):
        assert f'{path} written' in call()
    names = {}
    exec(path.read_text(), names)
    assert names['__getattr__']('nms') is mmcv_ext.nms
    assert 'deleted' in call('--remove') and not path.exists()
    assert 'does not exist' in call('--remove')
    library.touch()
    assert call().startswith('error: ') and not path.exists()
    library.unlink()
    path.write_text('# somebody else')
    for arguments in ((), ('--remove',)):
        assert 'not a file of mmcare' in call(*arguments)
    assert path.read_text() == '# somebody else'
