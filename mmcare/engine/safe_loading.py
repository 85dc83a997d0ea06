"""Let MMEngine read checkpoints safely: importing this module changes its loaders.

For programs without a Runner, such as inferencers and ``init_detector``, and for FlexibleRunner:
``import mmcare.engine.safe_loading``. Local files and downloads are then read without running code
from them, and damage is found; published CARE files load into MM models. MMEngine warns of missing
weights. Configs stay in checkpoints, except ``meta.config``, which MMEngine would run as a program
on resume. Configs of runs use :class:`mmcare.engine.SafeLoadingHook` instead.
"""

from mmengine.runner import CheckpointLoader

from mmcare.weights.reading import PREFIXES, load_from_mmcare

CheckpointLoader.register_scheme(PREFIXES, load_from_mmcare, force=True)
