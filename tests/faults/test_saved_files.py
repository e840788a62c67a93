"""Saved files: complete or absent, without private contents, for any names."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import tempfile
import threading
from pathlib import Path
from xml.etree import ElementTree

import anywidget
import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.export import atomic_write
from lazyviz.view.export import save as export_save

FORMATS = ("svg", "html", "dot", "pdf", "png", "json", "pickle", "model-explorer")
WORTH_KEEPING = b"what was there before"
SECRET = "a_comment_of_it"


@pytest.fixture
def graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with lazyviz.lazy(code="secret_cell = 1  # of the cell\n") as graph:
        total = model(torch.randn(3, 4)).sum()  # a_comment_of_it
        total.item()  # a_comment_of_it
        (total * 2).backward()  # a_comment_of_it
    return graph


def name_of(kind):
    return f"graph.{'json' if kind == 'model-explorer' else kind}"


def save(graph, path, kind, **options):
    graph.save(path, "model-explorer" if kind == "model-explorer" else None, **options)


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("fault", ["disk full", "too large", "no rename"])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    kind, fault, graph, tmp_path, monkeypatch
):
    path = tmp_path / name_of(kind)
    path.write_bytes(WORTH_KEEPING)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    convert = export_save.convert
    if kind in ("pdf", "png"):  # as any program that draws: made before the limit holds
        made = convert(export_save.render_svg(graph.ir, graph.plan()), kind)
        monkeypatch.setattr(export_save, "convert", lambda *_: made)
    if fault == "disk full":
        monkeypatch.setattr(atomic_write.os, "fsync", refuse)
    elif fault == "no rename":
        monkeypatch.setattr(atomic_write.os, "replace", refuse)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError):
            save(graph, path, kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == WORTH_KEEPING
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_an_error_about_the_file_that_was_asked_for(graph, tmp_path):
    path = tmp_path / "none" / "graph.svg"
    with pytest.raises(FileNotFoundError) as caught:
        graph.save(path)
    assert caught.value.filename == str(path)
    assert ".lazyviz-" not in str(caught.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_renderer_that_fails_leaves_the_old_file_and_nothing_else(kind, graph, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("cannot draw")

    drawing = {"pickle": "memory_snapshot", "json": "trace_events", "model-explorer": "model_explorer"}
    drawing |= {"dot": "to_dot", "html": "interactive_page"}
    monkeypatch.setattr(export_save, drawing.get(kind, "render_svg"), fail)
    path = tmp_path / name_of(kind)
    path.write_bytes(WORTH_KEEPING)
    with pytest.raises(RuntimeError, match="cannot draw"):
        save(graph, path, kind)
    assert path.read_bytes() == WORTH_KEEPING
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_stops_the_writing_leaves_the_old_file(stop, graph, tmp_path, monkeypatch):
    def fail(*_):
        raise stop

    monkeypatch.setattr(atomic_write.os, "fsync", fail)
    path = tmp_path / "graph.svg"
    path.write_bytes(WORTH_KEEPING)
    with pytest.raises(stop):
        graph.save(path)
    assert path.read_bytes() == WORTH_KEEPING
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_file_system_leaves_the_old_file(graph, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with pytest.raises(OSError, match="No space left"):
        graph.save("/dev/full", "svg")
    link = tmp_path / "full.svg"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        graph.save(link)
    assert link.is_symlink()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_new_files_have_the_permissions_of_any_other_and_old_ones_keep_theirs(mask, graph, tmp_path):
    before = os.umask(mask)
    try:
        graph.save(tmp_path / "new.svg")
        (tmp_path / "as_usual").write_text("")
        (tmp_path / "old.svg").write_text("")
        (tmp_path / "old.svg").chmod(0o604)
        graph.save(tmp_path / "old.svg")
    finally:
        os.umask(before)
    usual = stat.S_IMODE((tmp_path / "as_usual").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "new.svg").stat().st_mode) == usual
    assert stat.S_IMODE((tmp_path / "old.svg").stat().st_mode) == 0o604


def test_symbolic_links_are_followed_also_to_files_that_are_not_there_yet(graph, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name in ("there.svg", "new.svg"):
        target, link = tmp_path / "elsewhere" / name, tmp_path / name
        if name == "there.svg":
            target.write_text("old")
        link.symlink_to(target)
        graph.save(link)
        assert link.is_symlink()
        assert target.read_text().startswith("<svg")
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["new.svg", "there.svg"]


def test_what_is_no_file_is_written_to(graph, tmp_path):
    os.mkfifo(tmp_path / "pipe.svg")
    reader = os.open(tmp_path / "pipe.svg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        graph.save(tmp_path / "pipe.svg", "dot")
        assert os.read(reader, 10) == b"digraph la"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe.svg").stat().st_mode)


def test_a_named_pipe_that_nobody_reads_is_one_error(graph, tmp_path, monkeypatch):
    path = tmp_path / "pipe.svg"
    os.mkfifo(path)
    monkeypatch.setattr(atomic_write, "PATIENCE", 0.1)
    with pytest.raises(OSError, match="nobody reads from this pipe") as caught:
        graph.save(path)
    assert caught.value.filename == str(path)
    monkeypatch.setattr(atomic_write, "PATIENCE", 60.0)
    read = []
    reader = threading.Timer(0.1, lambda: read.append(path.read_text()))  # late, but it comes
    reader.start()
    graph.save(path, "html")  # more than the pipe holds
    reader.join(60)
    assert read[0].rstrip().endswith("</html>")


def test_a_pipe_without_a_path_is_written_to(graph):
    """As that of `python script_as_main.py | less`, or the shell's `>(program)`."""
    if not Path("/dev/fd").exists():
        pytest.skip("there is no /dev/fd")
    source, target = os.pipe()
    with os.fdopen(source) as file:
        graph.save(f"/dev/fd/{target}", "dot")
        os.close(target)
        assert file.read().startswith("digraph la")


