"""A pass of coremltools; importing this module registers it, once, and needs coremltools."""

from coremltools.converters.mil.mil import Block, Operation, Program
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.helper import block_context_manager
from coremltools.converters.mil.mil.passes.pass_registry import register_pass


@register_pass(namespace='mmcare')
class fuse_scale_and_shift(AbstractGraphPass):
    """Make one ``linear_activation`` of a multiplication and an addition of scalar constants."""

    def apply(self, prog: Program) -> None:
        """Fuse wherever it is possible."""
        for function in prog.functions.values():
            _fuse(function)


@block_context_manager
def _fuse(block: Block) -> None:
    for multiply in list(block.operations):
        if multiply.op_type != 'mul' or multiply.outputs[0] in block.outputs:
            continue
        followers = multiply.outputs[0].child_ops
        if len(followers) != 1 or followers[0].op_type != 'add':
            continue
        add = followers[0]
        scaled, scale = _split(multiply)
        _, shift = _split(add)
        if scale is None or shift is None:
            continue
        fused = mb.linear_activation(
            x=scaled, alpha=scale, beta=shift, name=add.outputs[0].name, before_op=add
        )
        block.replace_uses_of_var_after_op(anchor_op=add, old_var=add.outputs[0], new_var=fused)
        block.remove_ops([multiply, add])


def _split(operation: Operation) -> tuple:
    """The variable that goes into an operation and its scalar constant, or None for that."""
    for variable, constant in ((operation.x, operation.y), (operation.y, operation.x)):
        if variable.val is None and constant.val is not None and constant.rank == 0:
            return variable, constant.val
    return None, None
