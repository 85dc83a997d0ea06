"""``python -m mmcare_runtime`` and ``python -m mmcare_runtime.evaluate``."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings

import cv2
import numpy as np
import pytest
from helpers import ROOT
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.mask import decode, encode
from runtime_helpers import BOXES, SHAPE, TASKS, describe, outputs_of, scored, write_onnx

from mmcare_runtime import Model
from mmcare_runtime.command import make_parser, open_file
from mmcare_runtime.evaluate import evaluate, read_mask
from mmcare_runtime.masks import encode_mask
from mmcare_runtime.prepare import read_picture
from mmcare_runtime.suffixes import PICTURES, list_files

PIXELS = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)


@pytest.mark.parametrize('task', TASKS)
def test_each_task_is_drawn(task, run):
    status, out, _ = run(task, 'a.png', '--score', '0.2')
    assert status == 0 and out.startswith('a.png: ') and 'Drawn into predictions' in out
    drawn = cv2.imread('predictions/a.png')
    assert drawn.shape == PIXELS.shape and (drawn != PIXELS).any()


def test_classes_without_a_name_get_their_number(run):
    """A segmentor of one class has labels 0 and 1."""
    status, out, _ = run('binary', 'a.png')
    assert status == 0 and 'a ' in out and '; 1 ' in out


def test_control_characters_are_escaped(run):
    _, out, err = run('classifier', 'a.png', 'b\x1b.png', classes=['\x1b[2J', 'b\u202e', '\x7f'])
    assert r'\x1b[2J' in out and r'b\x1b.png is not a file' in err
    assert '\x1b' not in out + err and '\u202e' not in out


def test_rewritten_files_open_without_their_hash(run):
    status, _, err = run('classifier', 'a.png', file_sha256='1' * 64)
    assert status == 2 and 'mine.onnx is damaged, or another tool has rewritten it' in err
    assert run('classifier', 'a.png', '--no-verify', file_sha256='1' * 64)[0] == 0


def test_one_bad_picture_is_named_and_skipped(run, tmp_path):
    (tmp_path / 'bad.png').write_text('text')
    status, out, err = run('classifier', 'bad.png', 'a.png', 'missing.png')
    assert status == 2 and out.startswith('a.png: ')
    assert err.splitlines() == [
        'error: bad.png is not a picture',
        'error: missing.png is not a file',
    ]


def test_folders_and_names_without_an_ending(run, tmp_path):
    (tmp_path / 'in/deeper').mkdir(parents=True)
    (tmp_path / 'in/notes.txt').touch()
    cv2.imwrite('in/deeper/b.JPG', PIXELS)
    (tmp_path / 'c').write_bytes((tmp_path / 'a.png').read_bytes())
    long = '写' * 80 + '.png'  # 244 bytes of 255
    cv2.imwrite(long, PIXELS)
    status, out, _ = run('classifier', 'in', 'c', long)
    assert status == 0 and 'notes' not in out
    assert (tmp_path / 'predictions' / long).is_file()
    assert cv2.imread('predictions/deeper/b.JPG') is not None
    assert cv2.imread('predictions/c.png') is not None


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ('a.png --out-dir .', 'a.png would be overwritten'),
        ('a.png other/a.png', 'a.png and other/a.png would be drawn into one file'),
        ('a.avi a.mp4', 'a.avi and a.mp4 would be drawn into one file'),
        ('a.png other/a.png --out-dir .', 'would be'),
    ],
)
def test_no_picture_is_overwritten(run, arguments, words):
    status, _, err = run('classifier', *arguments.split())
    assert status == 2 and words in err


def test_nothing_is_overwritten_by_a_second_run(run, tmp_path):
    assert run('classifier', 'a.png')[0] == 0
    status, _, err = run('classifier', 'a.png')
    assert status == 2 and 'predictions/a.png would be overwritten' in err
    assert sorted(path.name for path in (tmp_path / 'predictions').iterdir()) == ['a.png']


def test_overwriting_on_request(run, tmp_path):
    """Never a source, though."""
    assert run('classifier', 'a.png')[0] == 0
    (tmp_path / 'predictions/a.png').write_bytes(b'')
    assert run('classifier', 'a.png', '--overwrite')[0] == 0
    assert cv2.imread('predictions/a.png') is not None
    status, _, err = run('classifier', 'a.png', '--out-dir', '.', '--overwrite')
    assert status == 2 and 'a.png would be overwritten: give other sources' in err


@pytest.mark.parametrize(
    ('score', 'words'),
    [('30', '30 is not .* from 0 to 1: 30 per cent are 0.3'), ('nan', 'nan is not'), ('-1', '-1')],
)
def test_scores_are_from_0_to_1(score, words, run):
    status, _, err = run('boxes', 'a.png', f'--score={score}')
    assert status == 2 and re.search(words, err)


def test_nothing_is_said_to_be_drawn(run):
    status, out, err = run('boxes', 'missing.png')
    assert status == 2 and 'Drawn' not in out + err


def test_json(run):
    _, out, _ = run('boxes', 'a.png', '--json', '--score', '0')
    about = json.loads(out)
    assert about['source'] == 'a.png'
    assert {*about['objects'][0]} == {'name', 'label', 'score', 'box'}


def test_json_has_masks(run):
    """As COCO's run lengths, which pycocotools decodes."""
    _, out, _ = run('instances', 'a.png', '--json', '--score', '0')
    about = describe('instances')
    found = Model(lambda _: outputs_of(about), (1, 3, *SHAPE), about).predict(PIXELS, 0)
    objects = json.loads(out)['objects']
    for entry, mask in zip(objects, found['masks'], strict=True):
        np.testing.assert_array_equal(decode(entry['mask']), mask)
    draw = np.random.default_rng(0)
    for share in (0, 0.1, 0.5, 1):
        mask = draw.random((99, 70)) < share
        wanted = encode(np.asfortranarray(mask, np.uint8))
        assert encode_mask(mask) == dict(size=[99, 70], counts=wanted['counts'].decode())


