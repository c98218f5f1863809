"""Counts the collectives of a step."""

from __future__ import annotations

from typing import Any


def collectives(function: Any, *args: Any) -> list[str]:
    """Returns the op types of a call's collectives; of two branches, the longer counts.

    Args:
        function: A `tf.function`.
        *args: Its arguments.
    """
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    bodies = {f.signature.name: f.node_def for f in graph.library.function}

    def count(nodes: Any) -> list[str]:
        found = []
        for node in nodes:
            if node.op.startswith("Collective") and "Group" not in node.op:
                found.append(node.op)
            called = [
                count(bodies[name])
                for value in node.attr.values()
                for name in filter(None, [value.func.name, *(f.name for f in value.list.func)])
                if name in bodies
            ]
            if node.op in ("If", "StatelessIf", "Case"):
                called = [max(called, key=len)]
            found += [op for ops in called for op in ops]
        return found

    return sorted(count(graph.node))
