"""The programs in projects/cpp find what ``predict`` finds.

They are compiled where cmake, Debian's libopencv-dev and nlohmann-json3-dev are, and the variable
``ONNXRUNTIME`` or ``NCNN`` names the folder of an engine, with include/ and lib/.
"""

import os
import shutil

import cv2
import numpy as np
import pytest
from helpers import ROOT, run
from runtime_helpers import SHAPE, describe, outputs_of, write_onnx

from mmcare_runtime import open_exported

ENGINES = {'onnxruntime': 'ONNXRUNTIME', 'ncnn': 'NCNN'}


@pytest.fixture(scope='module')
def programs(tmp_path_factory):
    """Compile what can be compiled; return the folder."""
    folders = {name: os.environ.get(variable, '') for name, variable in ENGINES.items()}
    if not shutil.which('cmake') or not any(folders.values()):
        pytest.skip('no cmake, or no folder of an engine is named')
    folder = tmp_path_factory.mktemp('build')
    options = f'-DONNXRUNTIME={folders["onnxruntime"]}', f'-DCMAKE_PREFIX_PATH={folders["ncnn"]}'
    if run('cmake', ROOT / 'projects/cpp', *options, cwd=folder, check=False).returncode:
        pytest.skip('no OpenCV or no nlohmann_json')
    run('cmake', '--build', folder)
    return folder


def write_candidates(path, description):
    """Write a folder of ncnn whose boxes and scores do not depend on the image."""
    import json

    boxes, scores = outputs_of(description)
    path.mkdir()
    lines = ['7767517', '3 3', f'Input in 0 1 image 0={SHAPE[1]} 1={SHAPE[0]} 2=3']
    for name, values in (('boxes', boxes), ('scores', scores)):
        lines.append(f'MemoryData {name} 0 1 {name} 0={values.shape[1]} 1={values.shape[0]}')
    path.joinpath('model.ncnn.param').write_text('\n'.join(lines) + '\n')
    path.joinpath('model.ncnn.bin').write_bytes(boxes.tobytes() + scores.tobytes())
    path.joinpath('mmcare.json').write_text(json.dumps(description))
    return path


@pytest.mark.parametrize('letterbox', ['top-left', 'center'])
@pytest.mark.parametrize('engine', ENGINES)
def test_as_predict(engine, letterbox, programs, tmp_path):
    program = programs / f'{engine}_detector'
    if not program.exists():
        pytest.skip(f'{engine} is not here')
    if engine == 'ncnn':
        pytest.importorskip('ncnn')
        about = describe('candidates')
        about['inputs'][0].update(dtype='float32', kind='tensor', letterbox=letterbox)
        about['inputs'][0].update(mean=[100.0] * 3, std=[50.0] * 3, padding=[0.0] * 3)
        file = write_candidates(tmp_path / 'mine.ncnn', about)
    else:
        about = describe('boxes')
        about['inputs'][0]['letterbox'] = letterbox
        file = write_onnx(tmp_path / 'mine.onnx', about)
    picture = tmp_path / 'mine.png'
    cv2.imwrite(str(picture), np.random.default_rng(0).integers(0, 256, (50, 90, 3), np.uint8))
    found = open_exported(file).predict(picture, 0.2)
    rows = [line.split() for line in run(program, file, picture, '0.2').stdout.splitlines()]
    assert len(rows) == len(found['boxes']) > 0
    numbers = np.array([row[:5] for row in rows], float)
    np.testing.assert_allclose(numbers[:, :4], found['boxes'], atol=2e-3)
    np.testing.assert_allclose(numbers[:, 4], found['scores'], atol=1e-4)
    assert [row[5].strip('"') for row in rows] == [found['names'][i] for i in found['labels']]
    assert run(program, file, tmp_path / 'none.png', check=False).returncode == 2
