"""The name that :mod:`mmcare_runtime.verify` had in mmcare 1.0."""

from mmcare_runtime.verify import NO_HASH, check_file, check_hash, check_package, write_hash

__all__ = ['NO_HASH', 'check_file', 'check_hash', 'check_package', 'write_hash']
