"""What a GPU computes, trains and resumes: ``make test-cuda``; skipped where there is none."""

import pytest
import torch
from helpers import ROOT, Images, deviation, load_published, reference_image, thin_backbone
from mmengine.optim import build_optim_wrapper
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy_training import StopAt, saved, train

from mmcare import mmcv_ext
from mmcare.models import CARE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU: make test-cuda')
WITH_CP = (False, True, 'activations')


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    """Compute in float32, not in TF32; MMEngine's runners take the GPU."""
    monkeypatch.setattr('mmengine.device.utils.DEVICE', 'cuda')
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@torch.no_grad()
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize('size', [(224, 224), (90, 150)], ids=str)
@pytest.mark.parametrize('arch', ['s0', 's1', 's2'])
def test_outputs(arch, size, layout):
    model, image = load_published(CARE(arch), arch), reference_image(*size)
    expected = model(image)
    for deploy in (False, True):
        if deploy:
            model.switch_to_deploy()
        outputs = model.cuda().to(memory_format=layout)(image.cuda())
        assert deviation(expected, [output.cpu() for output in outputs]) <= 1e-4


def outputs_and_gradients(model, images):
    """Outputs, and gradients of a random projection of them, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    outputs = model(images)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in outputs)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [x.detach().cpu() for x in outputs], [gradient.cpu() for gradient in gradients]


def assert_near(found, expected, share):
    """Outputs and gradients differ by a share of the largest of each at most."""
    for tensors, exact in zip(found, expected):
        largest = max(tensor.abs().max() for tensor in exact)
        for one, other in zip(tensors, exact):
            assert one.isfinite().all()
            assert (one - other).abs().max() <= share * largest


@pytest.mark.parametrize('with_cp', WITH_CP)
def test_gradients(with_cp):
    images, found = torch.randn(4, 3, 96, 64), []
    for device in ('cpu', 'cuda'):
        model = thin_backbone(with_cp=with_cp).train().to(device)
        found.append(outputs_and_gradients(model, images.to(device)))
    assert_near(found[1], found[0], 1e-4)


@pytest.mark.parametrize('with_cp', WITH_CP)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision(dtype, with_cp):
    """At COCO's size, in training; drop path draws the same numbers when it is computed again."""
    model = CARE('s1', with_cp=with_cp, from_scratch=True, drop_path_rate=0.1).train().cuda()
    image = torch.randn(2, 3, 800, 1344, device='cuda')
    torch.manual_seed(2)
    with torch.autocast('cuda', dtype):
        outputs = model(image)
    sum(output.float().square().mean() for output in outputs).backward()
    assert all(output.isfinite().all() for output in outputs)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize(
    ('dtype', 'share'), [(torch.float16, 0.01), (torch.bfloat16, 0.06)], ids=str
)
def test_low_precision(dtype, share):
    """Under autocast, and with all weights in it."""
    model, image = load_published(CARE('s0'), 's0').cuda(), reference_image(800, 1344).cuda()
    exact = model(image)
    with torch.autocast('cuda', dtype):
        mixed = model(image)
    low = model.to(dtype)(image.to(dtype))
    for outputs in (mixed, low):
        assert deviation(exact, [output.float() for output in outputs]) <= share


@pytest.mark.parametrize('with_cp', WITH_CP)
def test_compiled(with_cp):
    """By Inductor, as one graph."""
    images, found = torch.randn(2, 3, 64, 64, device='cuda'), []
    for compiled in (False, True):
        model = thin_backbone(with_cp=with_cp).cuda().train()
        if compiled:
            model.compile(fullgraph=True)
        found.append(outputs_and_gradients(model, images))
    torch._dynamo.reset()
    assert_near(found[1], found[0], 1e-4)


def test_sync_bn_under_ddp(tmp_path):
    """With nccl, and one process."""
    images = torch.randn(4, 3, 96, 64, device='cuda')
    expected = outputs_and_gradients(thin_backbone().cuda().train(), images)
    torch.distributed.init_process_group(
        'nccl', init_method=f'file://{tmp_path}/init', rank=0, world_size=1
    )
    try:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(thin_backbone()).cuda().train()
        assert any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        model = DistributedDataParallel(model, device_ids=[0])
        assert_near(outputs_and_gradients(model, images), expected, 1e-4)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize('by_epoch', [True, False], ids=['epochs', 'iterations'])
