"""Few parameter groups: the optimizer of MMEngine's default constructor, in fewer kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.logging import MMLogger, print_log
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIMIZERS
from torch import nn
from torch.optim import Adam, AdamW

from mmcare.compatibility import fuses_adam
from mmcare.registry import OPTIM_WRAPPER_CONSTRUCTORS, built_type

# Options of an optimizer that change how a step is computed, and not what.
IMPLEMENTATION = ('capturable', 'differentiable', 'foreach', 'fused')
# Attributes of MMEngine's schedulers that have a value for each group.
OF_GROUPS = ('_last_value', 'base_values', 'min_values')


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MergedGroupsConstructor(DefaultOptimWrapperConstructor):
    """Build the optimizer as MMEngine's default constructor does, with few parameter groups.

    With ``paramwise_cfg``, MMEngine makes a group of each parameter, and optimizers start their
    kernels for each group. This constructor merges groups that have the same options. The
    optimizer computes the same steps.

    Adam and AdamW also get ``fused=True`` where device and PyTorch support it, unless the config
    says how to compute steps: ``fused=False`` or ``foreach=True``. (A fused SGD fails if a
    parameter gets its first gradient after others.)

    The log has a line for each group, in place of a line for each parameter.

    Example::

        optim_wrapper = dict(
            constructor='mmcare.MergedGroupsConstructor',
            optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
            paramwise_cfg=dict(norm_decay_mult=0.0))
    """

    optimizer_cfg: dict[str, Any]

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimizer and its wrapper for a model."""
        if self._can_fuse(model):
            self.optimizer_cfg = dict(self.optimizer_cfg, fused=True)
        logger = MMLogger.get_current_instance()
        logger.addFilter(_concerns_more_than_a_parameter)
        try:
            wrapper = super().__call__(model)
        finally:
            logger.removeFilter(_concerns_more_than_a_parameter)
        print_log(_describe(wrapper.optimizer, getattr(model, 'module', model)), logger='current')
        return wrapper

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = '', is_dcn_module: Any = None
    ) -> None:
        """Add a group for each parameter of a module; for the model, merge equal groups."""
        super().add_params(params, module, prefix, is_dcn_module)
        if prefix:
            return
        merged: list[dict] = []
        for group in params:
            parameters, options = group['params'], _options(group)
            same = next((other for other in merged if _options(other) == options), None)
            if same is None:
                merged.append(dict(options, params=[*parameters]))
            else:
                same['params'] += parameters
        params[:] = merged

    def _can_fuse(self, model: nn.Module) -> bool:
        return (
            built_type(OPTIMIZERS, self.optimizer_cfg) in (Adam, AdamW)
            and not any(name in self.optimizer_cfg for name in IMPLEMENTATION)
            and all(p.is_floating_point() and fuses_adam(p.device.type) for p in model.parameters())
        )


def fit_groups(checkpoint: dict[str, Any], runner: Any) -> str:
    """Fit the optimizer's state in a checkpoint to the groups of the run that resumes.

    The state of an optimizer that had a group for each parameter is merged, and so are the values
    that schedulers have for each group. MMEngine would apply the values of the first groups to
    whatever groups there are. Steps are computed as the run computes them, since a fused step may
    not exist on this device.

    Args:
        checkpoint: What a runner has saved. It is changed in place.
        runner: A runner that has built its optimizer and schedulers.

    Returns:
        An empty string, or why the checkpoint does not fit.
    """
    model, wrapper = runner.model, runner.optim_wrapper
    saved, schedules = checkpoint['optimizer'], checkpoint.get('param_schedulers')
    if not isinstance(wrapper, OptimWrapperDict):
        return _fit(saved, schedules or [], wrapper, model)
    parts = wrapper.items()
    faults = (_fit(saved[k], (schedules or {}).get(k, []), part, model) for k, part in parts)
    return next(filter(None, faults), '')


def _fit(saved: dict, schedules: list[dict], wrapper: Any, model: nn.Module) -> str:
    """Fit the state of one optimizer, and of its schedulers."""
    groups, saved_groups = wrapper.optimizer.param_groups, saved['param_groups']
    if len(saved_groups) != len(groups) and not _merge(saved, schedules, wrapper, model):
        return (
            f'it has {len(saved_groups)} groups of parameters, the run has {len(groups)}; set '
            'optim_wrapper.constructor and optim_wrapper.paramwise_cfg as in the earlier run'
        )
    for group, run_group in zip(saved['param_groups'], groups):
        group.update({name: run_group[name] for name in IMPLEMENTATION if name in run_group})
    return ''


def _merge(saved: dict, schedules: list[dict], wrapper: Any, model: nn.Module) -> bool:
    """Merge saved groups of one parameter each as those of the run; return False if they differ."""
    saved_groups = saved['param_groups']
    parameters = {id(p) for group in wrapper.optimizer.param_groups for p in group['params']}
    # MMEngine's constructor goes through the parameters in the order of the model.
    ordered = [id(p) for p in model.parameters() if id(p) in parameters]
    place = {parameter: index for index, parameter in enumerate(ordered)}
    if [len(group['params']) for group in saved_groups] != [1] * len(parameters) or (
        len(ordered) != len(parameters)
    ):
        return False
    merged, kept = [], []
    for group in wrapper.optimizer.param_groups:
        parts = [saved_groups[place[id(parameter)]] for parameter in group['params']]
        if any(_options(part) != _options(parts[0]) for part in parts):
            return False
        merged.append(dict(parts[0], params=[part['params'][0] for part in parts]))
        kept.append(place[id(group['params'][0])])
    saved['param_groups'] = merged
    if wrapper.base_param_settings is None:  # for schedulers, it is a further group
        saved.pop('base_param_settings', None)
    else:
        kept.append(len(saved_groups))
    for schedule in schedules:
        for name in OF_GROUPS:
            if name in schedule:
                values = schedule[name]
                schedule[name] = [values[index] for index in kept if index < len(values)]
    return True


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != 'params'}


def _concerns_more_than_a_parameter(record: logging.LogRecord) -> bool:
    """Filter the lines of MMEngine's constructor, on single parameters."""
    text = str(record.msg)
    return not (text.startswith('paramwise_options -- ') or 'is skipped since' in text)


def _describe(optimizer: Any, model: nn.Module) -> str:
    """Describe the groups of an optimizer, a line for each."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    frozen = sum(not parameter.requires_grad for parameter in model.parameters())
    groups = optimizer.param_groups
    lines = [
        f'{type(optimizer).__name__}{" (fused)" if groups[0].get("fused") else ""}, '
        f'{len(groups)} groups of parameters, {frozen} frozen:'
    ]
    for group in groups:
        shown = (
            f'{key}={value:g}' if isinstance(value, float) else f'{key}={value}'
            for key, value in _options(group).items()
            if key in ('lr', 'weight_decay') or any(other.get(key) != value for other in groups)
        )
        first = names.get(id(group['params'][0]))
        lines.append(f'{len(group["params"])} parameters ({first}, ...): {", ".join(shown)}')
    return '\n'.join(lines)
