"""tools/convert_dataset.py: two layouts of each format, as the tools write them."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from helpers import ROOT, run_tool
from mmengine.config import Config

pytest.importorskip('supervision', '0.31')
CLASSES = ['cat', 'dog']
SIZE = WIDTH, HEIGHT = 80, 60
BOX = {'cat': (10, 10, 30, 40), 'dog': (40, 20, 70, 50)}  # left, top, right, bottom
SPLITS = ('train', 'valid', 'test')


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.zeros((HEIGHT, WIDTH, 3), np.uint8))


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def yolo(name):
    left, top, right, bottom = np.divide(BOX[name], SIZE * 2)
    values = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
    return ' '.join(map(str, (CLASSES.index(name), *values)))


def voc(names, size=SIZE):
    objects = ''
    for name in names:
        left, top, right, bottom = BOX[name]
        sides = dict(xmin=left + 1, ymin=top + 1, xmax=right, ymax=bottom)  # counted from 1
        box = ''.join(f'<{key}>{value}</{key}>' for key, value in sides.items())
        objects += f'<object><name>{name}</name><bndbox>{box}</bndbox></object>'
    sides = f'<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>'
    return f'<annotation>{sides}{objects}</annotation>'


def labelme(picture, names, kind='rectangle'):
    shapes = []
    for name in names:
        left, top, right, bottom = BOX[name]
        corners = [[left, top], [right, bottom]]
        if kind == 'polygon':
            corners = [[left, top], [right, top], [right, bottom], [left, bottom]]
        shapes.append(dict(label=name, points=corners, group_id=None, shape_type=kind, flags={}))
    sides = dict(imageWidth=WIDTH, imageHeight=HEIGHT)
    return json.dumps(dict(shapes=shapes, imagePath=f'..\\{picture}', imageData='AA==', **sides))


def createml(pictures):
    return json.dumps(
        [
            dict(
                image=picture,
                annotations=[
                    dict(
                        label=name,
                        coordinates=dict(
                            x=(BOX[name][0] + BOX[name][2]) / 2,
                            y=(BOX[name][1] + BOX[name][3]) / 2,
                            width=BOX[name][2] - BOX[name][0],
                            height=BOX[name][3] - BOX[name][1],
                        ),
                    )
                    for name in names
                ],
            )
            for picture, names in pictures.items()
        ]
    )


TWO = createml({'0.jpg': [], '1.jpg': ['cat']})


def names_of(number):
    """The objects of the picture with this number: one, two or none."""
    return (['cat'], ['cat', 'dog'], [])[number % 3]


def make(kind, root, splits):
    """Six pictures in one folder, or for each part two, in Roboflow's layout."""
    for part in splits or ('',):
        contents = {f'{n}.jpg': names_of(n) for n in range(2 if splits else 6)}
        folder = root / part
        for picture, names in contents.items():
            stem = picture[:-4]
            if kind == 'yolo':
                draw(folder / 'images' / picture)
                if names:  # without objects, there is no file
                    lines = [*map(yolo, names), '']
                    put(folder / f'labels/{stem}.txt', '\r\n'.join(lines))
            elif kind == 'voc':
                draw(folder / ('' if splits else 'JPEGImages') / picture)
                put(folder / ('' if splits else 'Annotations') / f'{stem}.xml', voc(names))
            else:
                draw(folder / picture)
                if kind == 'labelme':
                    put(folder / f'{stem}.json', labelme(picture, names))
        if kind == 'createml':
            put(folder / '_annotations.createml.json', createml(contents))
    if kind == 'yolo' and splits:
        put(root / 'data.yaml', yaml.safe_dump(dict(train='../train/images', names=CLASSES)))
        put(root / 'README.roboflow.txt', 'A data set')
    elif kind == 'yolo':
        put(root / 'classes.txt', 'cat\ndog\n')  # Label Studio's
    return root


def read(file):
    content = json.loads(Path(file).read_text())
    names = {category['id']: category['name'] for category in content['categories']}
    images = {image['id']: image for image in content['images']}
    found = {image['file_name']: [] for image in images.values()}
    for item in content['annotations']:
        image = images[item['image_id']]
        assert (image['width'], image['height']) == SIZE
        left, top, width, height = item['bbox']
        name = names[item['category_id']]
        assert (left, top, left + width, top + height) == pytest.approx(BOX[name], abs=1e-3)
        assert item['area'] == pytest.approx(width * height, rel=0.1)
        assert item['iscrowd'] == 0
        found[image['file_name']].append(name)
    return content, found


