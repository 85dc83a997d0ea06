from __future__ import annotations

from collections.abc import Mapping
from math import isclose, nan
from typing import Any

from mmengine.optim import OptimWrapperDict
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mmcare.engine.hooks import SwitchableHook, unwrap, warn
from mmcare.registry import HOOKS
from mmcare_runtime.text import join_first

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
LAYER_SCALE = 'gamma'  # the last part of the name of a CARE's layer scales, and of ConvNeXt's
KINDS = {LAYER_SCALE: 'layer scales', 'norm': 'parameters of norms'}
FACTORS = {'lr': 'lr_mult', 'weight_decay': 'decay_mult'}  # of MMEngine, for each option
PAGE = 'docs/use_in_your_project.md#parameter-groups'


@HOOKS.register_module()
class OptimizerCheckHook(SwitchableHook):
    """Warn, before the first iteration, of parameters that do not train as the config says.

    - Parameters that require gradients, but are in no group of an optimizer, never change. Some
      constructors, such as mmyolo's, leave out parameters that have other names than ``weight``
      and ``bias``, such as layer scales.
    - Layer scales and norms may have another learning rate or weight decay than ``paramwise_cfg``
      says. In ``custom_keys``, MMEngine takes the longest key that is a part of the parameter's
      name, and ignores all other settings: with ``backbone=dict(lr_mult=0.1)``, neither a key
      ``gamma`` nor ``norm_decay_mult`` has an effect in the backbone. Some constructors ignore
      ``custom_keys``.

    Parameters with ``requires_grad=False`` are not mentioned.
    """

    priority = 'VERY_LOW'  # other hooks may freeze parameters

    def before_train(self, runner: Any) -> None:
        """Compare the groups of the optimizer with the model and with the config."""
        model, wrapper = unwrap(runner.model), runner.optim_wrapper
        groups = {
            id(parameter): group
            for part in (wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper])
            for group in part.optimizer.param_groups
            for parameter in group['params']
        }
        trained = {k: v for k, v in model.named_parameters() if v.requires_grad}
        if groups.keys().isdisjoint(map(id, trained.values())):
            return  # DeepSpeed's optimizer has copies of the parameters
        left_out = [name for name, parameter in trained.items() if id(parameter) not in groups]
        if left_out:
            warn(
                f'{len(left_out)} parameters require gradients, but are in no group of the '
                f'optimizer, and never change: {join_first(left_out)}. To train them, use '
                'optim_wrapper.constructor=mmcare.MergedGroupsConstructor. If they are to stay as '
                'they are, set their requires_grad to False.'
            )
        config = runner.cfg.get('optim_wrapper')
        if isinstance(config, Mapping) and config.get('paramwise_cfg'):
            norms = {
                id(parameter)
                for module in model.modules()
                if isinstance(module, NORMS)
                for parameter in module.parameters(recurse=False)
            }
            kinds = {
                k: 'norm' if id(v) in norms else k.rpartition('.')[2] for k, v in trained.items()
            }
            options = {k: groups[id(v)] for k, v in trained.items() if id(v) in groups}
            self._compare(runner, config, kinds, options)

    def _compare(
        self, runner: Any, config: Mapping[str, Any], kinds: dict[str, str], groups: dict[str, dict]
    ) -> None:
        """Compare the options of layer scales and norms with ``paramwise_cfg``."""
        unlike: dict[tuple[str, str, str | None], list[str]] = {}
        for name, group in groups.items():
            setting, options, key = _find_setting(name, kinds[name], config['paramwise_cfg'])
            for option, factor in FACTORS.items():
                base = (config.get('optimizer') or {}).get(option)
                if option == 'lr' and (runner.auto_scale_lr or {}).get('enable'):
                    base = None  # the runner has changed it
                if base is None or factor not in options:
                    continue
                if not isclose(base * options[factor], _read(group, option)):
                    unlike.setdefault((kinds[name], setting, key), []).append(name)
                    break
        for (kind, setting, key), names in unlike.items():
            held = [groups[name] for name in names]
            found = ', '.join(f'{option}={_range(held, option)}' for option in FACTORS)
            reason = f'{config.get("constructor", "the constructor")} does not follow it'
            if key is not None:
                reason = f'the key {key!r} takes precedence; for a way out, see {PAGE}'
            elif runner._resume:
                reason = 'a resumed run keeps the options of its checkpoint'
            warn(
                f'{len(names)} {KINDS[kind]} train with {found}, not as paramwise_cfg.{setting} '
                f'says: {join_first(names)}. Reason: {reason}.'
            )


def _find_setting(
    name: str, kind: str, paramwise: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any], str | None]:
    """Find the setting for a layer scale or a norm, and the key that MMEngine takes instead."""
    keys = paramwise.get('custom_keys') or {}
    matching = sorted((key for key in keys if key in name), key=lambda key: (-len(key), key))
    for key in matching:
        if kind == key.rpartition('.')[2] == LAYER_SCALE:
            return f'custom_keys.{key}', keys[key], matching[0] if matching[0] != key else None
    general = {'norm': 'norm_decay_mult', LAYER_SCALE: 'flat_decay_mult'}.get(kind, '')
    taken = keys[matching[0]] if matching else {}
    if paramwise.get(general) is None or 'decay_mult' in taken:
        return '', {}, None
    return general, dict(decay_mult=paramwise[general]), matching[0] if matching else None


def _read(group: Mapping[str, Any], option: str) -> float:
    """Read an option of a group, before schedulers have changed it."""
    return group.get(f'initial_{option}', group.get(option, nan))


def _range(groups: list[dict], option: str) -> str:
    values = [_read(group, option) for group in groups]
    return ' to '.join(f'{value:g}' for value in sorted({min(values), max(values)}))
