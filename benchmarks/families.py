"""Export one config of each family of the toolboxes to each format, and compare it with PyTorch.

Weights are random, images small; --families also takes models that were trained with the configs of
benchmarks/scenes, such as 'YOLOX, trained', from work_dirs/scenes. A cell of the table is the
largest error of a file's results, as a share of each output's largest magnitude, on a random image
and a smooth one, or why there is no file. ``toolbox`` compares the file with the toolbox's own
prediction on the smooth image: the share of its 50 best boxes that the file also has (same class,
IoU above 0.99, scores within 0.001), the share of equal labels of a segmentor, or the largest
difference of a classifier's scores. With --photographs, five are also given to mmdet's inference
and to the file's ``predict``, except for detectors with queries, which mask padding in mmdet.

Each cell is written when it is known, and is not computed again. Each family has a process of its
own: if a converter ends it, the cell says so.
"""

import argparse
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from mmengine.registry import MODELS, DefaultScope
from recording import save
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.export import export_model, load_model, open_exported
from mmcare.export.backends import BACKENDS
from mmcare.export.errors import ExportError
from mmcare.export.images import PICTURE_STD, draw_images
from mmcare.export.in_toolbox import pad_images
from mmcare.export.loading import LoadedModel
from mmcare.export.pipelines import fit_config
from mmcare.files import check_writable
from mmcare_runtime.model import Run
from mmcare_runtime.results import read_results
from mmcare_runtime.suffixes import PICTURES, list_files

SCENES = Path(__file__).resolve().parent / 'scenes'
PHOTOGRAPHS = 5
BEST = 50  # boxes that are compared with the toolbox's
SAME_BOX, SAME_SCORE = 0.99, 1e-3
COLUMNS = 'family', 'toolbox', 'config', 'shape', 'format', 'error', 'float16', 'equal'
COLUMNS += 'photographs', 'reason'
DIED = 'the process ended'


class Family(NamedTuple):
    """A config of a toolbox, and the size of the images."""

    config: str
    side: int = 128
    normalized: bool = False  # random weights let maps explode or vanish without statistics
    trained: bool = False  # on the demo's scenes, with the config of benchmarks/scenes


