"""Whether the MM family is the maintained forks' (onedl-*), which differ in a few places."""

from importlib.metadata import PackageNotFoundError, version

try:
    version('onedl-mmengine')
    FORKS = True
except PackageNotFoundError:
    FORKS = False
