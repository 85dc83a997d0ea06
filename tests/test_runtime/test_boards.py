"""The node for ROS 2 of docs/boards.md, with stand-ins for ROS and its messages."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from helpers import ROOT
from runtime_helpers import describe, write_onnx

from mmcare_runtime import open_exported


class Message(SimpleNamespace):
    """Has any field; ``detections`` is a list."""

    def __init__(self, **fields):
        super().__init__(detections=[], **fields)

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        setattr(self, name, Message())
        return getattr(self, name)


class Node:
    file = ''

    def __init__(self, name):
        self.published = []

    def declare_parameter(self, name, default):
        return SimpleNamespace(value=self.file)

    def create_publisher(self, kind, topic, depth):
        return SimpleNamespace(publish=self.published.append)

    def create_subscription(self, kind, topic, callback, profile):
        self.callback = callback


@pytest.mark.parametrize('encoding', ['bgr8', 'rgb8'])
def test_ros_node(tmp_path, monkeypatch, encoding):
    Node.file = str(write_onnx(tmp_path / 'mine.onnx', describe('boxes')))
    names = dict(Image=Message, Detection2D=Message, Detection2DArray=Message, Node=Node)
    names |= dict(ObjectHypothesisWithPose=Message, qos_profile_sensor_data=None)
    ros = MagicMock()
    for name in ('rclpy.node', 'rclpy.qos', 'sensor_msgs.msg', 'vision_msgs.msg'):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name.split('.')[0], ros)
        monkeypatch.setitem(sys.modules, name, module)
    text = (ROOT / 'docs/boards.md').read_text(encoding='utf-8')
    (code,) = (x for x in text.split('```python\n') if 'import rclpy' in x)
    exec(code.partition('```')[0], {'__name__': 'node'})
    (node,) = ros.spin.call_args.args
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    rows = np.zeros((40, 192), np.uint8)  # padded to multiples of 64
    rows[:, :180] = pixels[..., :: 1 if encoding == 'bgr8' else -1].reshape(40, 180)
    image = dict(height=40, width=60, step=192, encoding=encoding, data=rows.tobytes(), header=1)
    node.callback(SimpleNamespace(**image))
    (message,) = node.published
    expected = open_exported(Node.file).predict(pixels, score=0.3)
    assert len(message.detections) == len(expected['boxes']) > 0 and message.header == 1
    box = message.detections[0].bbox
    center = (expected['boxes'][0, :2] + expected['boxes'][0, 2:]) / 2
    np.testing.assert_allclose([box.center.position.x, box.center.position.y], center, rtol=1e-6)
    result = message.detections[0].results[0].hypothesis
    assert result.score == pytest.approx(expected['scores'][0])
    assert result.class_id == expected['names'][expected['labels'][0]]
