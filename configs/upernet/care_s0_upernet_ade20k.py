_base_ = [
    '../_base_/models/upernet_care.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/ade20k_160k_adamw.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(backbone=dict(arch='s0', init_cfg=dict(checkpoint='checkpoints/care_s0_in1k.pth')))
train_dataloader = dict(batch_size=2)  # 16 on 8 GPUs
