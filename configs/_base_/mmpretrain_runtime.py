_base_ = './default_runtime.py'

default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmcare', 'mmcare.classification'])
default_hooks = dict(visualization=dict(type='VisualizationHook', enable=False))
visualizer = dict(
    type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer'
)
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=True)