@pytest.fixture
def convert(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, fails=None):
        capsys.readouterr()
        if fails:
            with pytest.raises(SystemExit, match='2'):
                run_tool(monkeypatch, 'convert_dataset', *arguments)
            assert not [*Path().glob('*mine*')]
            error = capsys.readouterr().err
            for words in [fails] if isinstance(fails, str) else fails:
                assert words in error
            return error
        run_tool(monkeypatch, 'convert_dataset', *arguments)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize('splits', [(), SPLITS], ids=['one', 'splits'])
@pytest.mark.parametrize('kind', ['yolo', 'voc', 'labelme', 'createml'])
def test_files_hold_what_the_source_holds(kind, splits, convert):
    source = make(kind, Path('source'), splits)
    printed = convert(kind, source, 'mine')
    files = ['train.json', 'val.json'] + ['test.json'] * bool(splits)
    found = {}
    for file in files:
        content, pictures = read(f'mine/{file}')
        assert [category['name'] for category in content['categories']] == CLASSES
        assert not {*found} & {*pictures}
        found.update(pictures)
        if splits:
            assert {name: names_of(int(name[-5])) for name in pictures} == pictures
    if splits:
        assert sorted(found) == sorted(f'{part}/{n}.jpg' for part in splits for n in range(2))
    else:
        assert found == {f'{n}.jpg': names_of(n) for n in range(6)}
        assert len(read('mine/val.json')[1]) == 1  # a fifth
    assert {path.name for path in Path('mine').iterdir()} == {'images', *files}
    for name in found:
        assert cv2.imread(f'mine/images/{name}').shape == (HEIGHT, WIDTH, 3)

    # The lines that it prints are all that a config needs; with --config, it writes them.
    lines = printed.splitlines()
    for name in CLASSES:
        counts = [sum(names.count(name) for names in read(f'mine/{f}')[1].values()) for f in files]
        assert [name, *map(str, counts)] in [line.split() for line in lines]
    lines = [line.split('  #')[0] for line in lines if ' = ' in line]
    assert [line.split(' = ')[0] for line in lines] == ['data_root', 'classes'] + ['test'] * bool(
        splits
    )
    shutil.rmtree('mine')
    assert 'mim train mmdet mine.py' in convert(kind, source, 'mine', '--config', 'mine.py')
    written = Path('mine.py').read_text().splitlines()
    shipped = (ROOT / 'configs/your_data/detector.py').read_text().splitlines()
    assert [line.split('  #')[0] for line in written if line not in shipped] == lines
    loaded = Config.fromfile('mine.py')
    from mmdet.registry import DATASETS  # registers CocoDataset
    from mmdet.utils import register_all_modules

    register_all_modules()
    for part in [file[:-5] for file in files]:
        dataset = DATASETS.build(loaded[f'{part}_dataloader'].dataset)
        assert [*dataset.metainfo['classes']] == CLASSES
        if part != 'train':
            assert dataset[0]['inputs'].shape[0] == 3


@pytest.mark.parametrize('kind', ['yolo', 'labelme'])
def test_polygons_become_masks(kind, convert):
    if kind == 'yolo':  # Ultralytics' layout; names by number, with a gap
        for n, part in enumerate(['train', 'train', 'val']):
            draw(Path(f'source/images/{part}/{n}.jpg'))
            left, top, right, bottom = np.divide(BOX['cat'], SIZE * 2)
            polygon = f'3 {left} {top} {right} {top} {right} {bottom} {left} {bottom}'
            box = f'0 {yolo("dog")[2:]}'
            put(Path(f'source/labels/{part}/{n}.txt'), box if n else polygon)
        put(Path('source/data.yaml'), yaml.safe_dump(dict(names={0: 'dog', 3: 'cat'})))
    else:
        for n in range(3):
            shape, name = ('rectangle', 'dog') if n else ('polygon', 'cat')
            draw(Path(f'source/{n}.jpg'))
            put(Path(f'source/{n}.json'), labelme(f'{n}.jpg', [name], shape))
    printed = convert(kind, 'source', 'mine')
    assert '2 of 3 objects have only a box' in printed
    assert 'instances.py' in printed
    masks = {}
    for part in ('train', 'val'):
        content, _ = read(f'mine/{part}.json')
        for item in content['annotations']:
            (polygon,) = item['segmentation']
            points = np.reshape(polygon, (-1, 2))
            masks[content['categories'][item['category_id'] - 1]['name']] = (
                *points.min(0),
                *points.max(0),
            )
    assert {name: pytest.approx(box, abs=0.5) for name, box in BOX.items()} == masks