def test_results_in_the_format_of_coco(run, tmp_path):
    """pycocotools loads what is printed, and what is written beside metrics."""
    file, _, _ = write_boxes(tmp_path)
    status, out, _ = run('instances', 'images', '--json', 'coco', '--score', '0')
    assert status == 0 and run('boxes', 'a.png', '--json', 'coco', '--score', '1')[1] == '[]\n'
    for task, source in (('classifier', 'a.png'), ('boxes', '0')):
        status, _, err = run(task, source, '--json', 'coco', '--overwrite')
        assert status == 2 and '--json coco is for detectors and pictures' in err
    for other in ('other/a.jpg', 'a.PNG'):
        status, _, err = run('boxes', 'a.png', other, '--json', 'coco', '--overwrite')
        assert status == 2 and f'a.png and {other} would have the same image_id' in err
    arguments = '--images', 'images', '--annotations', 'truth.json', '--results', 'found.json'
    status, _, _ = run('instances', *arguments, module='mmcare_runtime.evaluate')
    truth = COCO(str(file))
    assert {*truth.loadRes(json.loads(out)).getImgIds()} == {0, 1, 2, 3}
    found = truth.loadRes('found.json')
    assert status == 0 and {*found.getCatIds()} == {7, 8, 9} and found.anns[1]['area'] > 0


def test_the_reader_of_the_output_leaves(tmp_path):
    """As in ``--json | head -1``."""
    write_onnx(tmp_path / 'mine.onnx', describe('boxes'))
    for index in range(30):
        cv2.imwrite(str(tmp_path / f'{index}.png'), PIXELS)
    command = [
        sys.executable,
        '-m',
        'mmcare_runtime',
        'mine.onnx',
        '.',
        '--json',
        '--out-dir',
        'out',
    ]
    pipe = subprocess.PIPE
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, cwd=tmp_path, env=environment
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (141, b'')


def test_files_without_a_description(run, tmp_path):
    run('classifier', 'missing.png')
    onnx = pytest.importorskip('onnx')
    model = onnx.load(tmp_path / 'mine.onnx')
    del model.metadata_props[:]
    onnx.save(model, tmp_path / 'other.onnx')
    with pytest.raises(ValueError, match=r'other.onnx does not say what it is'):
        open_file(make_parser('', '').parse_args([str(tmp_path / 'other.onnx')]))


def test_files_of_parts(run):
    status, _, err = run('classifier', 'a.png', part='neck')
    assert status == 2 and err.startswith('error: mine.onnx is not of a whole model')


