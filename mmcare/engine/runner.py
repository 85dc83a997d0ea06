"""A runner that lets hooks look at the configuration before anything is built from it."""

from typing import Any

import torch
from mmengine.device import get_device
from mmengine.registry import RUNNERS as MMENGINE_RUNNERS
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from mmcare.engine.cpu_distributed import init_cpu_processes
from mmcare.registry import RUNNERS


@RUNNERS.register_module()
@MMENGINE_RUNNERS.register_module()
class CheckingRunner(Runner):
    """mmengine's runner with one hook stage more, ``before_build``, and two traps closed.

    mmengine builds datasets, and so reads annotations, before it calls its first hook: a hook
    that is to explain a missing annotation file comes too late. Hooks of this runner may define
    ``before_build(runner, modes)``; it is called before the loops of ``modes`` are built.

    An empty data set is named as such. ``sync_bn`` is left aside where there is no GPU, since
    PyTorch's SyncBN refuses the CPU.
    """

    def setup_env(self, env_cfg: dict) -> None:
        """Set up the environment as mmengine does; processes on the CPU meet over gloo.

        Raises:
            ValueError: If several processes are to train on the CPU and the config, made for GPUs,
                does not ask for it.
        """
        if self.distributed and get_device() == 'cpu':
            init_cpu_processes(
                self.launcher, self.cfg.get('model_wrapper_cfg'), env_cfg.get('dist_cfg')
            )
        super().setup_env(env_cfg)

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap the model as mmengine does, with SyncBN only where there are GPUs."""
        if not torch.cuda.is_available():
            self.cfg.sync_bn = None
        return super().wrap_model(model_wrapper_cfg, model)

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

    @staticmethod
    def build_dataloader(dataloader: Any, *args: Any, **kwargs: Any) -> DataLoader:
        """Build a dataloader as mmengine does.

        Raises:
            ValueError: If the dataset is empty, which mmengine leaves to numpy to say.
        """
        try:
            return Runner.build_dataloader(dataloader, *args, **kwargs)
        except ValueError as error:
            if 'need at least one array to concatenate' not in str(error):
                raise
            dataset = dataloader['dataset']
            where = {
                key: dataset[key]
                for key in ('data_root', 'ann_file', 'data_prefix', 'filter_cfg')
                if dataset.get(key)
            }
            raise ValueError(
                f'the dataset {dataset.get("type")} with {where} has no images: none is listed, '
                'or the filter leaves none'
            ) from error
