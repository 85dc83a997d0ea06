"""Run exported files on this machine, and compare their outputs with those that belong to them.

`python engines.py FOLDER [ENGINE ...]` needs the runtimes and mmcare_runtime, no PyTorch. In the
folder, which test_arm.py writes, ``jobs.json`` names files with engines and limits, ``images.npz``
has images (1, C, H, W), and ``FILE.npz`` the outputs that FILE should give for them.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np


def open_ncnn(file):
    """Open a folder as an application does that sets no options."""
    import ncnn

    net = ncnn.Net()
    assert not net.load_param(f'{file}/model.ncnn.param')
    assert not net.load_model(f'{file}/model.ncnn.bin')

    def run(image):
        extractor = net.create_extractor()
        extractor.input('image', ncnn.Mat(image[0]).clone())
        outputs = json.loads(Path(file, 'mmcare.json').read_text())['outputs']
        return [np.array(extractor.extract(output['name'])[1])[None] for output in outputs]

    return run


def open_onnx(file):
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    return lambda image: session.run(None, {session.get_inputs()[0].name: image})


def open_litert(file, gpu=False, **options):
    """Open a file in LiteRT, which must compute all of it on the CPU, or on the GPU."""
    from ai_edge_litert import compiled_model as lib

    if gpu:
        accelerator = lib.HardwareAccelerator.GPU
        options = lib.Options(accelerator, gpu_options=lib.GpuOptions(**options))
    else:
        options = lib.Options(cpu_options=lib.CpuOptions(num_threads=1, **options))
    model = lib.CompiledModel.from_file(str(file), options=options)
    assert not gpu or model.is_fully_accelerated()
    (signature,) = model.get_signature_list()
    details = model.get_output_tensor_details(signature)
    shapes = [details[name]['shape'] for name in model.get_signature_by_index(0)['outputs']]

    def read(buffer, shape):
        return buffer.read(int(np.prod(shape)), np.float32).reshape(shape)

    def run(image, attempts=10):
        (source,), outputs = model.create_input_buffers(0), model.create_output_buffers(0)
        source.write(np.ascontiguousarray(image.transpose(0, 2, 3, 1)))
        model.run_by_index(0, [source], outputs)
        try:
            found = list(map(read, outputs, shapes))
        except RuntimeError:  # LiteRT waits some seconds, and a GPU in software compiles longer
            if not gpu or not attempts:
                raise
            time.sleep(5)
            return run(image, attempts - 1)
        return [one.transpose(0, 3, 1, 2) if one.ndim == 4 else one for one in found]

    return run


def open_runtime(file):
    """Open a decoded detector as an application does that finds boxes in pictures."""
    from mmcare_runtime import open_exported

    model = open_exported(file)

    def run(image):
        pixels = (128 + 48 * image[0]).clip(0, 255).round().astype(np.uint8).transpose(1, 2, 0)
        found = model.predict(np.ascontiguousarray(pixels), score=0.3)
        # Those with equal scores change places.
        order = np.argsort(found['boxes'] @ [1, 3, 7, 11] + found['labels'] / 2)
        return [found[name][order] for name in ('boxes', 'scores', 'labels')]

    return run


ENGINES = {
    'onnx, predict': open_runtime,
    'ncnn': open_ncnn,
    'onnx': open_onnx,
    'litert': open_litert,
    'litert, float16': partial(open_litert, xnnpack_flags=4),
}


def main(folder, *engines):
    """Print the largest deviation for each image, as a share of an output's largest magnitude."""
    images, above = np.load(folder / 'images.npz'), 0
    for job in json.loads((folder / 'jobs.json').read_text()):
        if job['engine'] not in (engines or ENGINES):
            continue
        run = ENGINES[job['engine']](str(folder / job['file']))
        expected = np.load(folder / f'{job["file"]}.npz')
        for name in images:
            pairs = [(expected[f'{name}{i}'], one) for i, one in enumerate(run(images[name]))]
            shares = [np.abs(a - b).max() / np.abs(a).max() for a, b in pairs]
            above += not np.max(shares) <= job['limit']  # not max(): it would pass over a NaN
            print(*job.values(), name, *(f'{share:.1e}' for share in shares), flush=True)
    return above


if __name__ == '__main__':
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
