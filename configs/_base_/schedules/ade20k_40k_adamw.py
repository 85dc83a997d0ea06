# AdamW, learning rate 2e-4 with polynomial decay at batch 48 (Section 4.3 of the paper); 40k
# iterations, power 0.9 and weight decay 1e-4 as its peers, which train at batch 32: 26,667
# iterations here would be as many images. No decay for norms and layer scales is our choice.
train_cfg = dict(type='IterBasedTrainLoop', max_iters=40000, val_interval=4000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=1e-4),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys=dict(gamma=dict(decay_mult=0.0))),
)
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0.0, begin=0, end=40000, by_epoch=False)]
auto_scale_lr = dict(enable=False, base_batch_size=48)
