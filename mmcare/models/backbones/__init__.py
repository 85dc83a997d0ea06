from mmcare.models.backbones.care import CARE

__all__ = ['CARE']