def write_masks(folder, count=3):
    """Write masks, and pictures that show them."""
    (folder / 'images').mkdir()
    (folder / 'masks').mkdir()
    masks = np.random.default_rng(0).integers(0, 3, (count, *SHAPE)).astype(np.uint8)
    for index, mask in enumerate(masks):
        cv2.imwrite(str(folder / f'images/{index}.png'), np.repeat(mask[..., None], 3, 2))
        mask[:4] = 255
        cv2.imwrite(str(folder / f'masks/{index}.png'), mask)
    return masks


def test_segmentors_are_measured(tmp_path, run):
    """Metrics are mmseg's."""
    import torch
    from mmseg.evaluation.metrics import IoUMetric

    masks = write_masks(tmp_path)

    def find(image):
        labels = image[:, 0].astype(np.uint8)
        labels[:, :, :20] = 1
        return [labels]

    model = Model(find, (1, 3, *SHAPE), describe('labels'))
    metrics = evaluate(model, tmp_path / 'images', tmp_path / 'masks')
    found = np.where(masks == 255, 0, masks)
    found[:, :, :20] = 1
    pairs = zip(torch.from_numpy(found), torch.from_numpy(masks), strict=True)
    areas = [IoUMetric.intersect_and_union(*pair, 3, 255) for pair in pairs]
    totals = [sum(area) for area in zip(*areas, strict=True)]
    wanted = IoUMetric.total_area_to_metrics(*totals, ['mIoU'])
    assert metrics['aAcc'] == pytest.approx(100 * wanted['aAcc'], abs=1e-3)
    assert metrics['mIoU'] == pytest.approx(100 * wanted['IoU'].mean(), abs=1e-3)
    assert metrics['mAcc'] == pytest.approx(100 * wanted['Acc'].mean(), abs=1e-3)
    shares = [metrics[f'IoU_{name}'] for name in model.description['classes']]
    assert shares == pytest.approx((100 * wanted['IoU']).tolist(), abs=1e-3)
    arguments = '--images', 'images', '--annotations', 'masks'
    status, out, _ = run('labels', *arguments, module='mmcare_runtime.evaluate')
    assert status == 0 and out.startswith('aAcc ')
    (tmp_path / 'masks/0.png').write_bytes(b'')
    status, _, err = run('labels', *arguments, module='mmcare_runtime.evaluate')
    assert status == 2 and '0.png is not a mask' in err
    (tmp_path / 'masks/0.png').unlink()
    status, _, err = run('labels', *arguments, module='mmcare_runtime.evaluate')
    assert status == 2 and '0.png' in err


def test_masks_are_read_as_the_file_says(tmp_path):
    """The description has ``reduce_zero_label``, and a flag that contradicts it is refused."""
    masks = write_masks(tmp_path, 1)
    cv2.imwrite(str(tmp_path / 'masks/0.png'), masks[0] + 1)
    folders = tmp_path / 'images', tmp_path / 'masks'
    run, shape = (lambda image: [image[:, 0].astype(np.uint8)]), (1, 3, *SHAPE)
    for described in (True, False, None):
        changes = {} if described is None else dict(reduce_zero_label=described)
        model = Model(run, shape, describe('labels', **changes))
        for flag in (True, False, None):
            if None not in (described, flag) and described != flag:
                with pytest.raises(ValueError, match=f'says reduce_zero_label={described}'):
                    evaluate(model, *folders, reduce_zero_label=flag)
            elif described or flag:
                assert evaluate(model, *folders, reduce_zero_label=flag)['mIoU'] == 100
            else:
                with pytest.raises(ValueError, match=r'0.png has class 3, and .* 3 classes'):
                    evaluate(model, *folders, reduce_zero_label=flag)
    cv2.imwrite(str(tmp_path / 'masks/0.png'), np.full(SHAPE, 255, np.uint8))
    with pytest.raises(ValueError, match=r'no pixel in .*masks has a class'):
        evaluate(model, *folders)


@pytest.mark.parametrize('task', ['segmentor', 'labels'])
def test_classes_without_names(task, tmp_path):
    """Their number is that of a file's channels, or it is not known, where a file has labels."""
    masks = write_masks(tmp_path, 1)
    about, shape = describe(task, classes=None, palette=None), (1, 3, *SHAPE)
    zeros = np.zeros(about['outputs'][0]['shape'], np.float32)
    if task == 'segmentor':
        zeros[:, 0] = 1
    model = Model(lambda _: [zeros], shape, about)
    share = 100 * (masks[0][4:] == 0).mean()
    folders = tmp_path / 'images', tmp_path / 'masks'
    assert evaluate(model, *folders)['aAcc'] == pytest.approx(share)