FAMILIES: Mapping[str, Family] = {
    'RetinaNet': Family('mmdet::retinanet/retinanet_r18_fpn_1x_coco'),
    'RetinaNet, Swin-T': Family('mmdet::swin/retinanet_swin-t-p4-w7_fpn_1x_coco'),
    'ATSS': Family('mmdet::atss/atss_r50_fpn_1x_coco'),
    'FCOS': Family('mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco'),
    'AutoAssign': Family('mmdet::autoassign/autoassign_r50-caffe_fpn_1x_coco'),
    'NAS-FCOS': Family('mmdet::nas_fcos/nas-fcos_r50-caffe_fpn_fcoshead-gn-head_4xb4-1x_coco'),
    'RTMDet': Family('mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco'),
    'SSD300': Family('mmdet::ssd/ssd300_coco', 320),
    'SSDLite': Family('mmdet::ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco', 320, True),
    'YOLOF': Family('mmdet::yolof/yolof_r50-c5_8xb8-1x_coco'),
    'YOLOv3': Family('mmdet::yolo/yolov3_d53_8xb8-320-273e_coco', 128, True),
    'YOLOX': Family('mmdet::yolox/yolox_tiny_8xb8-300e_coco'),
    'GFL': Family('mmdet::gfl/gfl_r50_fpn_1x_coco'),
    'FoveaBox': Family('mmdet::foveabox/fovea_r50_fpn_4xb4-1x_coco'),
    'CenterNet-update': Family('mmdet::centernet/centernet-update_r18_fpn_8xb8-amp-lsj-200e_coco'),
    'DDOD': Family('mmdet::ddod/ddod_r50_fpn_1x_coco'),
    'VFNet': Family('mmdet::vfnet/vfnet_r50_fpn_1x_coco'),
    'TOOD': Family('mmdet::tood/tood_r50_fpn_1x_coco'),
    'RepPoints': Family('mmdet::reppoints/reppoints-moment_r50_fpn_1x_coco'),
    'DETR': Family('mmdet::detr/detr_r50_8xb2-150e_coco'),
    'Conditional DETR': Family('mmdet::conditional_detr/conditional-detr_r50_8xb2-50e_coco'),
    'DAB-DETR': Family('mmdet::dab_detr/dab-detr_r50_8xb2-50e_coco'),
    'Faster R-CNN': Family('mmdet::faster_rcnn/faster-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco'),
    'Mask R-CNN': Family('mmdet::mask_rcnn/mask-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco'),
    'Cascade R-CNN': Family('mmdet::cascade_rcnn/cascade-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco'),
    'Cascade Mask R-CNN': Family('mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco'),
    'SegFormer': Family('mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512'),
    'DeepLabV3+': Family('mmseg::deeplabv3plus/deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024'),
    'PIDNet': Family('mmseg::pidnet/pidnet-s_2xb6-120k_1024x1024-cityscapes'),
    'DDRNet': Family('mmseg::ddrnet/ddrnet_23-slim_in1k-pre_2xb6-120k_cityscapes-1024x1024'),
    'BiSeNet': Family('mmseg::bisenetv1/bisenetv1_r18-d32_4xb4-160k_cityscapes-1024x1024'),
    'BiSeNetV2': Family('mmseg::bisenetv2/bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024'),
    'UNet': Family('mmseg::unet/unet-s5-d16_fcn_4xb4-40k_hrf-256x256'),
    'STDC': Family('mmseg::stdc/stdc1_4xb12-80k_cityscapes-512x1024'),
    'SegNeXt': Family('mmseg::segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512'),
    'Segmenter': Family('mmseg::segmenter/segmenter_vit-s_mask_8xb1-160k_ade20k-512x512', 512),
    'K-Net': Family('mmseg::knet/knet-s3_r50-d8_fcn_8xb2-adamw-80k_ade20k-512x512'),
    'ResNet': Family('mmpretrain::resnet/resnet18_8xb32_in1k', 224),
    'ViT': Family('mmpretrain::deit/deit-tiny_4xb256_in1k', 224),
    'ConvNeXt': Family('mmpretrain::convnext/convnext-tiny_32xb128_in1k', 224),
    'MobileNetV2': Family('mmpretrain::mobilenet_v2/mobilenet-v2_8xb32_in1k', 224),
    'MobileNetV3': Family('mmpretrain::mobilenet_v3/mobilenet-v3-small_8xb128_in1k', 224),
    'LeViT': Family('mmpretrain::levit/levit-128s_8xb256_in1k', 224),
    'MobileViT': Family('mmpretrain::mobilevit/mobilevit-xxsmall_8xb128_in1k', 256),
    'PoolFormer': Family('mmpretrain::poolformer/poolformer-s12_32xb128_in1k', 224),
    'RegNet': Family('mmpretrain::regnet/regnetx-400mf_8xb128_in1k', 224),
    'ShuffleNetV2': Family('mmpretrain::shufflenet_v2/shufflenet-v2-1x_16xb64_in1k', 224),
    'VAN': Family('mmpretrain::van/van-tiny_8xb128_in1k', 224),
    'ViG': Family('mmpretrain::vig/vig-tiny_8xb128_in1k', 224),
    'RepVGG': Family('mmpretrain::repvgg/repvgg-A0_8xb32_in1k', 224),
    'MobileOne': Family('mmpretrain::mobileone/mobileone-s0_8xb32_in1k', 224),
    'EfficientNet': Family('mmpretrain::efficientnet/efficientnet-b0_8xb32_in1k', 224),
}

TRAINED: Mapping[str, Family] = {
    'YOLOX, trained': Family('mmdet::scenes/yolox_tiny', 160, trained=True),
    'YOLOX on CARE-S0, trained': Family('mmdet::scenes/yolox_care_s0', 160, trained=True),
    'RetinaNet, trained': Family('mmdet::scenes/retinanet_r18', 160, trained=True),
    'SegFormer, trained': Family('mmseg::scenes/segformer_b0', 160, trained=True),
}
ALL = {**FAMILIES, **TRAINED}


def write_config(family: Family) -> str:
    """Write a config whose detectors give boxes of any score."""
    base = family.config
    if family.trained:
        base = str(SCENES / Path(family.config).name)
    text = f"_base_ = '{base}.py'\n"
    if family.config.startswith('mmdet') and 'detr' not in family.config:
        scores = 'score_thr=-1.0, nms_pre=100_000'
        if 'rcnn' in family.config:
            scores = 'rcnn=dict(score_thr=-1.0)'
        text += f'model = dict(test_cfg=dict({scores}))\n'
    return text


def load(family: Family, folder: Path) -> LoadedModel:
    """Build a family's model with random weights, or with those of work_dirs/scenes."""
    path = folder / f'{Path(family.config).name}.py'
    path.write_text(write_config(family))
    if family.trained:
        checkpoint = Path('work_dirs/scenes', path.stem, 'last_checkpoint').read_text()
        return load_model(path, checkpoint, part='model')
    torch.manual_seed(0)
    model = load_model(path, part='model')
    prepare(model, family, family.side)
    return model