def test_the_split_is_random_and_repeatable(convert):
    make('voc', Path('source'), ())

    def val(out, *options):
        convert('voc', 'source', out, *options)
        return {*read(f'{out}/val.json')[1]}

    first, half = val('a'), val('b', '--val', 0.5)
    assert first == val('c', '--val', 0.2, '--seed', 0)
    assert len(half) == 3
    assert (
        len({frozenset(half), *(frozenset(val(f'd{n}', '--val', 0.5, '--seed', n)) for n in '123')})
        > 1
    )


def test_lists_of_voc_are_followed(convert):
    make('voc', Path('source'), ())
    put(Path('source/ImageSets/Main/train.txt'), '0\n4\n')
    put(Path('source/ImageSets/Main/val.txt'), '1\n5\n')
    assert 'in none of train, val, left out: 2' in convert('voc', 'source', 'mine')
    assert {*read('mine/train.json')[1]} == {'0.jpg', '4.jpg'}
    assert {*read('mine/val.json')[1]} == {'1.jpg', '5.jpg'}
    shutil.rmtree('mine')
    convert('voc', 'source', 'mine', '--seed', 1, fails='leave --val and --seed out')


@pytest.mark.parametrize('kind', ['yolo', 'voc', 'labelme', 'createml'])
def test_links_to_folders_are_followed(kind, convert):
    make(kind, Path('real'), ())
    Path('source').mkdir()
    Path('source/linked').symlink_to(Path('real').resolve())
    convert(kind, 'real', 'first')
    convert(kind, 'source', 'mine')
    for part in ('train', 'val'):
        wanted = read(f'first/{part}.json')[1]
        assert read(f'mine/{part}.json')[1] == {f'linked/{k}': v for k, v in wanted.items()}


@pytest.mark.parametrize('lists', ['cvat', 'data.yaml', 'same'])
def test_lists_of_yolo_are_followed(convert, lists):
    """As CVAT writes them, or in data.yaml, whose paths may begin elsewhere."""
    make('yolo', Path('source'), ())
    root = Path('source')
    for part, numbers in dict(obj_train_data='0145', obj_valid_data='23').items():
        (root / part).mkdir()
        for file in [f for n in numbers for f in root.rglob(f'{n}.*')]:
            file.rename(root / part / file.name)
    if lists == 'cvat':
        put(root / 'train.txt', 'data/obj_train_data/0.jpg\ndata/obj_train_data/1.jpg\n')
        put(root / 'valid.txt', 'data/obj_valid_data/2.jpg\n')
    else:
        val = 'obj_valid_data' if lists == 'data.yaml' else 'obj_train_data'
        paths = dict(train='../mine/obj_train_data', val=[f'/home/mine/{val}'])
        put(root / 'data.yaml', yaml.safe_dump(dict(paths, names=CLASSES)))
    convert('yolo', 'source', 'mine')
    found = [{*read(f'mine/{part}.json')[1]} for part in ('train', 'val')]
    train, val = [{Path(name).name for name in names} for names in found]
    if lists == 'cvat':
        assert (train, val) == ({'0.jpg', '1.jpg'}, {'2.jpg'})
    elif lists == 'data.yaml':
        assert (train, val) == ({'0.jpg', '1.jpg', '4.jpg', '5.jpg'}, {'2.jpg', '3.jpg'})


def test_difficult_objects_of_voc_are_crowds(convert):
    make('voc', Path('source'), ())
    file = next(file for file in Path('source').rglob('*.xml') if '<object>' in file.read_text())
    text = file.read_text().replace('<object>', '<object><difficult>1</difficult>', 1)
    file.write_text(text, encoding='utf-8')
    convert('voc', 'source', 'mine')
    parts = [json.loads(Path(f'mine/{part}.json').read_text()) for part in ('train', 'val')]
    assert sum(item['iscrowd'] for part in parts for item in part['annotations']) == 1


