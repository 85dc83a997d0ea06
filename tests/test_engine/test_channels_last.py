"""Channels-last training: the same results, and resumes from and to contiguous runs."""

from argparse import Namespace

import pytest
import torch
from helpers import IS_NEW, Images
from toy_training import StopAt, train

from mmcare.engine import ChannelsLastHook

HOOK = dict(type='mmcare.ChannelsLastHook')


def run(work_dir, hooks, **arguments):
    optimizer = dict(optimizer=dict(type='SGD', lr=1e-3, momentum=0.9))
    if IS_NEW:  # CPUs have fused optimizers
        optimizer['optimizer']['fused'] = True
    return train(work_dir, model=Images(), hooks=hooks, optim_wrapper=optimizer, **arguments)


def test_roi_extractors_get_contiguous_maps():
    """mmcv's RoIAlign reads other maps as if they were contiguous."""
    SingleRoIExtractor = pytest.importorskip('mmdet.models').SingleRoIExtractor
    extractor = SingleRoIExtractor(dict(type='RoIAlign', output_size=7), 8, [4])
    maps, rois = torch.rand(1, 8, 16, 16), torch.tensor([[0, 4.0, 8.0, 40.0, 60.0]])
    expected = extractor((maps,), rois)
    ChannelsLastHook().before_train(Namespace(model=extractor))
    found = extractor((maps.to(memory_format=torch.channels_last),), rois)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('resumed', [[HOOK], []], ids=['with', 'without'])
def test_channels_last_agrees_and_resumes(tmp_path, resumed):
    """The other way round than it began; a fused optimizer would mix up the layouts."""
    begun = [] if resumed else [HOOK]
    whole = run(tmp_path / 'whole', []).model
    run(tmp_path / 'parts', [*begun, StopAt(9)])
    model = run(tmp_path / 'parts', resumed, resume=True).model
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    follows = [out.is_contiguous(memory_format=torch.channels_last) for out in model.maps]
    assert follows == [bool(resumed)] * 4
