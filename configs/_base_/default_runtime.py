# What every training run shares, whatever the toolbox.
custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='mmcare.AtomicCheckpointHook', interval=1, max_keep_ckpts=3),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    safe_loading=dict(type='mmcare.SafeLoadingHook'),
    exact_resume=dict(type='mmcare.ExactResumeHook'),
    data_check=dict(type='mmcare.DataCheckHook'),
    run_record=dict(type='mmcare.RunRecordHook'),
    optimizer_check=dict(type='mmcare.OptimizerCheckHook'),
    plots=dict(type='mmcare.PlotHook'),
    summary=dict(type='mmcare.RunSummaryHook'),
)

randomness = dict(seed=0)
sync_bn = 'torch'  # in distributed runs; PyTorch has it for GPUs only

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)

log_level = 'INFO'
load_from = None
resume = False
