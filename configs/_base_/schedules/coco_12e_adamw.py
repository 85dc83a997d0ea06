# 12 epochs of AdamW, learning rate 2e-4 at batch 24 (Section 4.2 of the paper); weight decay and
# steps as in MobileViG's detection setting, which the paper follows. No decay for norms and
# layer scales is our choice: MobileViG decays all parameters, and lr * decay adds up to 0.40 over
# the 12 epochs, which alone would shrink gamma by a third.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=12, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys=dict(gamma=dict(decay_mult=0.0))),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=12, milestones=[8, 11], gamma=0.1),
]
auto_scale_lr = dict(enable=False, base_batch_size=24)
