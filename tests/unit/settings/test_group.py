from dataclasses import dataclass

import pytest

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group, Incomplete, check, methods, require_complete, requires
from hvdtrain.settings.safety.exits import BadInput


@dataclass(frozen=True, kw_only=True)
class Size(Group):
    width: int = 1

    def check(self, given):
        if self.width > 8:
            raise BadInput(f"--width {self.width}: give at most 8{' or leave it out' if 'width' in given else ''}")

    def missing(self):
        return {requires(f"--width {self.width}", "--depth 2"): {"depth": 2}} if self.width > 1 == self.depth else {}

    def uses(self):
        yield Use(option=f"--width {self.width}", takes=(Capability.WORLD,) if self.width == 3 else ())


@dataclass(frozen=True, kw_only=True)
class Depth(Size):
    depth: int = 1

    def uses(self):
        yield Use(option=f"--depth {self.depth}", needs=(Capability.WORLD,) if self.depth > 1 else ())


@dataclass(frozen=True, kw_only=True)
class Quiet(Size):
    loud: bool = False


@dataclass(frozen=True, kw_only=True)
class Whole(Quiet, Depth):
    def missing(self):
        return {"a run requires --name NAME": {}} if self.loud else {}


def test_a_method_is_called_once_for_each_class_that_defines_it_and_bases_first():
    assert [use.option for uses in methods(Whole(width=2), "uses") for use in uses()] == ["--width 2", "--depth 1"]
    assert [len(list(methods(Whole(), name))) for name in ("check", "missing", "uses")] == [2, 3, 3]


def test_a_value_that_cannot_work_is_refused_by_its_group():
    with pytest.raises(BadInput, match=r"^--width 9: give at most 8$"):
        check(Whole(width=9), set())
    with pytest.raises(BadInput, match=r"or leave it out$"):
        check(Whole(width=9), {"width"})


def test_all_that_is_missing_is_named_and_filled_in():
    with pytest.raises(Incomplete) as error:
        require_complete(Whole(width=2, loud=True))
    assert str(error.value) == "--width 2 requires --depth 2; a run requires --name NAME."
    assert error.value.settings == Whole(width=2, depth=2, loud=True)
    require_complete(Whole(width=2, depth=2))


def test_what_is_missing_is_not_proposed_if_it_would_be_refused():
    check(Whole(width=3), set())
    line = r"^--width 3 requires --depth 2; but --depth 2 does not work with --width 3: "
    with pytest.raises(BadInput, match=line) as error:
        require_complete(Whole(width=3))
    assert not isinstance(error.value, Incomplete)