def test_a_missing_folder_is_the_system_s_own_error(graph, tmp_path):
    with pytest.raises(FileNotFoundError):
        graph.save(tmp_path / "nowhere" / "graph.svg")


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_goes_while_a_file_is_written_is_an_error_about_the_file(
    exists, graph, tmp_path, monkeypatch
):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "graph.svg"
    if exists:
        path.write_bytes(WORTH_KEEPING)
    monkeypatch.setattr(atomic_write.os, "fsync", lambda _: shutil.rmtree(folder))
    with pytest.raises(FileNotFoundError) as caught:
        graph.save(path)
    assert caught.value.filename == str(path)
    assert ".lazyviz-" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def no_new_files(folder):
    """What ``os.open`` is in a folder in which this process may not create files."""

    def refuse_new(path, flags, *options, **named):
        if flags & os.O_CREAT and Path(path).parent == folder and not Path(path).exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *options, **named)

    opened = os.open
    return refuse_new


def test_a_folder_without_permission_is_an_error_about_the_file(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", no_new_files(tmp_path))
    with pytest.raises(PermissionError) as caught:
        graph.save(tmp_path / "graph.svg")
    assert caught.value.filename == str(tmp_path / "graph.svg")


def test_a_file_is_overwritten_in_place_or_put_back_where_no_other_can_be_made(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", no_new_files(tmp_path))
    path = tmp_path / "graph.svg"
    path.write_bytes(WORTH_KEEPING)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            graph.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == WORTH_KEEPING
    for longest in (True, False):  # shorter than what is there, too
        path.write_bytes(WORTH_KEEPING * (100_000 if longest else 1))
        graph.save(path)
        assert path.read_text().startswith("<svg") and path.read_text().rstrip().endswith("</svg>")


def test_a_file_that_may_not_be_written_is_not_replaced(graph, tmp_path, monkeypatch):
    path = tmp_path / "graph.svg"
    path.write_bytes(WORTH_KEEPING)
    path.chmod(0o444)
    if os.access(path, os.W_OK):  # by root
        monkeypatch.setattr(atomic_write.os, "access", lambda *_: False)
    with pytest.raises(PermissionError) as caught:
        graph.save(path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == WORTH_KEEPING
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_the_temporary_file_is_made_leaves_none(graph, tmp_path, monkeypatch):
    made = tempfile.mkstemp

    def interrupted(*options, **named):
        found = made(*options, **named)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(atomic_write.tempfile, "mkstemp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        graph.save(tmp_path / "graph.svg")
    assert list(tmp_path.iterdir()) == []


# --- what is in them ------------------------------------------------------------------


def everything_in(path):
    """The texts of a file, those that are packed in a page included."""
    data = path.read_bytes()
    if path.suffix == ".pickle":
        return repr(pickle.loads(data))
    text = data.decode("utf-8", errors="replace")
    parts = re.findall(r'data-part="[^"]*">([^<]*)<', text)
    parts = [gzip.decompress(base64.b64decode(part)).decode() for part in parts]
    images = re.findall(r"data:image/svg\+xml;base64,([^\"']*)", text)
    return "\n".join([text, *parts, *(base64.b64decode(image).decode() for image in images)])


SECRETS = (
    os.path.dirname(__file__),
    str(Path.home()) + os.sep,
    os.getcwd() + os.sep,
    SECRET,
    "secret_cell",
)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("state", ["pending", "done", "failed"])
def test_without_paths_no_folder_and_no_code_is_in_any_file(kind, state, graph, tmp_path):
    if state == "done":
        graph.evaluate()
    if state == "failed":
        with lazyviz.lazy() as graph:
            total = torch.linalg.cholesky(-torch.eye(3))  # a_comment_of_it
        with pytest.raises(Exception, match="positive"):
            graph.evaluate()
        assert total is not None
    path = tmp_path / name_of(kind)
    save(graph, path, kind)
    told = everything_in(path)
    before = [(node.source, node.callers, node.error) for node in graph.nodes], graph.sync_points
    save(graph, path, kind, paths=False)
    private = everything_in(path)
    for secret in SECRETS:
        assert secret not in private
    if kind in ("html", "json", "model-explorer"):
        assert SECRET in told  # otherwise this shows nothing
    if kind in ("json", "pickle"):
        assert os.path.dirname(__file__) in told
    assert ([(node.source, node.callers, node.error) for node in graph.nodes], graph.sync_points) == before


def test_without_paths_lines_still_have_their_file_and_number(graph, tmp_path):
    graph.save(tmp_path / "graph.json", paths=False)
    events = json.loads((tmp_path / "graph.json").read_text())["traceEvents"]
    lines = {event["args"]["line"] for event in events if "line" in event.get("args", {})}
    assert lines
    assert all(re.fullmatch(rf"{Path(__file__).stem}\.py:\d+: ?", line) for line in lines)


HOSTILE = [
    "\x00", "\x01\x08\x0b\x1b[31m", "\x7f\x85", "\ud800", "\udfff\ud800", "\u202eevil\u202c", "\u200f",
    "\u2066x\u2069", "\ufeff", "\ufffe\uffff", "\u2028\u2029", '"]; evil [label="', "</script><script>",
    "<!--", "]]>", "\\", "\\N\\G", "{|}<p>", "a\nb\tc", "%s{0}", "🧪‍🔬", "", " ", "..", "&#0;", "x" * 3000,
]  # fmt: skip


@pytest.fixture(params=HOSTILE, ids=ascii)
def hostile(request):
    """A graph whose modules, variables, cell, title and line have such a name."""
    name = request.param
    inner = nn.Module()
    inner._modules[name or "-"] = nn.Linear(2, 2)
    inner.register_buffer("plain", torch.ones(2))
    inner._buffers[name or "-"] = torch.ones(2)

    def forward(x):
        return inner._modules[name or "-"](x) + inner._buffers[name or "-"]

    inner.forward = forward
    x = torch.randn(2, 2)
    text, file = "y = model(x)\nprint(y.sum().item(), file=into)\n", f"{name.replace(chr(0), '')}.py"
    code = compile(text, file.encode("utf-8", "replace").decode(), "exec")
    names = {"model": inner, "x": x, f"v{name}": x, "into": open(os.devnull, "w")}  # noqa: SIM115
    with lazyviz.lazy(names=names, code=f"# {name}\ny = model(x)\n") as graph:
        exec(code, names)
    names["into"].close()
    graph.title = f"title {name}"
    return graph


@pytest.mark.parametrize("kind", FORMATS)
def test_no_name_breaks_a_file(kind, hostile, tmp_path):
    path = tmp_path / name_of(kind)
    for paths in (True, False):
        save(hostile, path, kind, paths=paths)
        data = path.read_bytes()
        if kind == "svg":
            ElementTree.fromstring(data)
        elif kind in ("json", "model-explorer"):
            json.dumps(json.loads(data), ensure_ascii=False).encode()
        elif kind == "pickle":
            pickle.loads(data)
        elif kind == "html":
            text = everything_in(path)
            text.encode()
            assert not re.search("[\x00-\x08\x0e-\x1f\u202a-\u202e]", text)
        elif kind == "dot":
            text = data.decode()
            assert not re.search("[\x00-\x08\x0e-\x1f\u202a-\u202e]", text)
        else:
            assert data.startswith({"pdf": b"%PDF", "png": b"\x89PNG"}[kind])


def test_no_name_breaks_what_a_front_end_is_sent(hostile, monkeypatch):
    sent = []
    monkeypatch.setattr(
        anywidget.AnyWidget, "send", lambda widget, content, buffers=None: sent.append(content)
    )
    widget = hostile.widget()
    for action, id in (("open-all", ""), ("code", ""), ("search", "l"), ("table", ""), ("moment", "0")):
        widget._hear(None, {"action": action, "id": id}, None)
    for box in list(widget._answers.scene.hierarchy.boxes):
        widget._hear(None, {"action": "select", "id": box}, None)
    for message in [*sent, widget.get_state(), hostile.static_bundle(), hostile.text()]:
        json.dumps(message, ensure_ascii=False, default=str).encode("utf-8")  # as Jupyter sends it
    widget.close()
