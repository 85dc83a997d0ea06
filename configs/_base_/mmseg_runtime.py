_base_ = './default_runtime.py'

default_scope = 'mmseg'
default_hooks = dict(
    logger=dict(log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=4000),
    visualization=dict(type='SegVisualizationHook'),
)
visualizer = dict(
    type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer'
)
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=False)
env_cfg = dict(cudnn_benchmark=True)  # crops have one size, as in mmseg's default
tta_model = dict(type='SegTTAModel')