def test_masks_of_one_bit(tmp_path):
    """OpenCV would read 0 and 255, of which 255 is ignored."""
    wanted = np.random.default_rng(0).integers(0, 2, SHAPE).astype(bool)
    Image.fromarray(wanted).save(tmp_path / 'a.png')
    np.testing.assert_array_equal(read_mask(tmp_path / 'a.png'), wanted)


def write_boxes(folder):
    """Write four pictures with an object each, and the file of annotations; return both."""
    (folder / 'images').mkdir()
    annotations, boxes = [], []
    for index in range(4):
        cv2.imwrite(str(folder / f'images/{index}.png'), np.full((64, 96, 3), index, np.uint8))
        left, top, width, height = 4.0 + index, 6.0, 20.0, 30.0
        boxes.append([left, top, left + width, top + height])
        annotations.append(
            dict(id=index + 1, image_id=index, category_id=7 + index % 2)  # without iscrowd
            | dict(bbox=[left, top, width, height], area=width * height)
        )
        corners = [left, top, left + width, top, left + width, top + height, left, top + height]
        annotations[-1]['segmentation'] = [corners]
    images = [dict(id=i, file_name=f'{i}.png', height=64, width=96) for i in range(4)]
    categories = [dict(id=7, name='cat'), dict(id=8, name='dog'), dict(id=9, name='owl')]
    file = folder / 'truth.json'
    about = dict(images=images, annotations=annotations, categories=categories)
    file.write_text(json.dumps(about))
    return file, about, boxes


def test_detectors_are_measured(tmp_path):
    """Average precision is 1 where objects are right, and less where a class is not found."""
    file, about, boxes = write_boxes(tmp_path)

    def find(image, dog=1):
        index = int(image[0, 0, 0, 0])
        values = np.zeros((1, 5, 4), np.float32)
        values[0, 0] = np.divide(boxes[index], 2)
        scores = np.array([[0.9, 0, 0, 0, 0]], np.float32)
        return [values, scores, np.full((1, 5), index % 2 * dog)]

    model = Model(find, (1, 3, *SHAPE), describe('boxes'))
    assert evaluate(model, tmp_path / 'images', file)['bbox_mAP'] == pytest.approx(1)
    masks = np.ones((1, 5, 7, 7), np.float32)
    model = Model(lambda image: [*find(image), masks], (1, 3, *SHAPE), describe('instances'))
    metrics = evaluate(model, tmp_path / 'images', file)
    assert metrics['bbox_mAP'] == pytest.approx(1) and metrics['segm_mAP'] == pytest.approx(1)
    masks[..., 4:] = 0
    assert evaluate(model, tmp_path / 'images', file)['segm_mAP'] < 0.6
    model = Model(lambda image: find(image, 0), (1, 3, *SHAPE), describe('boxes'))
    metrics = evaluate(model, tmp_path / 'images', file)
    assert metrics['bbox_mAP'] < 0.6 and metrics['bbox_AP_dog'] == 0
    assert metrics['bbox_AP_cat'] == pytest.approx(2 * metrics['bbox_mAP'])
    assert 'bbox_AP_owl' not in metrics  # no picture has one
    about['categories'].reverse()
    file.write_text(json.dumps(about))
    with pytest.warns(UserWarning, match='in another order'):
        assert evaluate(model, tmp_path / 'images', file) == metrics
    about['categories'].reverse()
    about['categories'][0]['name'] = 'cow'
    file.write_text(json.dumps(about))
    nameless = Model(find, (1, 3, *SHAPE), dict(describe('boxes'), classes=None))
    with pytest.raises(ValueError, match='does not name its classes'):
        evaluate(nameless, tmp_path / 'images', file)
    with pytest.raises(ValueError, match=r'truth.json has no cat'):
        evaluate(model, tmp_path / 'images', file)


