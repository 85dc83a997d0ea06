# What the configs that train a CARE without ImageNet weights share; they name it as
# `_base_.care_from_scratch` and `_base_.adamw_from_scratch`.

# No file of weights, and the norms learn. The published initialisation (std 0.02), layer scale
# (1e-6) and drop path are meant for hundreds of epochs: with them the blocks would pass hardly any
# signal for as long as a short run takes.
care_from_scratch = dict(
    init_cfg=[
        dict(type='Kaiming', layer=['Conv2d'], mode='fan_in', distribution='normal'),
        dict(type='Constant', layer=['_BatchNorm'], val=1.0, bias=0.0),
    ],
    norm_eval=False,
    layer_scale_init_value=0.1,
    drop_path_rate=0.0,
)
# The second moment forgets the first steps within a short run.
adamw_from_scratch = dict(lr=1e-3, betas=(0.9, 0.98))
