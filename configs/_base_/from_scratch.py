# What the configs that train a CARE without ImageNet weights share; they name it as
# `_base_.care_from_scratch` and so on.

# The start for short trainings, see mmcare.CARE: no file of weights, and the norms learn.
care_from_scratch = dict(from_scratch=True, init_cfg=None, norm_eval=False, drop_path_rate=0.0)
# The second moment forgets the first steps within a short run.
adamw_from_scratch = dict(lr=3e-3, betas=(0.9, 0.98))
# Adam changes a parameter by the learning rate in each step. Without this, a layer scale stays near
# its start, and a block hardly becomes part of the network. Ten times the rate is as accurate, but
# maps of noise then reach the limits of float16.
custom_keys_from_scratch = dict(gamma=dict(lr_mult=3.0))
