from mmcare.models.backbones.care import CARE
from mmcare.models.backbones.care_ablation import CAREAblation

__all__ = ['CARE', 'CAREAblation']
