"""Files are opened by one engine without PyTorch, and refused before anything is allocated."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from helpers import ROOT
from runtime_helpers import SHAPE, TASKS, describe, outputs_of, write_ncnn, write_onnx

from mmcare_runtime import Model, open_exported
from mmcare_runtime.engines.executorch import check_header
from mmcare_runtime.verify import NO_HASH, check_package, write_hash

pytest.importorskip('onnxruntime')

FOREIGN = ('torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'mmcare')
PIXELS = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)
ALONE = """
import sys, numpy as np
sys.modules.update(dict.fromkeys({foreign!r}))  # importing them is an error
import mmcare_runtime, mmcare_runtime.__main__, mmcare_runtime.evaluate
import mmcare_runtime.description, mmcare_runtime.files  # their names in 1.0
engines = ('onnxruntime', 'openvino', 'ai_edge_litert', 'ncnn', 'executorch', 'coremltools')
assert not {{*engines}} & {{*sys.modules}}
for file in sys.argv[1:]:
    print(*mmcare_runtime.open_exported(file).predict(np.zeros((20, 30, 3), np.uint8)))
"""


@pytest.mark.parametrize('task', TASKS)
def test_each_task(task, tmp_path):
    """A file gives what a model with these outputs gives, from pixels and from a picture."""
    about = describe(task)
    model = open_exported(write_onnx(tmp_path / 'mine.onnx', about), threads=2)
    assert model.input_shape == (1, 3, *SHAPE) and model.description == about
    wanted = Model(lambda _: outputs_of(about), (1, 3, *SHAPE), about).predict(PIXELS)
    cv2.imwrite(str(tmp_path / 'mine.png'), PIXELS)
    for picture in (PIXELS, tmp_path / 'mine.png', str(tmp_path / 'mine.png')):
        found = model.predict(picture)
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, wanted[name])


def test_nothing_of_the_training_environment(tmp_path):
    """A picture is predicted where torch, the toolboxes and mmcare cannot be imported."""
    files = [write_onnx(tmp_path / f'{task}.onnx', describe(task)) for task in TASKS]
    command = [sys.executable, '-c', ALONE.format(foreign=FOREIGN), *files]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    assert len(done.stdout.splitlines()) == len(files)


def test_files_and_threads(tmp_path):
    """Two files in two threads, and one file in two."""
    tasks = ('segmentor', 'boxes')
    models = [open_exported(write_onnx(tmp_path / f'{t}.onnx', describe(t)), 2) for t in tasks]
    wanted = [model.predict(PIXELS) for model in models]
    jobs = [0, 1, 0, 0, 1, 1] * 5
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda index: models[index].predict(PIXELS), jobs)
        for index, found in zip(jobs, results, strict=True):
            for name, value in found.items():
                np.testing.assert_array_equal(value, wanted[index][name])


@pytest.mark.parametrize('suffix', ['.onnx', '.ncnn'])
@pytest.mark.parametrize('place', ['weights', 'description', 'hash'])
def test_a_changed_byte(tmp_path, suffix, place):
    """A description has the hash of the file's bytes, which is compared before an engine runs."""
    if suffix == '.ncnn':
        pytest.importorskip('ncnn')
        path = write_ncnn(tmp_path / 'mine.ncnn', dict(ncnn_description(), file_sha256=NO_HASH))
        (path / 'model.ncnn.bin').write_bytes(bytes(9))
        file = path / ('model.ncnn.bin' if place == 'weights' else 'mmcare.json')
    else:
        path = write_onnx(tmp_path / 'mine.onnx', describe('boxes', file_sha256=NO_HASH))
        file = path
    digest = write_hash(path)
    assert open_exported(path).description['file_sha256'] == digest == write_hash(path)
    data = bytearray(file.read_bytes())
    places = dict(description=data.find(b'"cat"') + 1, hash=data.find(digest.encode()))
    data[places.get(place, len(data) // 2)] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf'mine{suffix} is damaged, or .*--no-verify'):
        open_exported(path)
    if place != 'weights':
        assert open_exported(path, verify=False).description['file_sha256']
        write_hash(path)
        open_exported(path)


def test_what_systems_add_to_folders(tmp_path):
    """Another name, and files like .DS_Store, change nothing; another file does."""
    pytest.importorskip('ncnn')
    path = write_ncnn(tmp_path / 'mine.ncnn', dict(ncnn_description(), file_sha256=NO_HASH))
    write_hash(path)
    path = path.rename(tmp_path / 'other.ncnn')
    (path / '.DS_Store').touch()
    open_exported(path)
    (path / 'more').touch()
    with pytest.raises(ValueError, match=r'other.ncnn is damaged'):
        open_exported(path)


def test_openvino(tmp_path):
    pytest.importorskip('openvino')
    path = write_onnx(tmp_path / 'mine.onnx', describe('boxes'))
    found = open_exported(path, engine='openvino').predict(PIXELS)
    np.testing.assert_allclose(found['boxes'], open_exported(path).predict(PIXELS)['boxes'])


def test_images_are_checked(tmp_path):
    model = open_exported(write_onnx(tmp_path / 'mine.onnx', describe('boxes')))
    with pytest.raises(ValueError, match=r'takes \[1, 3, 32, 48\], got \[1, 3, 48, 32\]'):
        model.run(np.zeros((1, 3, *SHAPE[::-1])))
    model = Model(lambda _: outputs_of(describe('classifier')), (1, 3, *SHAPE), describe('boxes'))
    with pytest.raises(ValueError, match='gives 1 outputs'):
        model.predict(PIXELS)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(threads=0), 'threads are'),
        (dict(engine='ncnn'), 'opened by onnxruntime or openvino, not ncnn'),
        (dict(providers=['MyExecutionProvider']), 'has no MyExecutionProvider; available: '),
        (dict(providers=[]), 'ONNX Runtime needs a provider'),
        (dict(float16=True), 'has no float16'),
        (dict(engine='openvino', providers=['CPU']), 'OpenVINO has no providers'),
    ],
)
def test_options(options, words, tmp_path):
    path = write_onnx(tmp_path / 'mine.onnx', describe('boxes'))
    with pytest.raises(ValueError, match=words):
        open_exported(path, **options)


