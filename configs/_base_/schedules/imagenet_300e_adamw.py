# 300 epochs of AdamW, learning rate 2e-3 at batch 1536, 20 epochs of warm-up, cosine decay (Section
# 4.1 of the paper; the released script has 2.5e-3). First and last rate are timm's 1e-6 and 1e-5.
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=300, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    # No decay of what is one-dimensional: norms, biases and layer scales.
    paramwise_cfg=dict(norm_decay_mult=0.0, flat_decay_mult=0.0),
)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=5e-4,
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=20, end=300),
]
auto_scale_lr = dict(enable=False, base_batch_size=1536)
