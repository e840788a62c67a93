"""A backend that runs each op as it was recorded and adds up where the time goes."""

import time
from collections import Counter

from lazyviz.graph.ir import Value


class TimingBackend:
    def __init__(self):
        self.seconds = Counter()  # by operator, over all runs

    def compile(self, segment, inputs):
        def run(*tensors):
            known = dict(zip(segment.inputs, tensors))
            for node in segment.nodes:
                args = [given(item, known) for item in node.args]
                kwargs = {name: given(item, known) for name, item in node.kwargs.items()}
                start = time.perf_counter()
                result = node.op(*args, **kwargs)
                self.seconds[str(node.op)] += time.perf_counter() - start
                results = result if isinstance(result, (list, tuple)) else [result]
                for value in node.outputs:
                    if value.node is node:  # an in-place op's output is its argument, known already
                        known[value] = results[value.index]
            return [known[value] for value in segment.outputs]

        return run


def given(item, known):
    if isinstance(item, Value):
        return known[item]
    return [given(entry, known) for entry in item] if isinstance(item, (list, tuple)) else item
