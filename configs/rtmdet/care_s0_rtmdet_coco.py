# RTMDet-s (Lyu et al., 2022) with CARE-S0 in place of CSPNeXt-s: mmdet's config and recipe.
_base_ = 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py'

custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)

norm_cfg = dict(type='BN')  # SyncBN on several GPUs, see sync_bn; CPUs do not have it
model = dict(
    # RGB, as in CARE's training on ImageNet; mmdet's CSPNeXt takes BGR.
    data_preprocessor=dict(
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True
    ),
    backbone=dict(
        _delete_=True,
        type='mmcare.CARE',
        arch='s0',
        out_indices=(1, 2, 3),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/care_s0_in1k.pth'),
    ),
    neck=dict(in_channels=[64, 128, 1024], norm_cfg=norm_cfg),
    bbox_head=dict(norm_cfg=norm_cfg),
)

# Exact resume (mmcare.ExactResumeHook) needs workers that end with the epoch. So the caches of
# mosaic and mixup start empty in each epoch.
train_dataloader = dict(persistent_workers=False)

# Half of mmdet's rate for CSPNeXt, as in its RTMDets on Swin and ConvNeXt (1e-3 at batch 128).
optim_wrapper = dict(
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(lr=2e-3),
    paramwise_cfg=dict(custom_keys=dict(gamma=dict(decay_mult=0.0))),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-5, by_epoch=False, begin=0, end=1000),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-4,
        begin=150,
        end=300,
        T_max=150,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]
auto_scale_lr = dict(base_batch_size=256)  # mmdet's config has 16, of another recipe

default_hooks = dict(
    checkpoint=dict(type='mmcare.AtomicCheckpointHook'),
    safe_loading=dict(type='mmcare.SafeLoadingHook'),
    exact_resume=dict(type='mmcare.ExactResumeHook'),
    data_check=dict(type='mmcare.DataCheckHook'),
    run_record=dict(type='mmcare.RunRecordHook'),
    optimizer_check=dict(type='mmcare.OptimizerCheckHook'),
    plots=dict(type='mmcare.PlotHook'),
    summary=dict(type='mmcare.RunSummaryHook'),
    bfloat16_ops=dict(type='mmcare.BFloat16OpsHook'),
)
randomness = dict(seed=0)
sync_bn = 'torch'