def test_descriptions_are_those_of_the_file(tmp_path):
    about = describe('segmentor')
    other = describe('segmentor', shape=[8000, 8000])
    other['inputs'][0]['shape'] = [1, 3, 8000, 8000]
    path = tmp_path / 'mine.onnx'
    write_onnx(path, about)
    import onnx

    for changed, words in [
        (other, r'says that image is \[1, 3, 8000, 8000\], the file \[1, 3, 32, 48\]'),
        (describe('segmentor', outputs=[dict(about['outputs'][0], name='x')]), 'names x'),
        (None, 'its description is None'),
        ([], r'its description is \[\]'),
    ]:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, dict(mmcare=json.dumps(changed)))
        onnx.save(model, path)
        with pytest.raises(ValueError, match=f'mine.onnx: .*{words}'):
            open_exported(path)


def test_files_without_a_description_only_run(tmp_path):
    import onnx

    path = write_onnx(tmp_path / 'mine.onnx', describe('classifier'))
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    model = open_exported(path)
    assert model.description == {} and model.input_kind == 'tensor'
    assert [x.shape for x in model.run(np.zeros((1, 3, *SHAPE)))] == [(1, 3)]
    with pytest.raises(ValueError, match='does not say what it is'):
        model.predict(PIXELS)


@pytest.mark.parametrize('suffix', ['.onnx', '.tflite', '.pte', '.ncnn', '.mlpackage'])
@pytest.mark.parametrize('contents', [b'', b'text', bytes(range(256)) * 9])
def test_damaged_files(suffix, contents, tmp_path):
    package = {'.tflite': 'ai_edge_litert', '.pte': 'executorch', '.ncnn': 'ncnn'}.get(suffix)
    if package:
        pytest.importorskip(package)
    path = tmp_path / f'mine{suffix}'
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=f'mine{suffix} '):
        open_exported(path)


def test_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'mine.onnx does not exist'):
        open_exported(tmp_path / 'mine.onnx')
    with pytest.raises(ValueError, match=r'mine.pt is not .onnx, .tflite'):
        open_exported(tmp_path / 'mine.pt')
    (tmp_path / 'mine.onnx').symlink_to('/dev/zero')
    os.mkfifo(tmp_path / 'mine.tflite')
    for name in ('mine.onnx', 'mine.tflite'):
        with pytest.raises(ValueError, match=f'{name} is neither a file nor a folder'):
            open_exported(tmp_path / name)


def ncnn_description():
    about = describe('segmentor')
    about['inputs'][0].update(dtype='float32', padding=[0.0] * 3)
    about['outputs'][0].update(shape=[1, 3, *SHAPE])
    return about


