_base_ = [
    '../_base_/models/fpn_care.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/ade20k_40k_adamw.py',
    '../_base_/mmseg_runtime.py',
]

model = dict(backbone=dict(arch='s0', init_cfg=dict(checkpoint='checkpoints/care_s0_in1k.pth')))
train_dataloader = dict(batch_size=6)  # 48 on 8 GPUs
