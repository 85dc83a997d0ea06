"""All kinds of files that are fuzzed, by name."""

from collections.abc import Callable
from pathlib import Path

from fuzz.annotation_files import ade20k_kind, coco_kind
from fuzz.checkpoint_files import checkpoint_kind
from fuzz.config_files import config_kind
from fuzz.harness import Kind

KINDS: dict[str, Callable[[Path], Kind]] = {
    'checkpoint': checkpoint_kind,
    'config': config_kind,
    'coco': coco_kind,
    'ade20k': ade20k_kind,
}
