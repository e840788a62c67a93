"""Temporary attribute and function code patches, applied repeatedly."""

import types

import pytest

from lazyviz.record import native_recorder
from lazyviz.record.interception.attribute_patches import CodePatch, Patches, exchange


@pytest.fixture(autouse=True, params=["in Python", "compiled"])
def way(request, monkeypatch):
    """How attributes are exchanged."""
    if request.param == "compiled" and native_recorder._module is None:
        pytest.skip("nothing is compiled")
    chosen = exchange if request.param == "in Python" else native_recorder._module.exchange
    monkeypatch.setattr(Patches, "exchange", staticmethod(chosen))


class Base:
    def name(self):
        return "base"

    def other(self):
        return "other"


@pytest.fixture
def classes():
    base = type("Base", (Base,), dict(vars(Base)))
    return base, type("Derived", (base,), {})


def install(patches, base):
    if not patches.reapply():
        patches.set(base, "name", lambda self: "new name")
        patches.set(base, "added", lambda self: "added")
        patches.set(base, "other", lambda self: "first")
        patches.set(base, "other", lambda self: "second")
        patches.set(base, "__str__", lambda self: "text")
        patches.set(base, "__len__", lambda self: 3)


def test_replaced_attributes_show_in_subclasses_each_time_and_are_as_before_after(classes):
    base, derived = classes
    before = dict(vars(base))
    text = str(derived())[:10]
    patches = Patches()
    for _ in range(3):
        install(patches, base)
        assert patches
        for cls in classes:
            one = cls()
            assert [one.name(), one.added(), one.other(), str(one), len(one)] == [
                "new name",
                "added",
                "second",
                "text",
                3,
            ]
        patches.restore()
        assert not patches
        assert dict(vars(base)) == before
        assert [derived().name(), derived().other()] == ["base", "other"]
        assert not hasattr(derived(), "added")
        assert str(derived())[:10] == text
        with pytest.raises(TypeError):
            len(derived())


def test_later_patches_by_others_are_kept(classes):
    base, _ = classes
    patches = Patches()
    install(patches, base)
    patches.restore()
    base.name = theirs = lambda self: "theirs"
    assert not patches.reapply()
    install(patches, base)
    assert base().name() == "new name"
    patches.restore()
    assert vars(base)["name"] is theirs


def test_nothing_is_set_where_one_of_several_has_changed(classes):
    base, derived = classes
    patches = Patches()
    patches.set(derived, "name", lambda self: "new name")
    patches.set(base, "other", lambda self: "new")
    patches.restore()
    base.other = lambda self: "theirs"
    assert not patches.reapply()
    assert (derived().name(), derived().other()) == ("base", "theirs")
    assert "name" not in vars(derived)


def test_a_call_that_python_has_specialized_sees_the_replaced_function(classes):
    base, derived = classes
    one, patches = derived(), Patches()

    def name():
        return one.name()

    for _ in range(3):
        assert {name() for _ in range(100)} == {"base"}
        if not patches.reapply():
            patches.set(base, "name", lambda self: "new name")  # no slot: the class is told
        assert {name() for _ in range(100)} == {"new name"}
        patches.restore()
    assert {name() for _ in range(100)} == {"base"}


def test_a_class_that_watches_its_attributes_is_asked():
    log = []

    class Watched(type):
        def __setattr__(cls, name, value):
            log.append((name, value))
            super().__setattr__(name, value)

    cls = Watched("cls", (), {"there": 1})
    patches = Patches()
    for _ in range(2):
        if not patches.reapply():
            patches.set(cls, "there", 2)
        patches.restore()
    assert log == [("there", 2), ("there", 1)] * 2


def test_attributes_of_a_module_are_replaced_and_put_back():
    module = types.ModuleType("module")
    module.there = 1
    before = dict(vars(module))
    patches = Patches()
    for _ in range(2):
        if not patches.reapply():
            patches.set(module, "there", 2)
            patches.set(module, "new", 3)
        assert (module.there, module.new) == (2, 3)
        patches.restore()
        assert vars(module) == before


def test_code_is_created_once_for_a_function_and_again_after_it_changed():
    def function(x):
        return x + 1

    made = []

    def replacement_of(original):
        made.append(original)

        def replacement(x, *, _original=original):
            return 10 * _original(x)

        return replacement

    patch = CodePatch(function)
    for _ in range(2):
        patch.set(replacement_of)
        assert function(1) == 20
        patch.restore()
        assert function(1) == 2
    assert len(made) == 1
    function.__code__ = (lambda x: x + 2).__code__
    patch.set(replacement_of)
    assert function(1) == 30
    patch.restore()
    assert (function(1), len(made)) == (3, 2)
