"""What a run resumes from besides weights: complete and usable, or named before anything is set.

mmengine takes it as it comes: without an optimizer's state in the file, a run goes on with a new
optimizer and says nothing, and what is of another type ends in an error from the depths.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmcare.checkpoint import CheckpointError

# Where a value stands in a training checkpoint, and what it must be.
REQUIRED: dict[tuple[str, ...], type | tuple[type, ...]] = {
    ('meta',): dict,
    ('meta', 'epoch'): int,
    ('meta', 'iter'): int,
    ('message_hub',): dict,
    ('message_hub', 'log_scalars'): dict,
    ('message_hub', 'runtime_info'): dict,
    ('message_hub', 'resumed_keys'): dict,
    ('optimizer',): dict,
}
GENERATORS = {'python', 'numpy', 'torch', 'cuda'}
OPTIMIZER_KEYS = {'state': dict, 'param_groups': list}


def check_training_state(checkpoint: Mapping[str, Any], schedulers: Any) -> None:
    """Check what a run is to resume from.

    Args:
        checkpoint: As it was loaded.
        schedulers: The run's parameter schedulers, for each of which a state is needed; by name of
            the optimizer if there are several; None if there are none.

    Raises:
        CheckpointError: If something is missing, of another type or not finite. The message names
            the file, if it came through mmcare's loader, and the part.
    """
    metadata = getattr(checkpoint.get('state_dict'), '_metadata', {})
    file = metadata.get('', {}).get('file', 'the checkpoint')
    required = dict(REQUIRED)
    if schedulers is not None:
        required['param_schedulers',] = (dict, list)
    for place, kind in required.items():
        _check_type(file, checkpoint, place, kind)
    for number in ('epoch', 'iter'):
        if checkpoint['meta'][number] < 0:
            _fail(file, f'meta.{number} is {checkpoint["meta"][number]}')
    optimizer = checkpoint['optimizer']
    # Several optimizers have their states by name, and single numbers beside.
    several = [
        name
        for name, state in optimizer.items()
        if isinstance(state, dict) and not optimizer.keys() & OPTIMIZER_KEYS.keys()
    ]
    for name in several or ('',):
        place = ('optimizer', name) if name else ('optimizer',)
        state = optimizer[name] if name else optimizer
        for key, kind in OPTIMIZER_KEYS.items():
            _check_type(file, checkpoint, (*place, key), kind)
        _check_optimizer(file, state, checkpoint['meta']['iter'])
    generators = checkpoint.get('generator_states')
    if generators is not None and not (
        isinstance(generators, list)
        and all(isinstance(states, dict) and states.keys() >= GENERATORS for states in generators)
    ):
        _fail(file, 'generator_states does not hold the states of generators')
    if schedulers is not None:
        _check_schedulers(file, checkpoint['param_schedulers'], schedulers)


def _check_schedulers(file: str, states: Any, schedulers: Any) -> None:
    """mmengine pairs them off: one without a state would start anew, in the middle of the run."""
    if isinstance(schedulers, dict) and isinstance(states, dict) and 'type' not in schedulers:
        if states.keys() != schedulers.keys():
            _fail(file, f'param_schedulers is for the optimizers {sorted(states)}')
        for name, of_one in schedulers.items():
            _check_schedulers(file, states[name], of_one)
        return
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        _fail(file, 'param_schedulers does not hold states of schedulers')
    if isinstance(schedulers, list) and len(states) != len(schedulers):
        _fail(
            file,
            f'param_schedulers holds {len(states)} states, and the run has {len(schedulers)} '
            'schedulers',
        )


def _check_type(
    file: str,
    checkpoint: Mapping[str, Any],
    place: tuple[str, ...],
    kind: type | tuple[type, ...],
) -> None:
    value: Any = checkpoint
    for key in place:
        if key not in value:
            _fail(file, f'{".".join(place)} is missing')
        value = value[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        _fail(file, f'{".".join(place)} is a {type(value).__name__}')


def _check_optimizer(file: str, state: Mapping[str, Any], iteration: int) -> None:
    """Check the groups, and the state of each parameter in them."""
    if not all(
        isinstance(group, dict) and isinstance(group.get('params'), list)
        for group in state['param_groups']
    ):
        _fail(file, 'optimizer.param_groups does not hold groups of parameters')
    if (
        iteration
        and not state['state']
        and any('betas' in group for group in state['param_groups'])
    ):
        _fail(file, f'optimizer.state is empty, after {iteration} iterations of an Adam')
    known = {number for group in state['param_groups'] for number in group['params']}
    # Frozen parameters never have a state.
    for number, values in state['state'].items():
        if number not in known or not isinstance(values, dict):
            _fail(file, f'optimizer.state has the entry {number!r}, which is no parameter')
        for name, value in values.items():
            if isinstance(value, Tensor) and not value.isfinite().all():
                _fail(file, f'optimizer.state of parameter {number}: {name} is not finite')


def _fail(file: str, what: str) -> None:
    raise CheckpointError(
        f'{file} is no checkpoint to resume from: {what}. Resume from another one, or take its '
        'weights only: --cfg-options resume=False load_from=FILE'
    )