def each(entries, /, **values):
    """Change each entry of a list, by values or functions of the entry's number."""

    def change(about):
        for index, entry in enumerate(about[entries]):
            for key, value in values.items():
                entry[key] = value(index) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (each('annotations', id=3), '1 ids of objects .* more than once, such as 3'),
        (each('images', id=0), '1 ids of pictures .* more than once, such as 0'),
        (each('categories', id=7), '1 ids of categories .* more than once, such as 7'),
        (each('categories', name='cat'), "'cat' is the name of several categories|has no dog"),
        (lambda about: about['categories'].append(dict(id=17, name='dog')), "'dog' is the name"),
        (lambda about: about.pop('annotations'), 'has no object of these classes'),
        (lambda about: about.pop('images'), "no list 'images'"),
        (each('annotations', iscrowd=1), 'has no object of these classes'),
        (each('annotations', image_id=str), 'has no object of these classes in its pictures'),
        (each('annotations', bbox=None), 'have bbox=None, such as object 1'),
        (each('annotations', bbox=[1, 2, 3]), r'have bbox=\[1, 2, 3\], such as object 1'),
        (each('annotations', bbox=[4, 6, 0, 30]), '4 of 4 boxes .* are none'),
        (each('annotations', bbox=[4, 6, float('nan'), 30]), '4 of 4 boxes .* are none'),
        (each('annotations', bbox=[0.1, 0.1, 0.3, 0.3]), 'are shares of width and height'),
        (each('annotations', bbox=[60, 40, 90, 60]), 'reach far beyond their pictures'),
        (each('images', width=64, height=96), r'0.png is read with height and width \(64, 96\)'),
        (
            lambda about: [i.update(coco_url=i.pop('file_name')) for i in about['images']],
            "4 of 4 pictures .* lack 'file_name'",
        ),
        (each('annotations', segments_info=[]), 'is a file of panoptic segments'),
        (each('annotations', segmentation=[[1, 2]]), 'has a polygon of fewer than three points'),
    ],
)
def test_annotations_that_would_be_measured_wrong(change, words, tmp_path):
    """pycocotools takes these silently, or fails by a bare name."""
    file, about, _ = write_boxes(tmp_path)
    change(about)
    file.write_text(json.dumps(about))
    model = Model(
        lambda _: outputs_of(describe('instances')), (1, 3, *SHAPE), describe('instances')
    )
    with pytest.raises(ValueError, match=words):
        evaluate(model, tmp_path / 'images', file)


def perfect_model(boxes):
    """Return a model that finds the boxes of :func:`write_boxes`."""
    values, scores = np.zeros((1, 5, 4), np.float32), np.array([[0.9, 0, 0, 0, 0]], np.float32)

    def find(image):
        index = int(image[0, 0, 0, 0])
        values[0, 0] = np.divide(boxes[index], 2)
        return [values, scores, np.full((1, 5), index % 2)]

    return Model(find, (1, 3, *SHAPE), describe('boxes'))


@pytest.mark.parametrize('number', [int, '{:04d}'.format, 'a{}'.format])
def test_ids_of_pictures(number, tmp_path):
    file, about, boxes = write_boxes(tmp_path)
    for image, annotation in zip(about['images'], about['annotations'], strict=True):
        image['id'] = annotation['image_id'] = number(image['id'])
    file.write_text(json.dumps(about))

    results = tmp_path / 'found.json'
    metrics = evaluate(perfect_model(boxes), tmp_path / 'images', file, results=results)
    assert metrics['bbox_mAP'] == pytest.approx(1)
    assert [x['image_id'] for x in json.loads(results.read_text())] == [*map(number, range(4))]


