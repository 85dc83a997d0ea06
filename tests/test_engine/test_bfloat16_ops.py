"""Detectors train in bfloat16 with the hook; on MMCV's compiled operators not without it."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from toy_configs import toy_config

from mmcare.registry import HOOKS

mmdet_testing = pytest.importorskip('mmdet.testing')


def test_a_detector_trains_in_bfloat16(tmp_path):
    config = toy_config('detection', tmp_path, tmp_path)
    init_default_scope('mmdet')
    model = MODELS.build(config.model)
    batch = mmdet_testing.demo_mm_inputs(
        1, (3, 64, 64), num_items=[2], num_classes=80, with_mask=True
    )
    batch = model.data_preprocessor(batch, True)

    def loss():
        torch.manual_seed(0)
        with torch.autocast('cpu', torch.bfloat16):
            return model.parse_losses(model(**batch, mode='loss'))[0]

    if find_spec('mmcv._ext').origin.endswith('.so'):  # compiled; torchvision's take bfloat16
        with pytest.raises(RuntimeError, match='BFloat16'):
            loss()
    for _ in range(3):  # a runner that trains, validates and tests
        HOOKS.build(config.default_hooks.bfloat16_ops).before_run(SimpleNamespace(model=model))
    assert loss().isfinite()
    attached = [(*m._forward_pre_hooks, *m._forward_hooks) for m in model.modules()]
    assert {len(hooks) for hooks in attached} == {0, 1}