@torch.no_grad()
def prepare(model: LoadedModel, family: Family, side: int) -> None:
    """Let random weights give maps of usual magnitudes, in place."""
    assert model.normalization is not None, 'known for configs of the toolboxes'
    if {*model.normalization.std} == {1.0}:  # trained weights are as small
        convs = (x for x in model.task.backbone.modules() if isinstance(x, torch.nn.Conv2d))
        next(convs).weight /= PICTURE_STD if any(model.normalization.mean) else 255
    for module in model.task.modules():
        if type(module).__name__ == 'L2Norm':  # of SSD300, which mmdet fills in init_weights alone
            torch.nn.init.constant_(module.weight, 20)
    if family.normalized:
        set_statistics(model, side)


@torch.no_grad()
def set_statistics(model: LoadedModel, side: int) -> None:
    """Give batch norms the statistics of two images, in place."""
    norms = [module for module in model.task.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the average of all maps
    drawn = draw_images(3, (side, side), model.normalization)
    images = torch.cat([drawn[name].pixels for name in ('random', 'smooth')])
    assert model.normalization is not None, 'known for configs of the toolboxes'
    model.task(model.normalization.normalize(images))
    for norm in norms:
        norm.eval()


def add_loss(network: torch.nn.Module) -> None:
    """Give SSD's head the attribute that mmdet's ``predict`` asks for."""
    head = getattr(network, 'bbox_head', None)
    if type(head).__name__ == 'SSDHead':
        head.loss_cls = None


def compare_with_toolbox(
    model: LoadedModel, description: Mapping[str, Any], run: Run, side: int
) -> float:
    """Compare the results of a file with the toolbox's own prediction, see above.

    Args:
        model: What was exported.
        description: Of the file.
        run: Maps a normalized image to the file's outputs.
        side: Of the image.
    """
    normalization, network = model.normalization, model.task.model
    add_loss(network)
    assert normalization is not None, 'known for configs of the toolboxes'
    pixels = draw_images(3, (side, side), normalization)['smooth'].pixels
    image = normalization.normalize(pixels)
    outputs = run(image.numpy())
    results = read_results(description, outputs, (0, 0, side, side), (side, side), -1.0)
    sample = make_sample(model, side)
    with torch.no_grad():
        (predicted,) = network.predict(image, [sample])
    if hasattr(predicted, 'pred_instances'):
        return share_of_boxes(predicted.pred_instances.cpu().numpy(), results)
    if hasattr(predicted, 'pred_sem_seg'):
        return float((predicted.pred_sem_seg.data[0].numpy() == results['labels']).mean())
    scores = predicted.pred_score.numpy()[results['labels']]
    return float(np.abs(scores - results['scores']).max())


def compare_on_photographs(model: LoadedModel, path: Path, side: int, folder: Path) -> float:
    """Return the least share of mmdet's best boxes in a photograph that a file also has.

    mmdet reads, resizes and pads the photographs itself, to the file's size.
    """
    from mmdet.apis import inference_detector

    config = deepcopy(model.config)
    assert config is not None, 'models have configs here'
    fit_config(config, (side, side))
    program, shares = open_exported(path), []
    with DefaultScope.overwrite_default_scope('mmdet'):  # whose transforms are meant
        network = MODELS.build(config.model).eval()  # without padding of its own
        network.load_state_dict(model.task.model.state_dict())
        add_loss(network)
        pad_images(network, (side, side), model.normalization)
        network.cfg = config
        for picture in list_files(folder, PICTURES)[:PHOTOGRAPHS]:
            wanted = inference_detector(network, str(picture)).pred_instances.cpu().numpy()
            shares.append(share_of_boxes(wanted, program.predict(picture, score=-1.0)))
    return min(shares)


def make_sample(model: LoadedModel, side: int) -> Any:
    """Make an empty sample of the toolbox, of a picture that fills the image."""
    shape = side, side
    metas = dict(
        img_shape=shape,
        ori_shape=shape,
        pad_shape=shape,
        batch_input_shape=shape,
        scale_factor=(1.0, 1.0),
        flip=False,
    )
    assert model.config is not None, 'models have configs here'
    scope = model.config.get('default_scope')
    if scope == 'mmdet':
        from mmdet.structures import DetDataSample as Sample
    elif scope == 'mmseg':
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmpretrain.structures import DataSample as Sample
    return Sample(metainfo=metas)


def share_of_boxes(wanted: Any, results: Mapping[str, np.ndarray]) -> float:
    """Return the share of the toolbox's best boxes that a file also has."""
    from torchvision.ops import box_iou

    assert len(wanted.bboxes), 'scores have no threshold'
    best = np.argsort(-wanted.scores, kind='stable')[:BEST]
    pairs = wanted.bboxes[best], results['boxes']
    overlaps = box_iou(*map(torch.from_numpy, pairs)).numpy()
    labels = wanted.labels[best, None] == results['labels']
    scores = np.abs(wanted.scores[best, None] - results['scores'])
    return float(((overlaps > SAME_BOX) & labels & (scores < SAME_SCORE)).any(1).mean())


def largest(errors: Any) -> float | None:
    """Return the largest error on enforced images; None if nothing was compared."""
    if not isinstance(errors, Mapping):
        return None
    return max(float(errors[image]) for image in ('random', 'smooth'))


def tell(error: Exception) -> str:
    """Write an error in one line, without the paths that traces of PyTorch hold."""
    return re.sub(r'(: )?/\S+\.py\(\d+\): \S+ ?', '', ' '.join(str(error).split()))


def compute_cell(
    family: Family, model: LoadedModel, name: str, folder: Path, photographs: Path | None
) -> dict[str, Any]:
    """Export to a format; return errors, or the reason why there is no file."""
    shape = family.side, family.side
    outputs = 'decoded'
    options = {}
    if 'rcnn' in family.config and name == 'onnx':  # which is compared with mmdet: as many as there
        options['proposals'] = 1000
    if name == 'ncnn' and 'detr' in family.config:
        outputs = 'raw'
    try:
        report = export_model(model, folder, shape, (name,), outputs=outputs, **options)[name]
    except (ExportError, ImportError, ValueError) as error:
        return dict(reason=tell(error))
    half = report.get('max_rel_error_float16')
    cell: dict[str, Any] = dict(
        reason=half if isinstance(half, str) and half.startswith('too large') else None,
        error=largest(report['max_rel_error']),
        float16=largest(half),
    )
    if name == 'onnx':
        try:
            file = folder / report['file']
            program = open_exported(file)
            run, side = program.run, family.side
            cell['equal'] = compare_with_toolbox(model, program.description, run, side)
            masked = 'detr' in family.config  # mmdet masks padding, and a file does not
            if photographs and family.config.startswith('mmdet') and not masked:
                cell['photographs'] = compare_on_photographs(model, file, family.side, photographs)
        except Exception as error:  # the toolbox's own
            cell['reason'] = f'{type(error).__name__} in the toolbox: {tell(error)}'
    return cell


def read(path: Path) -> pd.DataFrame:
    """Read what is known already."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)


def add(path: Path, name: str, format_name: str, cell: Mapping[str, Any]) -> None:
    """Write a cell, in place of an older one."""
    table, family = read(path), ALL[name]
    toolbox, _, config = family.config.partition('::')
    row = dict(family=name, toolbox=toolbox, config=config, shape=family.side, format=format_name)
    others = table[(table.family != name) | (table.format != format_name)]
    rows = [*others.to_dict('records'), {**row, **cell}]
    save(path, pd.DataFrame(rows, columns=COLUMNS))


def is_known(path: Path, name: str, format_name: str) -> bool:
    """Say whether a cell was computed."""
    table = read(path)
    return bool(((table.family == name) & (table.format == format_name)).any())


def compute_family(name: str, formats: list[str], path: Path, photographs: Path | None) -> None:
    """Compute the cells of a family that are not known."""
    missing = [x for x in formats if not is_known(path, name, x)]
    with TemporaryDirectory() as folder:
        model: LoadedModel | None = None
        for format_name in missing:
            add(path, name, format_name, dict(reason=DIED))  # unless it is replaced below
            try:
                model = model or load(ALL[name], Path(folder))
                family = ALL[name]
                cell = compute_cell(family, model, format_name, Path(folder), photographs)
            except Exception as error:  # of a toolbox
                cell = dict(reason=f'{type(error).__name__}: {tell(error)}')
            add(path, name, format_name, cell)
            print(name, format_name, cell, file=sys.stderr, flush=True)


def main() -> None:
    """Compute the cells that are not known, and write them as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option('--families', nargs='+', choices=ALL, default=[*FAMILIES], metavar='NAME')
    option('--formats', nargs='+', choices=BACKENDS, default=['onnx', 'litert', 'executorch'])
    option('--photographs', type=Path, metavar='FOLDER', help='to compare detectors on')
    option('--out', type=Path, default=Path('work_dirs/families.csv'), metavar='FILE')
    arguments = parser.parse_args()
    check_writable(arguments.out.parent)
    warnings.simplefilter('ignore')
    logging.getLogger('mmcare').setLevel(logging.WARNING)
    if len(arguments.families) == 1:
        (name,) = arguments.families
        compute_family(name, arguments.formats, arguments.out, arguments.photographs)
        return
    for name in arguments.families:
        options = ['--formats', *arguments.formats, '--out', str(arguments.out)]
        if arguments.photographs:
            options += ['--photographs', str(arguments.photographs)]
        while not all(is_known(arguments.out, name, x) for x in arguments.formats):
            subprocess.run([sys.executable, __file__, '--families', name, *options])


if __name__ == '__main__':
    main()
