"""Convert annotations of boxes and polygons into the COCO files that configs/your_data read.

SOURCE holds pictures and annotations as the tools write them: in one folder; in two such as images
and labels; or split into train, valid or val, and test, above or below these. OUT gets train.json,
val.json and images/, and test.json if SOURCE has test pictures. Nothing in SOURCE changes.
"""

import argparse
import json
import random
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import yaml
from mmengine.utils import track_iter_progress

from mmcare.files import check_writable, check_writable_file, moved_into_place
from mmcare.shipped import shipped_config
from mmcare_runtime.coco import find_other_boxes, find_repeated
from mmcare_runtime.suffixes import PICTURES, list_files, walk

try:
    import supervision
    from defusedxml import ElementTree
    from supervision import DetectionDataset

    if [*map(int, supervision.__version__.split('.')[:2])] < [0, 31]:
        raise ImportError(f'version {supervision.__version__} is installed')
except ImportError as error:
    raise SystemExit(
        f'Annotations are read by supervision 0.31 ({error}). Type\n'
        "    pip install 'supervision>=0.31.2,<0.32'\n"
        'It needs Python 3.10. If yours is older, convert in another environment: the files that '
        'this command writes are read in all.'
    ) from error

SUFFIXES = dict(yolo='.txt', voc='.xml', labelme='.json', createml='.json')
# Folders whose names do not tell pictures apart: labels/1.txt belongs to images/1.jpg.
ALIKE = ('annotations', 'images', 'jpegimages', 'labels')
PART = re.compile('(train|val|test)(ing|id|idation)?[0-9]*', re.IGNORECASE)
ORDER = ('train', 'val', 'test')
SHOWN = 10  # files that cannot be read, or warnings
Place = tuple[str, ...]


class Source(NamedTuple):
    """A picture and its annotations: a file, and for CreateML an entry in the file."""

    picture: Path
    name: str  # below images/
    file: Path | None
    entry: Any


def place_of(path: PureWindowsPath | Path) -> Place:
    """Return what the path of a picture and that of its annotations have in common."""
    folders = (part for part in path.parts[:-1] if part.lower() not in ALIKE)
    return *folders, path.stem


def find_annotations(root: Path, kind: str) -> list[tuple[Place, Path, Any]]:
    """List the files, or for CreateML the entries of files, with the places of their pictures."""
    annotations: list[tuple[Place, Path, Any]] = []
    for file in sorted(walk(root)):
        if file.suffix != SUFFIXES[kind]:
            continue
        inside = file.relative_to(root)
        if kind != 'createml':
            annotations.append((place_of(inside), file, None))
            continue
        try:
            entries = json.loads(file.read_text(encoding='utf-8'))
        except ValueError as error:  # it does not name the file
            raise ValueError(f'{file} is not JSON in UTF-8: {error}') from error
        if not (isinstance(entries, list) and all(map(_has_image, entries))):
            raise ValueError(f'{file} is not of CreateML: it is no list of pictures')
        for entry in entries:
            path = inside.parent / PureWindowsPath(entry['image']).as_posix()
            annotations.append((place_of(path), file, entry))
    return annotations


def _has_image(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get('image'), str)


def find_sources(root: Path, kind: str) -> tuple[list[Source], list[str]]:
    """Find pictures and their annotations, and say which files are left out."""
    pictures: dict[Place, Path] = {}
    for path in list_files(root, [suffix for suffix in PICTURES if suffix != '.npy']):
        other = pictures.setdefault(place_of(path.relative_to(root)), path)
        if other != path:
            raise ValueError(f'{other} and {path} would share their annotations: rename one')
    found: dict[Place, tuple[Path, Any]] = {}
    strays: list[tuple[Path, Any]] = []
    for place, file, entry in find_annotations(root, kind):
        if place in found and place in pictures:
            raise ValueError(f'{pictures[place]} has annotations in {found[place][0]} and {file}')
        if place in pictures:
            found[place] = file, entry
        else:
            strays.append((file, entry))
    if not found:
        raise ValueError(
            f'none of {len(pictures)} pictures in {root} has a {SUFFIXES[kind]} file of its name, '
            'beside it or in a folder called labels or annotations'
        )
    used = {file.parent for file, _ in found.values()}
    lost = [
        f'{entry["image"]!r} of {file}' if entry else str(file)
        for file, entry in strays
        if entry or (file.parent in used and file.name != 'classes.txt')
    ]
    used = {pictures[place].parent for place in found}
    sources, empty, unknown = [], [], []
    for place, path in pictures.items():
        name = '/'.join((*place[:-1], path.name))
        if place in found:
            sources.append(Source(path, name, *found[place]))
        elif kind in ('yolo', 'voc') and path.parent in used:
            sources.append(Source(path, name, None, None))
            empty.append(path)
        else:
            unknown.append(path)
    sentences = {
        f'pictures without a {SUFFIXES[kind]} file, taken as pictures without objects': empty,
        'pictures without annotations, left out': unknown,
        'annotations without pictures, left out': lost,
    }
    return sources, [f'{text}: {len(n)}, such as {n[0]}' for text, n in sentences.items() if n]