def test_lists_of_several_years_of_voc(convert):
    """They stand below SOURCE, and names may have spaces, or a flag after them."""
    for year in ('VOC2007', 'VOC2012'):
        make('voc', Path('kit') / year, ())
    for file in [*Path('kit/VOC2012').glob('*/5.*')]:
        file.rename(file.with_name(f'my {file.name}'))
    put(Path('kit/VOC2007/ImageSets/Main/train.txt'), '0  1\n1 -1\n')
    put(Path('kit/VOC2007/ImageSets/Main/test.txt'), '2\n')
    put(Path('kit/VOC2012/ImageSets/Main/val.txt'), 'my 5\n')
    convert('voc', 'kit', 'mine')
    assert {*read('mine/train.json')[1]} == {'VOC2007/0.jpg', 'VOC2007/1.jpg'}
    assert {*read('mine/val.json')[1]} == {'VOC2012/my 5.jpg'}
    assert {*read('mine/test.json')[1]} == {'VOC2007/2.jpg'}
    shutil.rmtree('mine')
    shutil.rmtree('kit/VOC2012')
    for file in Path('kit/VOC2007/ImageSets/Main').iterdir():
        file.write_text('7\n', encoding='utf-8')
    convert('voc', 'kit', 'other', fails='names none of the pictures')


def test_other_pictures_are_left_out_and_named(convert):
    make('yolo', Path('source'), SPLITS)
    draw(Path('source/runs/detect/labels.jpg'))
    put(Path('source/train/labels/gone.txt'), '0 0.5 0.5 0.1 0.1')
    printed = convert('yolo', 'source', 'mine')
    assert 'pictures without annotations, left out: 1, such as source/runs' in printed
    assert 'gone.txt' in printed
    assert 'README' not in printed
    assert len([*Path('mine/images').rglob('*.jpg')]) == 6


@pytest.mark.parametrize(
    ('kind', 'file', 'text'),
    [
        ('yolo', 'labels/1.txt', '0 0.5 0.5\n'),
        ('yolo', 'labels/1.txt', '5 0.5 0.5 0.1 0.1\n'),
        ('voc', 'Annotations/1.xml', '<annotation><object></annotation>'),
        ('voc', 'Annotations/1.xml', voc(['cat'], (HEIGHT, WIDTH))),
        ('labelme', '1.json', '{"shapes": 3}'),
        ('labelme', '1.json', labelme('1.jpg', ['cat']).replace(str(WIDTH), str(2 * WIDTH))),
        ('createml', '_annotations.createml.json', TWO[:-1]),
        ('createml', '_annotations.createml.json', TWO.replace('"x"', '"left"')),
        ('createml', '_annotations.createml.json', '{}'),
        ('yolo', 'images/1.jpg', 'no picture'),
    ],
)
def test_what_cannot_be_read_is_named(kind, file, text, convert):
    source = make(kind, Path('source'), ())
    put(source / file, text)
    error = convert(kind, source, 'mine', fails=str(source / file))
    assert 'Traceback' not in error


def test_layouts_that_it_does_not_know_are_refused(convert):
    make('yolo', Path('source/download'), SPLITS)
    convert('yolo', 'source/download/train/labels', 'mine', fails='none of 0 pictures')
    convert('yolo', 'source', 'mine', fails='source')  # its data.yaml is one folder below
    shutil.copy('source/download/data.yaml', 'source')
    convert('yolo', 'source', 'mine', fails='below another folder')
    convert('yolo', 'gone', 'mine', fails='gone is no folder')
    Path('source/download/data.yaml').unlink()
    convert('yolo', 'source/download', 'mine', fails='names of the classes are missing')
    draw(Path('source/download/train/images/0.png'))
    convert('yolo', 'source/download', 'mine', fails=('0.png', '0.jpg', 'share'))


def test_what_is_there_stays(convert):
    source = make('voc', Path('source'), ())
    put(Path('out/file'), 'mine')
    convert('voc', source, 'out', fails='out exists')
    convert('voc', source, 'source/out', fails='source/out is in source')
    assert Path('out/file').read_text() == 'mine'
    assert not Path('source/out').exists()
