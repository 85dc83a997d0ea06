"""Checks of a run's data: one function for each kind of fault.

A check compares what the data contain with what training and evaluation use. It yields a
:class:`~.findings.Stop` for a certain fault, a :class:`~.findings.Warn` for what may be intended,
and nothing for healthy data. Findings of the same kind are reported as one. ``CHECKS`` run before
a run; ``OTHERS`` has the names of the checks outside of this tuple.
"""

from mmcare.engine.data_checks import classes, coco, masks, pictures

_CHECKS = (
    pictures.check_files,
    pictures.check_readable,
    classes.check_pictures,
    classes.check_class_key,
    classes.check_num_classes,
    classes.check_labels,
    classes.check_evaluator,
    classes.check_class_folders,
    classes.check_class_pictures,
    classes.check_skipped_files,
    classes.check_categories,
    coco.check_duplicates,
    coco.check_category_order,
    coco.check_box_form,
    coco.check_lost_objects,
    coco.check_crowds,
    coco.check_iscrowd,
    coco.check_segmentations,
    classes.check_objects,
    pictures.check_sizes,
    pictures.check_orientation,
    pictures.check_bits,
    masks.check_mask_files,
    masks.check_palettes,
    masks.check_mask_values,
    masks.check_ignored_labels,
)
CHECKS = {check.__name__[len('check_') :]: check for check in _CHECKS}
OTHERS = (
    'required_keys',
    'folder_names',
    'test_split',
    'layer_scale',
    'frozen',
    'label_values',
    'class_weights',
)