@pytest.mark.parametrize('number', [int, str, lambda index: f'a{index}'])
def test_ids_of_objects(number, tmp_path):
    """pycocotools takes 0 for no match, and converts texts to numbers."""
    file, about, boxes = write_boxes(tmp_path)
    each('annotations', id=number)(about)
    file.write_text(json.dumps(about))
    model = perfect_model(boxes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert evaluate(model, tmp_path / 'images', file)['bbox_mAP'] == pytest.approx(1)
    assert len(caught) == (number in (int, str)) and all('has id 0' in str(x) for x in caught)


def test_more_than_a_hundred_boxes(tmp_path):
    """AP takes the 100 best boxes, AP50 and AP75 up to 1,000, as in mmdet."""
    (tmp_path / 'images').mkdir()
    cv2.imwrite(str(tmp_path / 'images/0.png'), np.zeros((*SHAPE, 3), np.uint8))
    x, y = np.divmod(np.arange(150), 15)
    corners = np.stack([3 * x, 2 * y, 3 * x + 2, 2 * y + 1], 1).astype(np.float32)
    item = dict(image_id=0, category_id=0, iscrowd=0, area=2)
    items = [
        dict(item, id=i + 1, bbox=[*map(float, row[:2]), 2, 1]) for i, row in enumerate(corners)
    ]
    image = dict(id=0, file_name='0.png', height=SHAPE[0], width=SHAPE[1])
    names = [dict(id=i, name=name) for i, name in enumerate(('cat', 'dog', 'owl'))]
    file = tmp_path / 'truth.json'
    file.write_text(json.dumps(dict(images=[image], annotations=items, categories=names)))
    outputs = [corners[None], np.ones((1, 150), np.float32), np.zeros((1, 150))]
    test_cfg = dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=200, score_thr=0.1)
    described = [dict(BOXES, shape=[1, 150, 4]), scored('scores', 1, 150), scored('labels', 1, 150)]
    about = describe('boxes', test_cfg=test_cfg, outputs=described)
    model = Model(lambda _: outputs, (1, 3, *SHAPE), about)
    metrics = evaluate(model, tmp_path / 'images', file)
    assert metrics['bbox_mAP'] == pytest.approx(0.67, abs=0.01)
    assert metrics['bbox_mAP_50'] == pytest.approx(1)


def test_classifiers_are_measured(tmp_path):
    """Folders are classes by their names; hidden files are no pictures."""
    for name, value in (('dog', 1), ('cat', 0), ('owl', 0)):
        (tmp_path / name).mkdir()
        cv2.imwrite(str(tmp_path / name / 'a.png'), np.full((64, 96, 3), value, np.uint8))
    (tmp_path / 'owl/._a.png').write_bytes(b'written by macOS')
    (tmp_path / 'overview.png').write_bytes(b'of no class')

    def find(image):
        scores = np.zeros((1, 3), np.float32)
        scores[0, int(image[0, 0, 0, 0])] = 1
        return [scores]

    model = Model(find, (1, 3, *SHAPE), describe('probabilities'))
    metrics = evaluate(model, tmp_path)
    assert metrics == {'accuracy/top1': pytest.approx(200 / 3), 'accuracy/top5': 100}
    (tmp_path / 'owl').rename(tmp_path / 'Owl')
    with pytest.raises(ValueError, match='folders that are not classes: Owl'):
        evaluate(model, tmp_path)
    with pytest.raises(FileNotFoundError, match='no folders of pictures'):
        evaluate(model, tmp_path / 'Owl')


def test_links_to_folders_are_followed(tmp_path):
    """As the toolboxes do, but not for ever."""
    (tmp_path / 'data/dog').mkdir(parents=True)
    (tmp_path / 'data/dog/a.png').touch()
    (tmp_path / 'data/cat').symlink_to(tmp_path / 'data/dog')
    (tmp_path / 'data/dog/back').symlink_to(tmp_path / 'data')
    (tmp_path / 'data/dog/self').symlink_to('.')
    found = [path.relative_to(tmp_path).as_posix() for path in list_files(tmp_path, PICTURES)]
    assert found == ['data/cat/a.png', 'data/dog/a.png']


def test_suffixes(tmp_path):
    """Training and the runtime read the same pictures, and what is not read is counted."""
    text = (ROOT / 'configs/your_data/classifier.py').read_text(encoding='utf-8')
    extensions = re.search(r'^extensions = (\[.*?\])$', text, re.DOTALL | re.MULTILINE)[1]
    assert {*ast.literal_eval(extensions)} == {*PICTURES} - {'.npy'}
    data = cv2.imencode('.png', PIXELS)[1].tobytes()
    for suffix in (*PICTURES, '.HEIC', '.gif', '.txt'):
        (tmp_path / f'a{suffix}').write_bytes(data)
    with pytest.warns(UserWarning, match=r'2 pictures in .* are not read: 1 .heic, 1 .gif'):
        paths = list_files(tmp_path, PICTURES)
    assert {path.suffix for path in paths} == {*PICTURES}
    for path in paths:
        assert path.suffix == '.npy' or read_picture(path).shape == PIXELS.shape
