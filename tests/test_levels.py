"""Rules 1 to 3: what is a level, what is refused, and the scope that asks for nothing."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from flags import HAS_CELLS, reset, state

from precision_scope import (
    FLOAT32_MATMUL_PRECISION,
    Float32MatmulPrecision,
    get_float32_matmul_precision,
    matmul_precision,
    set_float32_matmul_precision,
)
from precision_scope.backends import Backend, register_backend, unregister_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Level: TypeAlias = "Float32MatmulPrecision | Any"  # Any: wrong ones are tried, too
Seen: TypeAlias = "tuple[Float32MatmulPrecision, str]"

MEMBERS = tuple(Float32MatmulPrecision)
NAMES = ("highest", "high", "medium")
MEMBERS_AND_NAMES = [*MEMBERS, *NAMES]
ID = "{0.__class__.__name__}-{0}".format
SHORT = "{0!a:.20}".format  # without the address that the repr of a function ends in

# Whoever calls one of these hands in a level.
TAKE_A_LEVEL: list[Callable[[Any], object]] = [matmul_precision, set_float32_matmul_precision]

WRONG_NAMES = [
    *("hihg", "higher", "Highest", "HIGH", "med", "low", " high", "high ", "high\n", "high\0", ""),
    *("float32", "tensorfloat32", "bfloat16", "bfloat16_3x", "default"),
    *("tf32", "ieee", "bf16", "none", "x" * 5000, "high" * 1250, "\ud800"),
]


def a_function() -> None:
    """Stand for a function under a decorator whose parentheses are missing."""


WRONG_TYPES = [True, False, 0, 1, 2, 1.5, b"high", ["high"], ("high",), {"high"}, a_function, torch.float32]


def seen() -> Seen:
    """Return the level that the context gets and the one that torch is at."""
    return get_float32_matmul_precision(), torch.get_float32_matmul_precision()


def in_a_block(level: Level) -> Seen:
    """Return what is seen in a with-block."""
    with matmul_precision(level):
        return seen()


def in_a_decorated_call(level: Level) -> Seen:
    """Return what is seen in a decorated function."""
    return matmul_precision(level)(seen)()


def after_setting_the_default(level: Level) -> Seen:
    """Return what is seen once the process default has been set."""
    set_float32_matmul_precision(level)
    return seen()


def after_setting_in_a_scope(level: Level) -> Seen:
    """Return what is seen in a scope of which the level has been set."""
    with matmul_precision("highest"):
        set_float32_matmul_precision(level)
        return seen()


ENTRY_POINTS = [in_a_block, in_a_decorated_call, after_setting_the_default, after_setting_in_a_scope]


class Watcher(Backend):
    """A backend that notes what is asked of it."""

    name = "watcher"

    def __init__(self) -> None:
        """Note nothing yet."""
        self.calls: list[object] = []

    def is_active(self) -> bool:
        """Be active."""
        return True

    def save(self) -> object:
        """Note that something is about to change."""
        self.calls.append("save")
        return None

    def apply(self, level: Float32MatmulPrecision, /) -> None:
        """Note the level."""
        self.calls.append(level)

    def restore(self, _saved: object, /) -> None:
        """Note that what was changed is put back."""
        self.calls.append("restore")

    def describe(self) -> dict[str, str]:
        """Have no cells."""
        return {}


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """Return a registered backend that gets whatever torch gets."""
    backend = Watcher()
    register_backend(backend)
    yield backend
    unregister_backend("watcher")


@pytest.fixture(autouse=True)
def fresh_default() -> Iterator[None]:
    """Bring the process default back for the next test."""
    yield
    reset()


# Rule 1: members and strings.


@pytest.mark.parametrize("level", MEMBERS_AND_NAMES, ids=ID)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_members_and_their_strings_have_the_same_effect(
    entry_point: Callable[[Level], Seen], level: Level
) -> None:
    """Every entry point brings the context and torch to the level, however it is given."""
    assert entry_point(level) == (level, level)


@pytest.mark.parametrize("level", MEMBERS_AND_NAMES, ids=ID)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_what_the_api_returns_is_a_member(entry_point: Callable[[Level], Seen], level: Level) -> None:
    """The getter answers with the enum's own member, also after a string."""
    assert entry_point(level)[0] is Float32MatmulPrecision(level)


def test_the_getter_returns_a_member_outside_scopes() -> None:
    """The process default is a member, too."""
    assert get_float32_matmul_precision() is Float32MatmulPrecision.HIGHEST


def test_there_are_three_levels_and_the_strictest_is_first() -> None:
    """The members and their order are those of the RFC."""
    assert [(level.name, level.value) for level in Float32MatmulPrecision] == [
        ("HIGHEST", "highest"),
        ("HIGH", "high"),
        ("MEDIUM", "medium"),
    ]


