"""Arguments of a wrong type: one sentence that names the argument, before anything has happened."""

from __future__ import annotations

import pytest
import torch

import lazyviz


@pytest.fixture
def graph():
    with lazyviz.lazy() as graph:
        graph.result = torch.ones(2) * 3
    yield graph
    assert lazyviz.is_lazy(graph.result)
    assert graph.evaluate().ops_run == 2


OF_GRAPHS = {
    "evaluate takes tensors, not int": lambda graph: graph.evaluate(3),
    "evaluate takes tensors, not NoneType": lambda graph: graph.evaluate(None),
    r"evaluate takes tensors, not list, use evaluate\(\*tensors\)": lambda graph: graph.evaluate(
        [graph.result]
    ),
    "progress must be a function, not int": lambda graph: graph.evaluate(progress=3),
    "cancel must be a threading.Event, not bool": lambda graph: graph.evaluate(cancel=True),
    "nodes must be a sequence of nodes, not int": lambda graph: graph.evaluate(nodes=3),
    "a node must be a node of this graph, not int": lambda graph: graph.evaluate(nodes=[3]),
    "a node must be a node of this graph, not Tensor": lambda graph: graph.evaluate(nodes=[graph.result]),
    "lazyviz.evaluate takes tensors, not str": lambda graph: lazyviz.evaluate("y"),
    "lazyviz.to_eager takes tensors, not int": lambda graph: lazyviz.to_eager(3),
    "lazyviz.to_lazy takes tensors, not int": lambda graph: lazyviz.to_lazy(3),
    "a callback must be a function, not int": lambda graph: graph.subscribe(3),
    r"names must be like \('before', 'after'\), not 3": lambda graph: lazyviz.compare(graph, graph, names=3),
    "format must be text, such as 'svg', not int": lambda graph: graph.save("a.svg", format=3),
    "format must be text, such as 'svg', not list": lambda graph: graph.save("a.svg", format=["svg"]),
    "path must be text or a path, not int": lambda graph: graph.save(3),
    "path must be text or a path, not bytes": lambda graph: graph.save(b"a.svg"),
    "title must be text, not int": lambda graph: graph.save("a.svg", title=3),
    "show must be the name of a part, or several, not int": lambda graph: graph.save("a.svg", show=3),
    "legend must be True or False, not str": lambda graph: graph.save("a.svg", legend="yes"),
    "paths must be True or False, not str": lambda graph: graph.save("a.html", paths="no"),
    "eager must be True or False, not int": lambda graph: graph.save("a.pickle", eager=1),
}


@pytest.mark.parametrize("message", OF_GRAPHS)
def test_methods_name_the_argument(message, graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=f"^{message}$"):
        OF_GRAPHS[message](graph)
    assert not list(tmp_path.iterdir())


OF_BLOCKS = {
    r"assume must be \{LINE: VALUE\}, not int": {"assume": 3},
    "held_bytes_limit must be a number of bytes, not str": {"held_bytes_limit": "1 GiB"},
    "names must be a mapping of variables, not int": {"names": 3},
    r"whole must be like \['cumsum'\], not 3": {"whole": 3},
    r"whole must be like \['cumsum'\], not 'cumsum'": {"whole": "cumsum"},
    "code must be text, not int": {"code": 3},
}


@pytest.mark.parametrize("message", OF_BLOCKS)
def test_blocks_name_the_option_and_record_nothing(message):
    with pytest.raises(TypeError, match=f"^{message}$"), lazyviz.lazy(**OF_BLOCKS[message]):
        raise AssertionError("the block was entered")
    assert not lazyviz.is_lazy(torch.ones(2))


def test_nodes_may_be_any_iterable(graph):
    assert graph.evaluate(nodes=iter([])).ops_run == 0
