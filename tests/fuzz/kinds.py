"""All kinds of files that are fuzzed, by name."""

from collections.abc import Callable
from pathlib import Path

from fuzz.checkpoint_files import checkpoint_kind
from fuzz.harness import Kind

KINDS: dict[str, Callable[[Path], Kind]] = {
    'checkpoint': checkpoint_kind,
}