def test_the_name_in_the_rfc_is_the_same_enum() -> None:
    """FLOAT32_MATMUL_PRECISION is no second enum."""
    assert FLOAT32_MATMUL_PRECISION is Float32MatmulPrecision


@pytest.mark.parametrize(("member", "name"), list(zip(MEMBERS, NAMES, strict=True)))
class TestMembersAreStrings:
    """A member can stand wherever its string can."""

    def test_it_is_a_string(self, member: Float32MatmulPrecision, name: str) -> None:
        """A member is an instance of str, with the name's characters."""
        assert isinstance(member, str)
        assert member.upper() == name.upper()

    def test_it_equals_its_string_alone(self, member: Float32MatmulPrecision, name: str) -> None:
        """A member equals its name, in both directions, and no other."""
        assert [other for other in NAMES if member == other] == [name]
        assert [other for other in NAMES if other == member] == [name]

    def test_the_enum_finds_it_by_its_string(self, member: Float32MatmulPrecision, name: str) -> None:
        """Calling the enum with a name gives the member."""
        assert Float32MatmulPrecision(name) is member

    def test_it_finds_what_a_dict_has_under_its_string(
        self, member: Float32MatmulPrecision, name: str
    ) -> None:
        """A dict and a set with string keys can be asked with members."""
        assert {name: "found"}[member] == "found"
        assert set(NAMES) & {member} == {name}

    def test_its_string_finds_what_a_dict_has_under_it(
        self, member: Float32MatmulPrecision, name: str
    ) -> None:
        """A dict and a set with members as keys can be asked with strings."""
        found: dict[str, str] = {member: "found"}
        assert found[name] == "found"
        assert set(MEMBERS) & {name} == {member}

    def test_str_prints_its_string(self, member: Float32MatmulPrecision, name: str) -> None:
        """A member prints as its name, not as Class.NAME, on every Python."""
        assert str(member) == name

    def test_format_prints_its_string(self, member: Float32MatmulPrecision, name: str) -> None:
        """Formatting, by the function and in an f-string, prints the name."""
        assert format(member) == name
        assert f"<{member}>" == f"<{name}>"

    def test_format_takes_the_widths_of_strings(self, member: Float32MatmulPrecision, name: str) -> None:
        """A format specification does to a member what it does to a string."""
        assert f"{member:>10}|{member:.3}" == f"{name:>10}|{name:.3}"

    def test_json_writes_its_string(self, member: Float32MatmulPrecision, name: str) -> None:
        """A member is JSON, as a value and as a key."""
        assert json.dumps({member: member}) == json.dumps({name: name})

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickle_brings_back_the_member(
        self, member: Float32MatmulPrecision, name: str, protocol: int
    ) -> None:
        """What comes out of a pickle is the same object."""
        assert pickle.loads(pickle.dumps(member, protocol)) is member, name

    def test_copies_are_the_member_itself(self, member: Float32MatmulPrecision, name: str) -> None:
        """Copying shallowly or deeply makes no second member."""
        assert copy.copy(member) is member, name
        assert copy.deepcopy(member) is member, name

    def test_torch_takes_it(self, member: Float32MatmulPrecision, name: str) -> None:
        """The setter of torch accepts a member as it accepts the string."""
        torch.set_float32_matmul_precision(member)
        assert torch.get_float32_matmul_precision() == name


# Rule 2: everything else is refused.


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize("name", WRONG_NAMES, ids=SHORT)
def test_a_wrong_name_is_a_value_error(take: Callable[[Any], object], name: str) -> None:
    """A string that names no level is refused: no case folding, no stripping, no aliases."""
    with pytest.raises(ValueError, match=r"^float32 matmul precision must be one of "):
        take(name)


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize("value", WRONG_TYPES, ids=SHORT)
def test_a_wrong_type_is_a_type_error(take: Callable[[Any], object], value: object) -> None:
    """What is no string is refused, numbers and booleans included."""
    with pytest.raises(TypeError, match=rf"Float32MatmulPrecision, not {type(value).__name__}\b"):
        take(value)