def test_ncnn(tmp_path):
    pytest.importorskip('ncnn')
    path = write_ncnn(tmp_path / 'mine.ncnn', ncnn_description())
    (values,) = open_exported(path).run(np.arange(3 * 32 * 48.0).reshape(1, 3, *SHAPE))
    np.testing.assert_array_equal(values.ravel(), np.arange(3 * 32 * 48))
    assert open_exported(path).predict(PIXELS)['labels'].shape == PIXELS.shape[:2]


@pytest.mark.parametrize(
    ('old', 'new', 'words'),
    [
        ('relu 1 1 image logits', 'relu 1 1 image other', 'its network has no logits'),
        ('1 image 0=', '1 picture 0=', 'is damaged'),
        ('0=48 1=32', '0=32 1=48', r'says that image is \[1, 3, 32, 48\], the file'),
        ('0=48', '', 'is damaged'),
        ('7767517', '7767516', 'of another format'),
        ('2 2', '2 9', 'is damaged'),
        ('relu 1 1', 'relu 9 9', 'is damaged'),
        ('relu 1 1', 'relu x 1', 'is damaged'),
    ],
)
def test_ncnn_would_crash(old, new, words, tmp_path):
    pytest.importorskip('ncnn')
    path = write_ncnn(tmp_path / 'mine.ncnn', ncnn_description())
    param = path / 'model.ncnn.param'
    assert old in param.read_text()
    param.write_text(param.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=words):
        open_exported(path)


@pytest.mark.parametrize(('converter', 'tries'), [(None, 1), ('pnnx 99990101', 1), ('2020', 0)])
def test_ncnn_crashes_on_files_of_other_versions(converter, tries, tmp_path, monkeypatch):
    """A child process crashes in place of this one; it imports the stand-in, this one does not."""
    ncnn = pytest.importorskip('ncnn')
    about = ncnn_description()
    about.update(dict(converter=converter) if converter else {})
    converter == '2020' and about.update(converter=f'pnnx {ncnn.__version__.rpartition(".")[2]}')
    path = write_ncnn(tmp_path / 'mine.ncnn', about)
    assert open_exported(path).predict(PIXELS)['labels'].shape == PIXELS.shape[:2]
    (tmp_path / 'ncnn.py').write_text('import os\n__version__ = ""\ndef Net():\n    os.abort()\n')
    monkeypatch.syspath_prepend(tmp_path)
    if tries:
        with pytest.raises(ValueError, match=r'mine.ncnn cannot be opened: ncnn 1.* crashes on it'):
            open_exported(path)
    else:
        open_exported(path)


def test_providers_that_do_not_start(tmp_path, monkeypatch):
    """ONNX Runtime has CUDA's provider, does not find its libraries, and takes the CPU."""
    import onnxruntime

    path = write_onnx(tmp_path / 'mine.onnx', describe('boxes'))
    names = ['CUDAExecutionProvider', 'CPUExecutionProvider']
    start = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, 'get_available_providers', lambda: names)
    monkeypatch.setattr(
        onnxruntime,
        'InferenceSession',
        lambda *arguments, providers: start(*arguments, providers=names[1:]),
    )
    open_exported(path, providers=names[1:])
    for providers in (names, names[:1], [('CUDAExecutionProvider', {}), *names[1:]]):
        with pytest.raises(ValueError, match='ONNX Runtime cannot start CUDAExecutionProvider'):
            open_exported(path, providers=providers)


@pytest.mark.parametrize('is_old', [True, False])
def test_engines_that_are_too_old(is_old, tmp_path, monkeypatch):
    """An engine that lacks a part is not called missing."""
    for name in [name for name in sys.modules if name.startswith('ai_edge_litert')]:
        monkeypatch.delitem(sys.modules, name)
    words = 'LiteRT is not installed: pip install ai-edge-litert'
    if is_old:
        (tmp_path / 'ai_edge_litert').mkdir()
        (tmp_path / 'ai_edge_litert/__init__.py').touch()
        (tmp_path / 'ai_edge_litert/interpreter.py').write_text('class Interpreter: pass')
        monkeypatch.syspath_prepend(tmp_path)
        words = 'LiteRT is too old, or incomplete .*OpResolverType.*: pip install --upgrade ai-edge'
    else:
        monkeypatch.setitem(sys.modules, 'ai_edge_litert', None)
    (tmp_path / 'mine.tflite').touch()
    with pytest.raises(ImportError, match=words):
        open_exported(tmp_path / 'mine.tflite')


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('task', TASKS)
def test_outputs_that_are_not_finite(task, value):
    """They would become class 0, a score that JSON does not know, or nothing."""
    about = describe(task)
    outputs = outputs_of(about)
    if outputs[-1].dtype != np.float32:
        pytest.skip('labels have no such values')
    outputs[-1].flat[2] = value
    model = Model(lambda _: outputs, (1, 3, *SHAPE), about)
    name = about['outputs'][-1]['name']
    with pytest.raises(ValueError, match=f'the file gives {name} with NaN or infinity'):
        model.predict(PIXELS)


