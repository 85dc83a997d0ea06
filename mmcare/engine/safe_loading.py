"""Let MMEngine read checkpoints safely: importing this module changes its loaders.

Import it for inferencers, ``init_detector`` and other programs without a Runner, and for
FlexibleRunner. MMEngine then reads local files and downloads by
:func:`mmcare.weights.reading.load_from_mmcare`, but only warns of missing weights. Runs with a
Runner use :class:`mmcare.engine.SafeLoadingHook` instead.
"""

from mmengine.runner import CheckpointLoader

from mmcare.weights.reading import PREFIXES, load_from_mmcare

CheckpointLoader.register_scheme(PREFIXES, load_from_mmcare, force=True)
