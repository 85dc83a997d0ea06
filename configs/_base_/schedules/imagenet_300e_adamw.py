# AdamW, learning rate 2e-3 at batch 1536, 300 epochs (Section 4.1 of the paper; the released script
# has 2.5e-3). The paper names weight decay without a value, and no schedule. Weight decay 0.05, 20
# epochs of warm-up, cosine decay, the first and last rate (1e-6 and 1e-5) and 10 epochs at the last
# rate are those of the released script, some by its defaults.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=310, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    # No decay for one-dimensional parameters: norms, biases and layer scales.
    paramwise_cfg=dict(norm_decay_mult=0.0, flat_decay_mult=0.0),
)
# timm's cosine starts at epoch 0, and the warm-up replaces its first 20 epochs. The warm-up ends at
# the cosine's value at epoch 20, (1e-5 + (2e-3 - 1e-5) * (1 + cos(pi * 20 / 300)) / 2) / 2e-3.
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=5e-4,
        end_factor=0.98912843,
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        T_max=300,
        last_step=20,  # the epoch before the cosine begins
        begin=21,
        end=301,
    ),
]
auto_scale_lr = dict(enable=False, base_batch_size=1536)
