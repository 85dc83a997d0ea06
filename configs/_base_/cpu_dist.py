# Several processes on the CPU, over gloo and with plain batch norms: a further entry of _base_,
# beside a shipped config, for `--launcher pytorch`. See docs/scale.md.
model_wrapper_cfg = dict(type='mmcare.CPUDistributedDataParallel')
# Each process has running statistics of its own; evaluate with those that are saved.
custom_hooks = [dict(type='mmcare.BroadcastBuffersHook')]
