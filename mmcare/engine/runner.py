"""A runner that lets hooks look at the configuration before anything is built from it."""

from typing import Any

from mmengine.registry import RUNNERS as MMENGINE_RUNNERS
from mmengine.runner import Runner

from mmcare.registry import RUNNERS


@RUNNERS.register_module()
@MMENGINE_RUNNERS.register_module()
class CheckingRunner(Runner):
    """mmengine's runner with one hook stage more, ``before_build``.

    mmengine builds datasets, and so reads annotations, before it calls its first hook: a hook
    that is to explain a missing annotation file comes too late. Hooks of this runner may define
    ``before_build(runner, modes)``; it is called before the loops of ``modes`` are built.
    """

    def train(self) -> Any:
        """Train, after ``before_build`` for ``'train'`` and ``'val'``."""
        self.call_hook('before_build', modes=('train', 'val'))
        return super().train()

    def val(self) -> dict:
        """Evaluate on the validation data, after ``before_build`` for ``'val'``."""
        self.call_hook('before_build', modes=('val',))
        return super().val()

    def test(self) -> dict:
        """Evaluate on the test data, after ``before_build`` for ``'test'``."""
        self.call_hook('before_build', modes=('test',))
        return super().test()