def test_exact_resume(tmp_path, monkeypatch, by_epoch):
    """With drop path; convolutions and products add in a fixed order."""
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

    def run(name, **options):
        torch.manual_seed(5)
        model = Images(drop_path_rate=0.3).train()
        randomness = dict(seed=3, deterministic=True)
        options.update(model=model, randomness=randomness, by_epoch=by_epoch)
        return train(tmp_path / name, **options)

    try:
        runner = run('whole')
        assert next(runner.model.parameters()).is_cuda
        run('parts', hooks=[StopAt(9)])
        run('parts', resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert saved(tmp_path / 'parts') == saved(tmp_path / 'whole')


@pytest.mark.parametrize('precision', ['float16', 'bfloat16'])
@pytest.mark.parametrize(
    'task', ['detection', 'retinanet', 'rtmdet', 'segmentation', 'upernet', 'classification']
)
def test_toolboxes_train_and_test(tmp_path, task, precision):
    """Shipped configs at toy size, by MMEngine's runner with all hooks, under autocast."""
    toy_configs = pytest.importorskip('toy_configs')
    pytest.importorskip('mmdet')
    toy_configs.make_data(task, tmp_path / 'data')
    config = toy_configs.toy_config(task, tmp_path / 'data', tmp_path / 'run')
    config.optim_wrapper.update(type='AmpOptimWrapper', dtype=precision)
    runner = Runner.from_cfg(config)
    runner.train()
    assert runner.message_hub.get_scalar('train/loss').current() > 0
    assert all(p.is_cuda and p.isfinite().all() for p in runner.model.parameters())
    assert runner.test()


def test_operators_of_torchvision():
    """nms, RoIAlign and the focal loss, forward and backward, as on a CPU."""
    boxes = torch.rand(200, 4).cumsum(1) * 20
    scores, maps = torch.rand(200), torch.randn(1, 4, 32, 32)
    rois = torch.cat([torch.zeros(200, 1), boxes], 1)
    logits, targets = torch.randn(50, 3), torch.randint(0, 4, (50,))
    options = dict(spatial_scale=0.25, sampling_ratio=0, aligned=True, pool_mode=1)
    options.update(aligned_height=7, aligned_width=7)
    found = []
    for device in ('cpu', 'cuda'):
        kept = mmcv_ext.nms(boxes.to(device), scores.to(device), 0.5, 0)
        pooled, losses = torch.zeros(200, 4, 7, 7), torch.zeros(50, 3)
        pooled, losses = pooled.to(device), losses.to(device)
        arguments = maps.to(device), rois.to(device)
        mmcv_ext.roi_align_forward(*arguments, pooled, pooled, pooled, **options)
        grad_maps, grad_logits = torch.zeros_like(arguments[0]), torch.zeros_like(losses)
        mmcv_ext.roi_align_backward(pooled, arguments[1], pooled, pooled, grad_maps, **options)
        weight, factors = losses.new_empty(0), dict(gamma=2.0, alpha=0.25)
        arguments = logits.to(device), targets.to(device), weight
        mmcv_ext.sigmoid_focal_loss_forward(*arguments, losses, **factors)
        mmcv_ext.sigmoid_focal_loss_backward(*arguments, grad_logits, **factors)
        results = kept, pooled, grad_maps, losses, grad_logits
        found.append([result.cpu() for result in results])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('scaled', [False, True], ids=['float32', 'float16'])
def test_few_parameter_groups(scaled):
    """Fused steps, with and without GradScaler, are those of MMEngine's constructor."""
    states = []
    for constructor in ('DefaultOptimWrapperConstructor', 'mmcare.MergedGroupsConstructor'):
        torch.manual_seed(0)
        model = Images().cuda()
        config = dict(
            type='AmpOptimWrapper' if scaled else 'OptimWrapper',
            constructor=constructor,
            optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
            paramwise_cfg=dict(norm_decay_mult=0.0),
        )
        wrapper = build_optim_wrapper(model, config)
        for _ in range(10):
            gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
            loss = sum((x * g).sum() for x, g in zip(model.parameters(), gradients))
            wrapper.update_params(loss)
        states.append(model.state_dict())
    assert wrapper.optimizer.param_groups[0]['fused'] and len(wrapper.optimizer.param_groups) == 2
    torch.testing.assert_close(*states)


def test_share_of_the_gpu(monkeypatch):
    """Of kernels alone."""
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')
    import training

    matrix = torch.rand(2048, 2048, device='cuda')
    assert training.busy(lambda: matrix @ matrix, 'cuda') > 0
    assert training.busy(lambda: None, 'cuda') == 0
