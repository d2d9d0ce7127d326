"""Which operations of a traced graph write into tensors, and which tensors are written."""

from operator import getitem
from typing import Any

from torch import fx

Node = Any
"""An `fx.Node`; its arguments have no types."""


def changes_tensors(node: Node) -> bool:
    """Whether an operation writes into its inputs, or is of a kind that does not say so."""
    if node.op != "call_function" or node.target is getitem:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def is_written(graph: fx.GraphModule, node: Node) -> bool:
    """Whether an operation of the graph writes into a node's tensor, by itself or through a view of it.

    A weight may be read by several nodes: writing through one of them counts for all.
    """
    if node.op == "get_attr":
        same = [one for one in graph.graph.nodes if one.op == "get_attr" and one.target == node.target]
        return any(map(_is_written, same))
    return _is_written(node)


def _is_written(node: Node) -> bool:
    return any(changes_tensors(user) or (_is_view(user) and _is_written(user)) for user in node.users)


def _is_view(node: Node) -> bool:
    """Whether a result may share the memory of an input."""
    if node.op != "call_function":
        return False
    return node.target is getitem or any(r.alias_info is not None for r in node.target._schema.returns)
