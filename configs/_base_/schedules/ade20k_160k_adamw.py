# mmseg's recipe for UperNet on Swin, which MLLA also uses: AdamW, learning rate 6e-5 at batch 16,
# 160k iterations. The paper has no recipe for UperNet; this one is our choice.
train_cfg = dict(type='IterBasedTrainLoop', max_iters=160000, val_interval=16000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys=dict(gamma=dict(decay_mult=0.0))),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=160000, by_epoch=False),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