def read_names(root: Path) -> tuple[list[str], dict[str, Any]]:
    """Read the names of YOLO's classes, and what supervision reads of data.yaml."""
    for path in sorted((*root.glob('*.yaml'), *root.glob('*.yml'))):
        with path.open(encoding='utf-8') as stream:  # so that errors name the file
            content = yaml.safe_load(stream)
        names = content.get('names') if isinstance(content, dict) else None
        if isinstance(names, dict) and all(str(number).isdigit() for number in names):
            # supervision renumbers classes if numbers are missing.
            numbered = {int(number): name for number, name in names.items()}
            names = [numbered.get(n, f'class {n}') for n in range(max(numbered) + 1)]
            known = [*numbered.values()]
        else:
            known = names
        if isinstance(names, list):
            keys = ('kpt_shape',) if 'kpt_shape' in content else ()
            return [*map(str, known)], dict({k: content[k] for k in keys}, names=names)
    files = [file for file in walk(root) if file.name == 'classes.txt']
    files += root.glob('*.names')
    lists = [file.read_text(encoding='utf-8-sig').split('\n') for file in files]
    lists = [[line.strip() for line in lines if line.strip()] for lines in lists]
    if not lists:
        raise ValueError(
            f'the names of the classes are missing: {root} needs data.yaml with names, or '
            'classes.txt with a name in each line'
        )
    if any(names != lists[0] for names in lists):
        raise ValueError(f'the files {", ".join(map(str, files))} differ')
    return lists[0], dict(names=lists[0])


def read_size(source: Source, kind: str) -> tuple[int, int] | None:
    """Read the width and height that the annotations are for; None if they do not say it."""
    if kind == 'labelme':
        content = json.loads(source.file.read_text(encoding='utf-8'))
        sides = content.get('imageWidth'), content.get('imageHeight')
    elif kind == 'voc':
        root = ElementTree.parse(source.file).getroot()
        sides = root.findtext('size/width'), root.findtext('size/height')
    else:
        return None
    width, height = (int(float(side or 0)) for side in sides)
    return (width, height) if width and height else None


