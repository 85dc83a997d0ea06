"""Let mmengine read checkpoints safely: importing this module changes its loaders.

Named in a config, it holds for whatever the config's run loads:
``custom_imports = dict(imports=['mmcare', 'mmcare.engine.safe_loading'])``. Local files and
downloads are then read without running code from them, and damage is found; published CARE files
load into MM models; errors name the file. Configs stay in checkpoints, except ``meta.config``,
which mmengine would run as a program on resume.
"""

from typing import Any

from mmengine.runner import CheckpointLoader

from mmcare.weights.reading import load_checkpoint


# mmengine logs the name without `load_from_`.
@CheckpointLoader.register_scheme(prefixes=('', 'http://', 'https://'), force=True)
def load_from_mmcare(filename: str, map_location: Any = None) -> Any:
    """Load a checkpoint for mmengine, see :func:`mmcare.weights.reading.load_checkpoint`."""
    return load_checkpoint(filename, map_location)
