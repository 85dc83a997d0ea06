# mmdet's COCO 2017 without masks, short side 800, long side at most 1333.
_base_ = 'mmdet::_base_/datasets/coco_detection.py'

train_dataloader = dict(
    batch_size=3,  # 24 on 8 GPUs
    persistent_workers=False,  # exact resume: see mmcare.ExactResumeHook
)
