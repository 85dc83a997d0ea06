_base_ = './care_s0_in1k.py'

# Hard distillation as in the released script. The teacher is timm's: pip install 'timm>=1.0'. The
# repository facebookresearch/deit links to its weights. See README.md for other teachers.
model = dict(
    type='mmcare.DistillationClassifier',
    teacher=dict(type='TimmClassifier', model_name='regnety_160', pretrained=False),
    teacher_checkpoint='checkpoints/regnety_160-a5fe301d.pth',
    alpha=0.5,
)
