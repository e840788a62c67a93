"""The code beside the graph: lines shown, their memory and time, and links to the graph and back."""

from __future__ import annotations

import linecache
import time

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.graph.ir import SourceLine, SyncPoint
from lazyviz.view.printable_text import as_written
from lazyviz.view.scene.scene import Scene
from lazyviz.view.widget.source_view import Code

CELL = "loss = net(x)\nloss.backward()\nopt.step()\n# the end"


@pytest.fixture
def code(step) -> Code:
    return Code(step)


def test_lines_add_up_to_what_the_graph_allocates_and_with_the_rest_to_the_peak(step, plan, code):
    facts = code.facts_json(plan)
    made = sum(storage.nbytes for storage in step.storages if not storage.external)
    assert sum(fact.get("bytes", 0) for fact in facts["lines"].values()) == made
    held = sum(fact.get("held", 0) for fact in facts["lines"].values())
    assert held + facts["elsewhere"] == plan.peak_bytes == facts["peak"]
    assert sum(fact.get("ops", 0) for fact in facts["lines"].values()) == len(step.nodes)


def test_an_op_of_the_backward_pass_is_also_listed_at_its_forward_line(step, plan, code):
    facts = code.facts_json(plan)["lines"]
    backward = [node for node in step.nodes if node.forward is not None]
    assert facts["0:1"]["gradients"] == len(backward) and "gradients" not in facts["0:2"]
    assert facts["0:2"]["ops"] == sum(node.phase == "backward" for node in step.nodes)


def test_a_cell_is_shown_whole_with_its_own_line_numbers(step, plan):
    linecache.cache["cell_compilation.py"] = (
        0,
        None,
        [f"{line}\n" for line in ["# %%lazy", *CELL.split("\n")]],
        "",
    )
    try:
        for node in step.nodes:
            node.source = SourceLine(
                "cell_compilation.py", node.source.line + 1, CELL.split("\n")[node.source.line - 1]
            )
        code = Code(step, CELL)
    finally:
        del linecache.cache["cell_compilation.py"]
    (section,) = code.text_json()
    assert section["label"] == "this cell"
    assert section["lines"] == [(2 + at, text) for at, text in enumerate(CELL.split("\n"))]
    assert set(code.facts_json(plan)["lines"]) == {"0:2", "0:3", "0:4"}


def test_a_cell_that_nothing_comes_from_is_shown_before_the_files_of_its_ops(step):
    code = Code(step, "\n\nout = train()")
    assert [section["label"] for section in code.text_json()] == ["this cell", "cell_compilation.py"]
    assert code.text_json()[0]["lines"] == [(4, "out = train()")]


def test_of_a_file_the_lines_of_ops_are_shown_with_their_surroundings(write, tmp_path):
    path = tmp_path / "model.py"
    path.write_text("\n".join(f"    line_{n} = {n}" for n in range(1, 101)) + "\n")
    program = write.Program()
    x = program.outside()
    for line in (10, 50):
        x = program(write.aten.relu.default, [x], line=line, text=f"line_{line} = {line}")
        program.graph.nodes[-1].source = SourceLine(str(path), line, f"line_{line} = {line}")
    (section,) = Code(program.graph).text_json()
    assert section["label"] == "model.py", "of the path only what the user knows it by"
    assert [line for line, _ in section["lines"]] == [8, 9, 10, 11, 12, 48, 49, 50, 51, 52]
    assert section["lines"][0][1] == "line_8 = 8", "without the indent that all lines share"


def test_of_another_cell_the_lines_from_the_first_to_the_last_with_ops_are_shown(write, tmp_path):
    text = "".join(f"line_{n} = {n}\n" for n in range(1, 21))
    file = "<ipython-input-3-0123456789ab>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    program = write.Program()
    x = program.outside()
    for line in (8, 14):
        x = program(write.aten.relu.default, [x], line=line, text=f"line_{line} = {line}")
        program.graph.nodes[-1].source = SourceLine(file, line, f"line_{line} = {line}", cell=3)
    (section,) = Code(program.graph).text_json()
    assert [line for line, _ in section["lines"]] == list(range(6, 17)), "without its imports"


def test_the_first_word_of_a_line_is_not_parted_from_its_indentation(write):
    program = write.Program()
    program(write.aten.relu.default, [program.outside()])
    (section, *_) = Code(program.graph, "for x in data:\n    history.append(x.item())").text_json()
    assert [text for _, text in section["lines"]] == [
        "for x in data:",
        "\xa0" * 4 + "history.append(x.item())",
    ]


