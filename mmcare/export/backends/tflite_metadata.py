"""TFLite Model Metadata, which MediaPipe's Tasks and Android's tools read.

Here, a table of a flatbuffer is a dictionary, whose keys are the slots of the schema
https://github.com/google-ai-edge/mediapipe/blob/master/mediapipe/tasks/metadata/metadata_schema.fbs
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAME, CONTENT, PROCESS, STATS, FILES = 0, 3, 4, 5, 6  # slots of a tensor
IMAGE, BOX, NORMALIZATION, AXIS_LABELS, VALUE_LABELS = 2, 3, 1, 2, 3  # values of enumerations
ACTIVATIONS = {'sigmoid': 1, 'softmax': 2}


def write_metadata(description: Mapping[str, Any], author: str, terms: str) -> bytes | None:
    """Describe a file's tensors as MediaPipe expects them; return None if it cannot use the file.

    MediaPipe passes RGB to every file.
    """
    (image,), outputs = description['inputs'], description['outputs']
    has_masks = any(output.get('kind') == 'masks' for output in outputs)
    if image['channels'] != 'RGB' or has_masks:
        return None
    kind = outputs[0].get('kind', outputs[0]['name'])
    properties = {0: np.uint8(IMAGE), 1: {0: np.uint8(1)}}  # RGB
    picture: dict[int, Any] = {NAME: 'image', CONTENT: properties, STATS: {0: [255.0], 1: [0.0]}}
    if image['kind'] == 'tensor' and image['mean']:
        options = {0: image['mean'], 1: image['std']}
        picture[PROCESS] = [{0: np.uint8(NORMALIZATION), 1: options}]
    use = VALUE_LABELS if kind == 'boxes' else AXIS_LABELS
    labels = [{0: 'labels.txt', 2: np.uint8(use)}] if 'classes' in description else None
    tensors: dict[int, Any] = {2: [picture]}
    if kind == 'probabilities' and not outputs[0]['layout']:
        tensors[3] = [{NAME: 'probability', FILES: labels}]
    elif kind == 'logits' and outputs[0]['layout']:
        activation = {0: np.uint8(ACTIVATIONS[description['activation']]), 1: '1.0.0'}
        tensors[3] = [{NAME: 'segmentation_masks', FILES: labels}]
        tensors[9] = [{0: 'SEGMENTER_METADATA', 1: finish(activation, b'V001')}]
    elif kind == 'boxes':
        box = {0: [0, 1, 2, 3], 1: np.uint8(1)}  # left, top, right and bottom; as shares
        location = {NAME: 'location', CONTENT: {0: np.uint8(BOX), 1: box}}
        columns = [location, {NAME: 'score'}, {NAME: 'category', FILES: labels}]
        tensors[3] = [*columns, {NAME: 'number of detections'}]
        tensors[8] = [{0: 'detection_result', 1: ['location', 'category', 'score']}]
    else:
        return None
    model = {0: description['name'], 3: [tensors], 4: author, 5: terms, 7: '1.0.0'}
    return finish(model, b'M001')


def append_labels(path: Path, description: Mapping[str, Any]) -> None:
    """Append the names of classes to a file, which is then also a zip archive."""
    if 'classes' in description:
        lines = [' '.join(name.splitlines()) for name in description['classes']]  # one for each
        with zipfile.ZipFile(path, 'a') as archive:
            archive.writestr('labels.txt', '\n'.join(lines) + '\n')


def finish(table: Mapping[int, Any], identifier: bytes) -> bytes:
    """Return a flatbuffer with a table."""
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(_build(builder, table), identifier)
    return bytes(builder.Output())


def _build(builder: Any, value: Any) -> int:
    """Write a string, bytes, a vector, or a table with scalars of NumPy; return its offset."""
    if isinstance(value, str):
        return builder.CreateString(value)
    if isinstance(value, bytes):
        return builder.CreateByteVector(value)
    if isinstance(value, list):
        if isinstance(value[0], float | int):
            dtype = np.float32 if isinstance(value[0], float) else np.uint32
            return builder.CreateNumpyVector(np.array(value, dtype))
        offsets = [_build(builder, item) for item in value]
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return builder.EndVector()
    fields = {
        slot: item if isinstance(item, np.uint8) else _build(builder, item)
        for slot, item in value.items()
        if item not in (None, '')
    }
    builder.StartObject(max(fields) + 1)
    for slot, item in fields.items():
        if isinstance(item, np.uint8):
            builder.PrependUint8Slot(slot, item.item(), None)
        else:
            builder.PrependUOffsetTRelativeSlot(slot, item, 0)
    return builder.EndObject()
