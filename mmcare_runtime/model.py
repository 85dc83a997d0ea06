"""An opened file, which itself says what it takes and returns."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Union

import numpy as np

from mmcare_runtime.engines import choose_engine
from mmcare_runtime.prepare import check_pixels, prepare, read_picture
from mmcare_runtime.results import read_logits, read_results
from mmcare_runtime.schema import check, fits, match, nchw
from mmcare_runtime.text import escape
from mmcare_runtime.tiles import TILES, slide_boxes, slide_labels
from mmcare_runtime.verify import check_file, check_hash

Run = Callable[[np.ndarray], List[np.ndarray]]
Picture = Union[str, 'os.PathLike[str]', np.ndarray]


class Model:
    """A file that an engine has opened, or anything that computes the same.

    Args:
        run: Maps an image (B, C, H, W) to the outputs in the file's order, maps as (B, C, h, w).
        input_shape: (B, C, H, W); a free height or width is given by its name.
        description: Of the file, checked here; empty if the file has none.
        file: For errors.
        timed: Whether the format's own engine computes the file, so that its time is meaningful.

    Raises:
        ValueError: If the description is invalid, or does not fit this input.
    """

    def __init__(
        self,
        run: Run,
        input_shape: Sequence[Any],
        description: Mapping[str, Any],
        file: object = 'the file',
        timed: bool = True,
    ) -> None:
        self._run, self.input_shape, self.file = run, tuple(input_shape), file
        self.description, self.timed = description, timed
        if description:
            check(description, file)
            match(description, file, self.input_shape, [None] * len(description['outputs']))

    @property
    def input_kind(self) -> str:
        """``'image'``, pixels from 0 to 255, or ``'tensor'``, normalized images."""
        return self.description.get('inputs', [{}])[0].get('kind', 'tensor')

    @property
    def has_boxes(self) -> bool:
        """Whether the file is of a detector."""
        kind = self.description.get('outputs', [{}])[0].get('kind')
        return kind == 'boxes' or self.description.get('decode') is not None

    @property
    def letterbox(self) -> str:
        """Where pictures are in the image: ``'top-left'`` or ``'center'``."""
        return self.description.get('inputs', [{}])[0].get('letterbox', 'top-left')

    def run(self, image: np.ndarray) -> list[np.ndarray]:
        """Compute the outputs for an image.

        Args:
            image: (B, C, H, W), float32, or uint8 values if the file takes pixels.

        Returns:
            The outputs in the file's order, maps as (B, C, h, w).

        Raises:
            ValueError: If the image does not have the shape that the file takes, or an output
                does not have the shape that the description says.
        """
        image = np.asarray(image)
        if not fits(self.input_shape, image.shape):
            raise ValueError(
                escape(f'{self.file} takes {[*self.input_shape]}, got {[*image.shape]}')
            )
        outputs = self._run(image)
        described = self.description.get('outputs')
        if described and len(described) != len(outputs):
            raise ValueError(escape(f'{self.file} gives {len(outputs)} outputs'))
        for tensor, output in zip(described or (), outputs):
            if not fits(nchw(tensor), output.shape):
                raise ValueError(
                    escape(
                        f'{self.file} gives {tensor["name"]} {[*output.shape]}, its description '
                        f'says {[*nchw(tensor)]}'
                    )
                )
        return outputs

    @property
    def tile(self) -> str:
        """How pictures are predicted by default: ``'slide'`` if that is the config's mode."""
        return 'slide' if self.description.get('slide') else 'whole'

    def read_picture(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Read a picture as training did, see :func:`mmcare_runtime.prepare.read_picture`."""
        image = self.description['inputs'][0]
        return read_picture(path, nchw(image)[1] or 3, image.get('loader'))

    def predict(
        self,
        picture: Picture | Sequence[Picture],
        score: float | None = None,
        tile: str | None = None,
    ) -> Any:
        """Prepare a picture as the file describes, run the file, and read its outputs.

        Args:
            picture: A path, or pixels as OpenCV reads them: (H, W, 3) in BGR, (H, W) or (H, W, 1);
                uint8, or what the description's ``loader`` says. Files with other than one or
                three channels take (H, W, C). Or a list of pictures, of which the file computes as
                many at once as it takes.
            score: Least score of boxes; None: the ``score_thr`` of the config alone.
            tile: ``'whole'``: the file sees the whole picture, made smaller if need be.
                ``'slide'``: it sees windows of its size. For segmentors, they are averaged, as
                in mmseg; boxes and masks are merged by NMS. None: as the config tests.

        Returns:
            For a detector, ``boxes`` (N, 4) as x1, y1, x2, y2 in pixels of the picture, ``scores``
            (N,) and ``labels`` (N,), the best first; of a two-stage detector with masks also
            ``masks`` (N, H, W) of bool. For a segmentor, ``labels`` (H, W). For a classifier,
            ``scores`` (K,) and ``labels`` (K,), the best first. ``names`` of the classes, or None.
            See :func:`mmcare_runtime.results.read_results`. For a list, a list of these.

        Raises:
            ValueError: If the file is not of a whole model, or does not describe what is needed,
                if ``picture`` is not a picture, or if an output has NaN or infinity.
            ImportError: If the test pipeline resizes by Pillow, which is not installed.
            FileNotFoundError: If there is no picture.
        """
        if not self.description:
            raise ValueError(
                escape(f'{self.file} does not say what it is, so that only its outputs are known')
            )
        if self.description.get('part') != 'model':
            raise ValueError('only files of whole models predict: export with --part model')
        tile = tile or self.tile
        if tile not in TILES:
            raise ValueError(f'tile is {" or ".join(TILES)}, not {tile!r}')
        is_list = isinstance(picture, (list, tuple))
        pictures: Any = picture if is_list else [picture]  # which may be something else
        if tile == 'slide':
            slide = self._choose_slide()
            results = [slide(self._read(x), score) for x in pictures]
            return results if is_list else results[0]
        batch = self.description['inputs'][0]['shape'][0]
        parts = [pictures[start : start + batch] for start in range(0, len(pictures), batch)]
        results = [result for part in parts for result in self._predict(part, score)]
        return results if is_list else results[0]

    def _read(self, picture: Picture) -> np.ndarray:
        """Return a picture's pixels (H, W, C)."""
        image = self.description['inputs'][0]
        bits = (image.get('loader') or dict(bits=8)).get('bits')
        is_path = isinstance(picture, (str, os.PathLike))
        pixels = self.read_picture(picture) if is_path else picture  # type: ignore[arg-type]
        return check_pixels(pixels, nchw(image)[1] or 3, bits)

    def _predict(
        self, pictures: Sequence[Picture], score: float | None, **changes: Any
    ) -> list[dict[str, Any]]:
        """Run the file for as many pictures as it takes, or fewer; changes are of the input."""
        image = dict(self.description['inputs'][0], **changes)
        pixels = [self._read(x) for x in pictures]
        prepared = [prepare(x, image, self.description['shape']) for x in pixels]
        outputs = self._run_batch([x for x, _ in prepared])
        predicted = []
        for row, (x, (_, place)) in enumerate(zip(pixels, prepared)):
            values = [output[row : row + 1] for output in outputs] if len(pixels) > 1 else outputs
            results = read_results(self.description, values, place, x.shape[:2], score)
            predicted.append(dict(results, names=self.description.get('classes')))
        return predicted

    def _run_batch(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the file for as many images (1, C, H, W) as it takes, or fewer."""
        batch = self.description['inputs'][0]['shape'][0]
        if batch == 1:
            return self._check_finite(self.run(images[0]))
        number = len(images)
        images = [*images, *images[-1:] * (batch - number)]
        return self._check_finite([x[:number] for x in self.run(np.concatenate(images))])

    def _check_finite(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """Return outputs; raise a ValueError that names one with NaN or infinity."""
        for tensor, output in zip(self.description['outputs'], outputs):
            # The least and the largest value are NaN if any value is.
            if not np.isfinite([output.min(initial=0), output.max(initial=0)]).all():
                raise ValueError(
                    escape(
                        f'{self.file} gives {tensor["name"]} with NaN or infinity: it may overflow '
                        'in float16, or its weights may be damaged'
                    )
                )
        return outputs

    def _choose_slide(self) -> Callable[[np.ndarray, float | None], dict[str, Any]]:
        """Return the function that predicts a picture by windows."""
        outputs, names = self.description['outputs'], self.description.get('classes')
        kind = outputs[0].get('kind')
        if self.has_boxes:

            def slide(pixels: np.ndarray, score: float | None) -> dict[str, Any]:
                results = slide_boxes(pixels, self.description, partial(self._detect, score=score))
                return dict(results, names=names)

        elif kind in (None, 'probabilities') and [len(x['shape']) for x in outputs] == [4]:

            def slide(pixels: np.ndarray, score: float | None) -> dict[str, Any]:
                labels = slide_labels(pixels, self.description, self._segment)
                return dict(labels=labels, names=names)

        elif kind == 'labels':
            raise ValueError(
                "labels of windows cannot be averaged: use tile='whole', or export with --outputs "
                'probabilities or raw'
            )
        else:
            raise ValueError("tile='slide' is for segmentors and detectors")
        return slide

    def _detect(
        self, pixels: np.ndarray, corners: Sequence[tuple[int, int]], score: float | None
    ) -> Iterator[dict[str, Any]]:
        """Yield what is found in windows, which keep their size."""
        for windows in self._cut(pixels, corners):
            yield from self._predict(windows, score, resize=None)

    def _segment(
        self, pixels: np.ndarray, corners: Sequence[tuple[int, int]]
    ) -> Iterator[np.ndarray]:
        """Yield the logits (K, h, w) of windows, which are padded on the right and below."""
        image = dict(self.description['inputs'][0], resize=None, letterbox='top-left')
        for windows in self._cut(pixels, corners):
            images = [prepare(x, image, self.description['shape'])[0] for x in windows]
            yield from read_logits(self.description, self._run_batch(images))

    def _cut(
        self, pixels: np.ndarray, corners: Sequence[tuple[int, int]]
    ) -> Iterator[list[np.ndarray]]:
        """Yield windows (h, w, C), as many at once as the file takes."""
        height, width = self.description['shape']
        windows = [pixels[top : top + height, left : left + width] for top, left in corners]
        batch = self.description['inputs'][0]['shape'][0]
        for start in range(0, len(windows), batch):
            yield windows[start : start + batch]


def open_exported(
    path: str | os.PathLike[str],
    threads: int = 1,
    providers: Sequence[Any] | None = None,
    engine: str | None = None,
    float16: bool = False,
    bfloat16: bool = False,
    verify: bool = True,
) -> Model:
    """Open an exported file, which itself says what it takes.

    Args:
        path: ``.onnx``, ``.tflite``, ``.ncnn``, ``.pte`` or, on a Mac, ``.mlpackage``.
        threads: Number of CPU threads.
        providers: Of ONNX Runtime, by name; None: the CPU alone.
        engine: None: the format's own. ``'openvino'`` also runs ``.onnx``, in float32.
        float16: Compute in float16, which only LiteRT does here.
        bfloat16: Compute in bfloat16, which only OpenVINO does, on CPUs that have it.
        verify: Compare the file with the hash in its description, if it has one. False opens files
            that other tools have rewritten.

    Raises:
        FileNotFoundError: If the file does not exist.
        ImportError: If the engine is not installed.
        ValueError: If the file is damaged or of another format, if its description is invalid or
            does not fit it, or if the engine does not have what is asked for.
    """
    path = Path(path)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f'threads are a whole number from 1, got {threads!r}')
    module = choose_engine(path, engine)
    check_file(path)
    if verify:
        check_hash(path)
    options: dict[str, Any] = dict(providers=providers) if providers is not None else {}
    options.update({k: True for k, v in dict(float16=float16, bfloat16=bfloat16).items() if v})
    for name in options:
        if name not in module.OPTIONS:
            raise ValueError(escape(f'{module.NAME} has no {name} for {path}'))
    try:
        opened = module.open_file(path, threads, **options)
    except ImportError as error:
        if error.name is None or error.name.partition('.')[0] != module.PACKAGE:
            raise
        fault, option = 'is not installed', ''
        if find_spec(module.PACKAGE) is not None:  # a part of it is missing
            fault, option = f'is too old, or incomplete ({error})', '--upgrade '
        raise ImportError(
            f'{module.NAME} {fault}: pip install {option}{module.INSTALL}', name=error.name
        ) from error
    except Exception as error:  # engines raise their own classes
        reason = escape(' '.join(str(error).split()))
        if reason.startswith(escape(str(path))):
            raise ValueError(reason) from error
        raise ValueError(f'{escape(str(path))} cannot be opened: {reason}') from error
    if float16 and opened.description.get('float16') is False:
        raise ValueError(escape(f'{path} is right in float32 only, as its description says'))
    if opened.description:
        match(opened.description, path, opened.input_shape, opened.output_shapes, opened.names)
    return Model(opened.run, opened.input_shape, opened.description, path)