def test_a_line_that_its_file_no_longer_has_is_shown_as_it_was(write, tmp_path):
    path = tmp_path / "model.py"
    path.write_text("something else\n")
    program = write.Program()
    program(write.aten.relu.default, [program.outside()])
    program.graph.nodes[0].source = SourceLine(str(path), 1, "y = relu(x)")
    assert Code(program.graph).text_json()[0]["lines"] == [(1, "y = relu(x)")]


def test_very_long_lines_and_cells_are_cut(write):
    program = write.Program()
    program(write.aten.relu.default, [program.outside()], text="y = '" + "x" * 10_000 + "'")
    (section,) = Code(program.graph).text_json()
    assert len(section["lines"][0][1]) < 500
    many = Code(program.graph, "\n".join(f"x = {n}" for n in range(1000)))
    assert len(many.text_json()[0]["lines"]) == 1000


def test_syncs_times_and_failures_are_at_their_lines(step, plan):
    step.nodes[0].measured_seconds, step.nodes[1].measured_seconds = 0.25, 0.5
    step.nodes[-1].state, step.nodes[-1].error = "failed", "boom"
    source = SourceLine("cell_compilation.py", 7, "print(loss.item())")
    step.sync_points.append(SyncPoint("item", source, 3, 0.25, 4, 5))
    facts = Code(step).facts_json(plan)["lines"]
    assert facts["0:1"]["seconds"] == 0.75
    assert facts["0:3"]["failed"] == "boom"
    assert facts["0:7"] == {"sync": "item: ran 3 ops"}


def test_a_line_leads_to_its_ops_and_an_op_to_its_lines(step, plan, code):
    scene = Scene(step, plan)
    details, boxes = code.describe(scene, code.key("0:3"))
    assert [box.node.name for box in boxes] == [node.name for node in step.nodes if node.phase == "optimizer"]
    assert len(details["links"]) == 3 and details["facts"][0] == ["ops", "3"]
    backward = next(node for node in step.nodes if node.forward is not None)
    assert code.ids_of([backward]) == ["0:2", "0:1"], "its own line first"
    for wrong in ("", "0", "x:1", "9:1", "0:99", "0:1:2", "-1:1", "٣:1"):
        assert code.key(wrong) is None


class Half(nn.Module):
    def forward(self, x):
        return x * 0.5  # the half


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Half(), Half()

    def forward(self, x):
        x = self.first(x)  # the first
        return self.second(x)  # the second


def shifted(x):
    return x + 1  # the shift


def test_a_line_counts_what_the_modules_and_functions_it_calls_do():
    net, x = Whole(), torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        y = net(x)  # the call
        z = shifted(y)  # the function
    code = Code(graph.ir)
    facts = code.facts_json(graph.plan())["lines"]
    texts = {f"0:{line}": text for line, text in code.text_json()[0]["lines"]}
    found = {text.rpartition("# ")[2]: fact for id, text in texts.items() if (fact := facts.get(id))}
    assert {what: (fact["ops"], fact.get("called", 0)) for what, fact in found.items()} == {
        "the half": (2, 0),
        "the first": (1, 1),
        "the second": (1, 1),
        "the call": (2, 2),
        "the shift": (1, 0),
        "the function": (1, 1),
    }, "and no line around the block"
    assert found["the call"]["bytes"] == 2 * 4 * 8 * 4
    assert len(code.ids_of(graph.ir.nodes[:1])) == 3
    assert z is not None


def test_hundred_thousand_ops_cost_little(large_scene):
    begin = time.perf_counter()
    code = Code(large_scene.graph)
    code.facts_json(large_scene.plan)
    assert time.perf_counter() - begin < 4, "seconds; 0.5 where nothing else runs"


@pytest.mark.parametrize(
    ("made", "written"),
    [
        ("    get_ipython().run_line_magic('time', 'z = y.relu()')", "    %time z = y.relu()"),
        ("get_ipython().run_line_magic('matplotlib', '')", "%matplotlib"),
        ("files = get_ipython().getoutput('ls -l')", "files = !ls -l"),
        ("get_ipython().system('true')", "!true"),
        ("get_ipython().run_cell_magic('time', '', 'y = x\\n')", "%%time"),
        ("shell = get_ipython()", "shell = get_ipython()"),
        ("get_ipython().run_line_magic(name, '')", "get_ipython().run_line_magic(name, '')"),
    ],
)
def test_lines_are_as_the_user_wrote_them_not_as_ipython_made_them(made, written):
    assert as_written(made) == written


def test_a_cell_of_marimo_is_a_cell_whose_file_is_not_named():
    line = SourceLine("/tmp/marimo_71/__marimo__cell_MJUe_.py", 3, "y = relu(x)")
    assert line.in_cell and str(line) == line.short == "line 3"
    assert SourceLine("/home/me/app.py", 3, "y = relu(x)").short == "app.py:3"
