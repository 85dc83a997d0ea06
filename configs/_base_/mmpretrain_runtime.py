_base_ = './default_runtime.py'

default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmcare', 'mmcare.classification'])
default_hooks = dict(
    visualization=dict(type='VisualizationHook', enable=False),
    sync_buffers=dict(type='SyncBuffersHook'),
)
# As in the released script: each GPU's batch norms see its own images, and running statistics are
# averaged before validation.
sync_bn = None
env_cfg = dict(cudnn_benchmark=True)  # images have one size
# Without a name, which several runs of a process, such as those of kfold-cross-valid, would share.
visualizer = dict(type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=True)
