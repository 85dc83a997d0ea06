_base_ = './default_runtime.py'

default_scope = 'mmdet'
default_hooks = dict(
    visualization=dict(type='DetVisualizationHook'),
    bfloat16_ops=dict(type='mmcare.BFloat16OpsHook'),
)
visualizer = dict(
    type='DetLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer'
)
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=True)