def read_source(source: Source, kind: str, yolo: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read one picture's annotations into a COCO file's content.

    supervision gets one picture at a time, since it holds a mask for each object, 12 MB in a
    photograph of 12 megapixels, and since its errors do not name the file.
    """
    picture, file = folder / 'picture.jpg', folder / f'picture{SUFFIXES[kind]}'
    original = source.picture.resolve()
    if kind in ('yolo', 'voc'):
        try:
            picture.symlink_to(original)
        except OSError:  # Windows lets only some users make links
            shutil.copyfile(original, picture)
        if source.file:
            shutil.copyfile(source.file, file)
    if kind == 'yolo':
        (folder / 'data.yaml').write_text(yaml.safe_dump(yolo), encoding='utf-8')
        data = DetectionDataset.from_yolo(str(folder), str(folder), str(folder / 'data.yaml'))
    elif kind == 'voc':
        data = DetectionDataset.from_pascal_voc(str(folder), str(folder))
    elif kind == 'labelme':
        content = json.loads(source.file.read_text(encoding='utf-8'))
        content = dict(content, imagePath=original.name, imageData=None)
        file.write_text(json.dumps(content), encoding='utf-8')
        data = DetectionDataset.from_labelme(str(original.parent), str(folder))
    else:
        entry = dict(source.entry, image=original.name)
        file.write_text(json.dumps([entry]), encoding='utf-8')
        data = DetectionDataset.from_createml(str(original.parent), str(file))
    for objects in data.annotations.values():  # it marks masks in several parts as crowds
        objects.data['iscrowd'] = np.zeros(len(objects), int)
    data.as_coco(annotations_path=str(folder / 'coco.json'))
    content = json.loads((folder / 'coco.json').read_text(encoding='utf-8'))
    (image,) = content['images']
    size = read_size(source, kind) if source.file else None
    if size not in (None, (image['width'], image['height'])):
        raise ValueError(
            f'it is for {size[0]}x{size[1]} pixels, and the picture has '
            f'{image["width"]}x{image["height"]} (as its EXIF data turn it)'
        )
    if kind == 'voc' and source.file:  # the toolboxes ignore difficult objects, as COCO's crowds
        objects = ElementTree.parse(source.file).getroot().findall('object')
        for item, element in zip(content['annotations'], objects, strict=True):
            item['iscrowd'] = int((element.findtext('difficult') or '').strip() == '1')
    return content


def read_sources(sources: list[Source], kind: str, root: Path) -> tuple[list[str], dict[str, Any]]:
    """Read all annotations: the names of the classes, and a picture and its objects for each name.

    Raises:
        ValueError: If some cannot be read. It names up to ten.
    """
    classes, yolo = read_names(root) if kind == 'yolo' else (None, {})
    parts, faults, notes = {}, [], []
    for source in track_iter_progress(sources):
        with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('ignore')
            warnings.simplefilter('always', UserWarning)
            try:
                content = read_source(source, kind, yolo, Path(folder))
                names = {entry['id']: entry['name'] for entry in content['categories']}
                objects = [
                    dict(item, category=names[item['category_id']])
                    for item in content['annotations']
                ]
                for item in objects:
                    if classes is not None and item['category'] not in classes:
                        raise ValueError(f'{item["category"]} has no name')
                image = content['images'][0]
                image = dict(file_name=source.name, width=image['width'], height=image['height'])
                parts[source.name] = image, objects
            except Exception as error:  # whatever the file makes readers of JSON and XML raise
                text = str(error).replace(f'{folder}/', '')
                text = text.replace('picture.jpg', str(source.picture))
                faults.append(f'{source.file or source.picture}: {type(error).__name__}: {text}')
        notes += [f'{source.file}: {warning.message}' for warning in caught]
    print()
    for note in notes[:SHOWN]:
        print(note)
    if len(notes) > SHOWN:
        print(f'and {len(notes) - SHOWN} more of these')
    if faults:
        more = f'\nand {len(faults) - SHOWN} more' if len(faults) > SHOWN else ''
        raise ValueError(
            f'{len(faults)} of {len(sources)} pictures cannot be read, and nothing is written:\n'
            + '\n'.join(faults[:SHOWN])
            + more
        )
    if classes is None:
        classes = sorted({item['category'] for _, objects in parts.values() for item in objects})
    repeated = find_repeated(classes)
    if repeated:
        raise ValueError(f'{repeated[0]!r} is the name of several classes')
    return classes, parts


def read_yolo_lists(sources: list[Source], root: Path) -> dict[str, str]:
    """Return the parts of sources by the folders and lists in data.yaml, and lists in the root.

    Their paths may begin elsewhere: the longest end of one that is in the root counts.
    """
    entries: dict[str, list[str]] = {part: [] for part in ORDER}
    for path in (*root.glob('*.yaml'), *root.glob('*.yml')):
        content = yaml.safe_load(path.read_text(encoding='utf-8'))
        for part in entries if isinstance(content, dict) else ():
            value = content.get(part)
            values = value if isinstance(value, list) else [value]
            entries[part] += [path for path in values if isinstance(path, str)]
    for file in root.glob('*.txt'):
        part = 'val' if file.stem == 'valid' else file.stem
        if part in entries and not entries[part]:
            entries[part].append(file.name)
    below: dict[Place, list[str]] = {}  # names of the sources in a folder, or of one picture
    for source in sources:
        path = source.picture.relative_to(root)
        for place in (path, *path.parents):
            below.setdefault(place.parts, []).append(source.name)
    named: dict[str, set[str]] = {part: set() for part in ORDER}
    for part, paths in entries.items():
        for path in paths:
            lines = [path]
            if path.endswith('.txt'):
                file = root / PureWindowsPath(path).name
                lines = file.read_text(encoding='utf-8').splitlines() if file.exists() else []
            for line in lines:
                parts = PureWindowsPath(line.strip()).parts
                ends = (below.get(parts[start:]) for start in range(len(parts)))
                named[part].update(next(filter(None, ends), ()))
    if named['val'] == named['train']:  # there is no other folder
        named['val'] = set()
    return {name: part for part, names in named.items() for name in names}


def read_voc_lists(sources: list[Source], root: Path) -> dict[str, str]:
    """Return the parts of sources that Pascal VOC's lists name; the root may hold several years.

    Raises:
        ValueError: If there are lists, and they name none of the sources.
    """
    # A list names pictures without a folder and an ending, below the folder that has ImageSets.
    stems: dict[Path, list[str]] = {}
    for source in sources:
        path = Path(source.name)
        for folder in path.parents:
            stems.setdefault(folder / path.stem, []).append(source.name)
    files = [file for file in walk(root) if file.parent.match('ImageSets/Main')]
    files = [file for file in files if file.suffix == '.txt' and file.stem in ORDER]
    chosen = {}
    for file in files:
        folder = file.parents[2].relative_to(root)
        for line in filter(str.strip, file.read_text(encoding='utf-8').splitlines()):
            whole, first = folder / line.strip(), folder / line.split()[0]  # names may have spaces
            for name in stems.get(whole) or stems.get(first) or ():
                chosen[name] = file.stem
    if files and not chosen:
        raise ValueError(f'{files[0]} names none of the pictures in {root}')
    return chosen


def split(
    sources: list[Source], root: Path, kind: str, share: float | None, seed: int | None
) -> tuple[dict[str, list[Source]], list[str]]:
    """Split the sources as their folders or lists say, or else at random; say what was done."""
    lists = dict(voc=read_voc_lists, yolo=read_yolo_lists).get(kind)
    chosen = lists(sources, root) if lists else {}
    parts: dict[str, list[Source]] = {}
    for source in sources:
        folders = source.name.split('/')[:-1]
        found = [*map(PART.fullmatch, folders)]
        if any(found[1:]) and not found[0]:
            raise ValueError(
                f'{source.picture} is in a folder for a part below another folder: give the '
                'folder that holds train as SOURCE'
            )
        part = found[0][1].lower() if any(found) else chosen.get(source.name)
        parts.setdefault(part or '', []).append(source)
    if {*parts} == {''}:
        parts = dict(train=parts[''])
    notes = []
    beside = parts.pop('', [])
    if beside:
        notes.append(
            f'pictures that are in none of {", ".join(parts)}, left out: {len(beside)}, such as '
            f'{beside[0].picture}'
        )
    if 'train' not in parts:
        raise ValueError(f'{root} has pictures for {" and ".join(parts)}, and none for train')
    if 'val' in parts:
        if (share, seed) != (None, None):
            raise ValueError(f'{root} has pictures for val already: leave --val and --seed out')
        return parts, notes
    share, seed = 0.2 if share is None else share, seed or 0
    train = parts['train']
    if not (0 < share < 1 and len(train) > 1):
        raise ValueError(f'cannot take {share} of {len(train)} pictures for validation')
    number = min(max(round(share * len(train)), 1), len(train) - 1)
    drawn = {*random.Random(seed).sample(range(len(train)), number)}
    parts['val'] = [source for index, source in enumerate(train) if index in drawn]
    parts['train'] = [source for index, source in enumerate(train) if index not in drawn]
    notes.append(f'val has {number} of {len(train)} pictures, drawn at random (seed {seed})')
    return parts, notes


def write_part(
    path: Path, part: list[Source], classes: list[str], read: dict[str, Any], masks: bool
) -> Counter[str]:
    """Write a COCO file, and count the objects of each class.

    With ``masks``, objects without one get that of their box, so that Mask R-CNN can be trained.

    Raises:
        ValueError: If most boxes reach beyond their pictures.
    """
    numbers = {name: number for number, name in enumerate(classes, 1)}
    images, annotations, rows = [], [], []
    for source in part:
        image, objects = read[source.name]
        images.append(dict(image, id=len(images) + 1))
        for item in objects:
            x, y, width, height = item['bbox']
            rows.append((x, y, width, height, image['width'], image['height']))
            corners = [x, y, x + width, y, x + width, y + height, x, y + height]
            own = dict(id=len(annotations) + 1, image_id=len(images))
            own |= dict(category_id=numbers[item['category']], bbox=item['bbox'])
            own |= dict(area=item['area'], iscrowd=item['iscrowd'])
            if masks:
                own['segmentation'] = item['segmentation'] or [corners]
            annotations.append(own)
    for fault in find_other_boxes(path.name, rows) if rows else ():
        raise ValueError(fault)
    categories = [dict(id=number, name=name) for name, number in numbers.items()]
    content = dict(images=images, annotations=annotations, categories=categories)
    path.write_text(json.dumps(content), encoding='utf-8')
    return Counter(item['category'] for source in part for item in read[source.name][1])


def write_config(path: Path, task: str, lines: list[str]) -> None:
    """Write a copy of a config in configs/your_data, with other values of its variables."""
    shipped = shipped_config(f'your_data/{task}').read_text(encoding='utf-8').splitlines()
    changed = {line.split(' = ')[0]: line for line in lines}
    written = (changed.pop(line.split(' = ')[0], line) for line in shipped)
    path.write_text('\n'.join(written) + '\n', encoding='utf-8')


def convert(
    kind: str,
    root: Path,
    out: Path,
    share: float | None = None,
    seed: int | None = None,
    config: Path | None = None,
) -> None:
    """Convert a folder's annotations, and print what was written and what comes next.

    Args:
        kind: yolo, voc, labelme or createml.
        root: The folder of pictures and annotations.
        out: The folder to write, which must be new or empty.
        share: Of the pictures, for validation, if no folder or list says which; by default 0.2.
        seed: Of the random choice; by default 0.
        config: A file to write, with the config for these data.

    Raises:
        ValueError: If something cannot be read; nothing is written then.
        OSError: If a file cannot be read, ``out`` cannot be written or is not empty, or ``config``
            exists.
    """
    if not root.is_dir():
        raise NotADirectoryError(f'{root} is no folder')
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f'{out} exists: remove it first, or give another folder')
    if config and config.exists():
        raise FileExistsError(f'{config} exists: remove it first, or give another name')
    if root.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f'{out} is in {root}, where its pictures would be found another time')
    check_writable(out)
    if config:
        check_writable_file(config)
    sources, notes = find_sources(root, kind)
    parts, more = split(sources, root, kind, share, seed)
    classes, read = read_sources([s for part in parts.values() for s in part], kind, root)
    objects = [item for _, items in read.values() for item in items]
    boxes = sum(not item['segmentation'] for item in objects)
    masks = boxes < len(objects)
    if masks and boxes:
        more.append(f'{boxes} of {len(objects)} objects have only a box, which is their mask')
    with moved_into_place(out) as temporary:
        temporary.mkdir()
        counts = {
            name: write_part(temporary / f'{name}.json', part, classes, read, masks)
            for name, part in sorted(parts.items(), key=lambda item: ORDER.index(item[0]))
        }
        for source in (source for part in parts.values() for source in part):
            target = temporary / 'images' / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.picture, target)
    for note in notes + more:
        print(note)
    width = max(map(len, (*classes, 'pictures')))
    rows = {'': counts, 'pictures': {name: len(parts[name]) for name in counts}}
    rows |= {name: {part: counts[part][name] for part in counts} for name in classes}
    for name, row in rows.items():
        print(f'{name:{width}}', *(f'{row[part] if name else part:>7}' for part in counts))
    task = 'instances' if masks else 'detector'
    lines = [f'data_root = {out.as_posix()!r}', f'classes = {classes}']
    if 'test' in parts:
        lines.append("test = dict(val, ann_file='test.json')  # in place of test = val")
    if config:
        write_config(config, task, lines)
        print(f'\nWritten to {out}, with {config}. Next:\n\n    mim train mmdet {config}')
        return
    print(f'\nWritten to {out}. These lines belong in a copy of configs/your_data/{task}.py:\n')
    print(*lines, sep='\n')


def main() -> None:
    """Convert what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('kind', choices=SUFFIXES, help='format of the annotations')
    parser.add_argument('source', type=Path, metavar='SOURCE', help='folder of pictures')
    parser.add_argument('out', type=Path, metavar='OUT', help='new folder, such as data/mine')
    text = "share of the pictures for validation, if SOURCE's folders do not say which"
    parser.add_argument('--val', type=float, help=f'{text} (default: 0.2)')
    parser.add_argument('--seed', type=int, help='of the random choice (default: 0)')
    text = 'also write a config with these data and classes, such as mine.py'
    parser.add_argument('--config', type=Path, help=text)
    arguments = parser.parse_args()
    try:
        convert(
            arguments.kind,
            arguments.source,
            arguments.out,
            arguments.val,
            arguments.seed,
            arguments.config,
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))


if __name__ == '__main__':
    main()