@pytest.mark.parametrize('kind', ['link', 'fifo'])
def test_what_is_in_folders(kind, tmp_path):
    path = write_ncnn(tmp_path / 'mine.ncnn', ncnn_description())
    weights = path / 'model.ncnn.bin'
    weights.unlink()
    weights.symlink_to('/dev/zero') if kind == 'link' else os.mkfifo(weights)
    with pytest.raises(ValueError, match=r'model.ncnn.bin is neither a file nor a folder'):
        open_exported(path)


@pytest.mark.parametrize('name', ['../outside', '/etc/passwd', '..\\x', 'C:x', '', 3, 'missing'])
def test_packages_name_only_what_is_inside(name, tmp_path):
    package = tmp_path / 'mine.mlpackage'
    (package / 'Data').mkdir(parents=True)
    (package / 'outside').touch()
    (package / 'Data/inside').touch()
    for path in ('inside', name):
        manifest = dict(itemInfoEntries=dict(a=dict(path=path)))
        (package / 'Manifest.json').write_text(json.dumps(manifest))
        if path == 'inside':
            check_package(package)
    with pytest.raises(ValueError, match=r'Manifest.json names .* not in the package'):
        check_package(package)


def test_headers_of_programs(tmp_path):
    """ExecuTorch aborts the process on files that are no programs."""
    path, size = tmp_path / 'mine.pte', 200
    sizes = [number.to_bytes(8, 'little') for number in (size, 0)]
    head = (64).to_bytes(4, 'little') + b'ET12eh00' + (24).to_bytes(4, 'little') + b''.join(sizes)
    path.write_bytes(head + bytes(size - len(head)))
    check_header(path)
    for damaged in (head[:20], b'\xff\xff' + head[2:], head[:4] + b'XX' + head[6:], head):
        path.write_bytes(damaged + bytes(max(0, size - len(damaged) - 1)))
        with pytest.raises(ValueError, match=r'not a .pte file|damaged'):
            check_header(path)


def test_core_ml_keeps_some_rows(tmp_path, monkeypatch):
    """Core ML's NMS gives only the rows that it keeps. The package is a stand-in's."""
    about = describe('candidates', nms='pipeline')
    values = [value[:2] for value in outputs_of(about)]
    names = [tensor['name'] for tensor in about['outputs']]
    metadata = SimpleNamespace(userDefined=dict(mmcare=json.dumps(about)))
    description = SimpleNamespace(metadata=metadata, predictedProbabilitiesName='')
    description.input = [SimpleNamespace(type=SimpleNamespace(WhichOneof=lambda _: 'imageType'))]
    model = SimpleNamespace(get_spec=lambda: SimpleNamespace(description=description))
    model.predict = lambda _: dict(zip(names, values, strict=True))
    models = SimpleNamespace(MLModel=lambda _: model)
    monkeypatch.setitem(sys.modules, 'coremltools', SimpleNamespace(models=models))
    monkeypatch.setattr('platform.system', lambda: 'Darwin')
    package = tmp_path / 'mine.mlpackage'
    package.mkdir()
    Path(package, 'Manifest.json').write_text('{"itemInfoEntries": {}}')
    opened = open_exported(package)
    for array, value in zip(opened.run(np.zeros((1, 3, *SHAPE), np.uint8)), values, strict=True):
        assert len(array) == 9 and not array[2:].any()
        np.testing.assert_array_equal(array[:2], value)


def test_a_sentence_about_core_ml(tmp_path):
    if sys.platform == 'darwin':
        pytest.skip('Core ML is here')
    package = tmp_path / 'mine.mlpackage'
    package.mkdir()
    Path(package, 'Manifest.json').write_text('{"itemInfoEntries": {}}')
    with pytest.raises(ValueError, match=r'mmcare.export.open_exported'):
        open_exported(package)
