"""Which types of operators the neural engine runs, as far as that is known.

Apple publishes no such list. These are the tables of "Appendix A. Operation-by-device matrix" of
the ANE Guide, found by experiment on Macs, with what others have measured
(:data:`mmcare.deploy.placement_rules.SOURCES`).
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _words(
    'avg_pool conv conv_transpose einsum l2_pool linear matmul max_pool '
    'scaled_dot_product_attention'
)
NORMS = _words('batch_norm instance_norm l2_norm layer_norm local_response_norm')
BY_ELEMENT = _words(
    'abs add atan ceil clamped_relu clip elu equal erf exp exp2 floor floor_div gelu greater '
    'greater_equal inverse leaky_relu less less_equal linear_activation log logical_not maximum '
    'minimum mul not_equal pow prelu real_div relu relu6 round rsqrt scaled_tanh select sigmoid '
    'sigmoid_hard sign silu softmax softplus softplus_parametric softsign sqrt square sub tanh '
    'threshold thresholded_relu'
)
REDUCTIONS = _words(
    'reduce_argmax reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max '
    'reduce_mean reduce_min reduce_sum reduce_sum_square'
)
MOVEMENT = _words(
    'batch_to_space cast concat crop depth_to_space dequantize expand_dims fill fill_like '
    'flatten2d identity pad pixel_shuffle pixel_unshuffle quantize read_state reshape '
    'reshape_like reverse slice_by_index slice_by_size slice_update space_to_batch space_to_depth '
    'split squeeze stack tile transpose write_state'
)
SUPPORTED = PRODUCTS | NORMS | BY_ELEMENT | REDUCTIONS | MOVEMENT

# Run by the engine from this generation of Apple's chips on, and elsewhere before.
FROM_A14 = _words(
    'affine argsort crop_resize resample resize resize_bilinear resize_nearest_neighbor '
    'upsample_bilinear upsample_nearest_neighbor'
)
FROM_A15 = _words('cos random_uniform reduce_argmin sin')
NEWER = {**dict.fromkeys(FROM_A14, 'A14'), **dict.fromkeys(FROM_A15, 'A15')}

CONTROL_FLOW = _words('call cond while_loop')
INDEXING = _words(
    'band_part gather gather_along_axis gather_nd non_zero one_hot range_1d reverse_sequence '
    'scatter scatter_along_axis scatter_nd shape sliding_windows topk'
)
RARER_MATHEMATICS = _words(
    'acos acosh asin asinh atanh cosh logical_and logical_or logical_xor mod reduce_prod sinh tan'
)
RECURRENT_AND_LISTS = _words(
    'gru list_gather list_length list_read list_scatter list_write lstm make_list rnn'
)
HOST_ONLY = _words(
    'custom_layer non_maximum_suppression random_bernoulli random_categorical random_normal'
)
UNSUPPORTED = CONTROL_FLOW | INDEXING | RARER_MATHEMATICS | RECURRENT_AND_LISTS | HOST_ONLY