def test_the_setter_refuses_none() -> None:
    """None asks for nothing in a scope; to set nothing is a mistake."""
    with pytest.raises(TypeError, match="not NoneType"):
        set_float32_matmul_precision(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize("value", ["hihg", "float32", "x" * 5000, True, b"high"], ids=SHORT)
def test_the_message_names_the_three_values(take: Callable[[Any], object], value: object) -> None:
    """Whatever is refused, the message lists what is not."""
    with pytest.raises((TypeError, ValueError), match="must be one of 'highest', 'high', 'medium'"):
        take(value)


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        *[("hihg", "high"), ("HIGH", "high"), (" high", "high"), ("higher", "high"), ("hgh", "high")],
        *[("Highest", "highest"), ("hightest", "highest"), ("highest_", "highest")],
        *[("med", "medium"), ("MEDIUM", "medium"), ("meduim", "medium"), ("low", "medium")],
    ],
)
def test_the_message_names_the_nearest_value(take: Callable[[Any], object], name: str, nearest: str) -> None:
    """After a misspelling the message shows it and says which value comes closest."""
    with pytest.raises(ValueError, match=f"got '{name}'; the nearest is '{nearest}'$"):
        take(name)


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("float32", "highest"),
        ("tensorfloat32", "high"),
        ("bfloat16_3x", "high"),
        ("bfloat16", "medium"),
        ("default", "medium"),
    ],
)
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_the_message_translates_the_spellings_of_jax_and_xla(
    take: Callable[[Any], object], spelling: str, meant: str, case: Callable[[str], str]
) -> None:
    """A name from JAX or XLA is refused with the name that it has here."""
    with pytest.raises(ValueError, match=rf"what others call '{spelling}' is '{meant}' here$"):
        take(case(spelling))


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
def test_the_message_cuts_a_long_name_short(take: Callable[[Any], object]) -> None:
    """A file that was passed by mistake does not fill the screen."""
    with pytest.raises(ValueError, match=r"'x{40}…'") as caught:
        take("x" * 5000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize("value", ["hihg", True, ["high"]])
def test_the_traceback_shows_the_refusal_alone(take: Callable[[Any], object], value: object) -> None:
    """How the package found out is no part of what the user reads."""
    with pytest.raises((TypeError, ValueError)) as caught:
        take(value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_missing_parentheses_on_the_decorator_are_explained() -> None:
    """A function in the place of the level is met with the way to write it."""
    with pytest.raises(
        TypeError, match=r'not function; to decorate a function, write @matmul_precision\("highest"\)'
    ):

        @matmul_precision  # type: ignore[arg-type]
        def multiply() -> None: ...


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize("value", [*WRONG_NAMES, *WRONG_TYPES], ids=SHORT)
def test_a_refusal_changes_nothing(take: Callable[[Any], object], value: object) -> None:
    """All that torch answers, and what the context gets, is as it was."""
    before = state(), seen()
    with pytest.raises((TypeError, ValueError)):
        take(value)
    assert (state(), seen()) == before


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
def test_a_refusal_inside_a_scope_leaves_the_scope_as_it_is(take: Callable[[Any], object]) -> None:
    """The level of the surrounding scope stays, and still ends with it."""
    with matmul_precision("medium"):
        with pytest.raises(ValueError, match="the nearest"):
            take("hihg")
        assert seen() == ("medium", "medium")
    assert seen() == ("highest", "highest")


@pytest.mark.parametrize("take", TAKE_A_LEVEL)
@pytest.mark.parametrize("value", [*WRONG_NAMES, *WRONG_TYPES], ids=SHORT)
def test_nothing_that_is_refused_reaches_a_backend(
    take: Callable[[Any], object], value: object, watcher: Watcher
) -> None:
    """A backend, and torch is one, is neither asked nor told anything: some torch versions crash on it."""
    with matmul_precision("medium"):
        before = list(watcher.calls)
        with pytest.raises((TypeError, ValueError)):
            take(value)
        assert watcher.calls == before
    before = list(watcher.calls)
    with pytest.raises((TypeError, ValueError)):
        take(value)
    assert watcher.calls == before


@pytest.mark.parametrize("level", MEMBERS_AND_NAMES, ids=ID)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_backends_are_handed_members(
    entry_point: Callable[[Level], Seen], level: Level, watcher: Watcher
) -> None:
    """What reaches a backend is a member, however the level was given."""
    entry_point(level)
    levels = [call for call in watcher.calls if call not in ("save", "restore")]
    assert Float32MatmulPrecision(level) in levels
    assert all(isinstance(given, Float32MatmulPrecision) for given in levels)


def test_a_function_is_not_touched_when_its_decorator_is_refused() -> None:
    """The refusal comes when the scope is made: before it sees what it would decorate."""
    with pytest.raises(ValueError, match="the nearest"):

        @matmul_precision("hihg")
        def multiply() -> None: ...

    assert "multiply" not in locals()


def test_making_a_scope_changes_nothing(watcher: Watcher) -> None:
    """What is accepted waits for the entry: making and decorating touch no backend."""
    before = state()
    matmul_precision("medium")(seen)
    assert (state(), watcher.calls) == (before, [])


# Rule 3: None asks for nothing.


@pytest.mark.parametrize("run", [in_a_block, in_a_decorated_call])
def test_none_changes_nothing_outside_scopes(run: Callable[[Level], Seen], watcher: Watcher) -> None:
    """A scope of None is no scope, as a block and as a decorator."""
    assert run(None) == ("highest", "highest")
    assert watcher.calls == []


@pytest.mark.parametrize("run", [in_a_block, in_a_decorated_call])
def test_none_leaves_the_level_of_the_scope_around_it(run: Callable[[Level], Seen]) -> None:
    """Inside another scope, None gets that one's level."""
    with matmul_precision("medium"):
        assert run(None) == ("medium", "medium")
        assert seen() == ("medium", "medium")


@pytest.mark.parametrize("level", NAMES)
def test_scopes_nest_inside_none(level: Level) -> None:
    """A scope inside one of None has its level, and None none afterwards."""
    with matmul_precision(None):
        assert in_a_block(level) == (level, level)
        assert seen() == ("highest", "highest")


def test_what_torch_is_told_in_a_none_scope_outlives_it() -> None:
    """None restores nothing: what other code does through torch stays."""
    with matmul_precision(None):
        torch.set_float32_matmul_precision("high")
        assert seen() == ("high", "high")
    assert seen() == ("high", "high")


def test_what_torch_is_told_in_a_none_scope_lasts_as_long_as_the_scope_around_it() -> None:
    """Inside a scope, the end of None undoes nothing; the end of that scope does."""
    with matmul_precision("medium"):
        with matmul_precision(None):
            torch.set_float32_matmul_precision("high")
        assert torch.get_float32_matmul_precision() == "high"
    assert seen() == ("highest", "highest")


@pytest.mark.skipif(not HAS_CELLS, reason="needs torch's per-backend settings")
def test_none_leaves_a_getter_that_raises_alone() -> None:
    """Where torch's older and newer settings disagree, None does not even mend that."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with matmul_precision(None), pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()


@pytest.mark.parametrize("level", MEMBERS_AND_NAMES, ids=ID)
def test_setting_inside_none_works_until_it_ends(level: Level) -> None:
    """The setter gives the scope of None a level, which ends with it."""
    before = state()
    with matmul_precision(None):
        set_float32_matmul_precision(level)
        assert seen() == (level, level)
    assert seen() == ("highest", "highest")
    assert state() == before


def test_setting_inside_none_again_changes_its_level_again() -> None:
    """The second level replaces the first, and both end with the scope."""
    with matmul_precision(None):
        set_float32_matmul_precision("medium")
        set_float32_matmul_precision("high")
        assert seen() == ("high", "high")
    assert seen() == ("highest", "highest")


def test_setting_inside_none_uncovers_the_scope_around_it_afterwards() -> None:
    """Inside another scope, what is set in None gives way to that one's level."""
    with matmul_precision("high"):
        with matmul_precision(None):
            set_float32_matmul_precision("medium")
            assert seen() == ("medium", "medium")
        assert seen() == ("high", "high")


def test_setting_inside_the_inner_of_two_none_scopes_ends_with_the_inner() -> None:
    """The setter speaks to the innermost scope, whatever the others ask for."""
    with matmul_precision(None):
        with matmul_precision(None):
            set_float32_matmul_precision("medium")
        assert seen() == ("highest", "highest")


def test_setting_inside_a_call_decorated_with_none_ends_with_the_call() -> None:
    """A decorator of None is a scope for the setter, too."""

    @matmul_precision(None)
    def call() -> Seen:
        set_float32_matmul_precision("medium")
        return seen()

    assert call() == ("medium", "medium")
    assert seen() == ("highest", "highest")


def test_setting_inside_none_ends_when_the_block_raises() -> None:
    """An error ends what was set as a normal exit does."""

    def set_and_fail() -> None:
        with matmul_precision(None):
            set_float32_matmul_precision("medium")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        set_and_fail()
    assert seen() == ("highest", "highest")


def test_one_none_scope_can_be_used_again_after_setting_inside() -> None:
    """What was set in one use is gone in the next."""
    scope = matmul_precision(None)
    with scope:
        set_float32_matmul_precision("medium")
    with scope:
        assert seen() == ("highest", "highest")


def test_a_none_scope_shares_with_its_tasks_what_they_set() -> None:
    """A task sets the level of the scope that it inherited, for all inside, as in any other scope."""

    async def child() -> None:
        set_float32_matmul_precision("medium")

    async def parent() -> Seen:
        with matmul_precision(None):
            await asyncio.create_task(child())
            return seen()

    assert asyncio.run(parent()) == ("medium", "medium")
    assert seen() == ("highest", "highest")


@pytest.mark.parametrize("level", [*MEMBERS_AND_NAMES, None], ids=ID)
def test_an_optional_setting_can_be_passed_straight_through(level: Level) -> None:
    """A caller needs no case distinction: None gets what is around, a level itself."""
    with matmul_precision("high"):
        assert in_a_block(level)[0] == (level or "high")
