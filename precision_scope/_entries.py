"""What is wanted: the entered scopes of each context.

One context variable holds the innermost :class:`Entry` of an immutable linked
stack. Contexts are copied with it, so tasks see the scopes that were live
where they were started; an entry that has ended counts for nobody.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from precision_scope._levels import LEVELS, Float32MatmulPrecision
from precision_scope._torch_api import context_of_backward, running_node, running_pass

if TYPE_CHECKING:
    from precision_scope._ledger import ScopeKey
    from precision_scope._owners import Owner

# An entry's rank is that of its level, or one of these two above all levels.
ASKS_NOTHING: Final = len(LEVELS)
ENDED: Final = ASKS_NOTHING + 1

RANKS: dict[object, int] = {None: ASKS_NOTHING, **{level.value: level.rank for level in LEVELS}}
"""The rank of each valid argument of a scope, strings and members alike."""


def force_level(level: Float32MatmulPrecision) -> None:
    """Have whoever asks for any level get this one."""
    RANKS.update({asked.value: level.rank for asked in LEVELS})


class Entry:
    """One entered scope.

    It has no ``__init__``: entering a scope is the hot path, and a call in
    Python takes longer than setting the attributes.

    Attributes:
        parent: The entry it was entered in, by context.
        owner: The thread or task that entered it.
        key: Stands for the scope object.
        rank: The rank of the level it asks for, ASKS_NOTHING or ENDED; unset before it is live.
        over: The nearest entry of the same owner that it covers; see the ledger.
        covers: How many live entries cover it directly; see the ledger.
        backward_pass: The number of the backward pass that it was entered in, -1
            for none. This one and the next are only set while nodes are tagged.
        covered_by: The nearest entry outside of it that covers backward passes.
    """

    __slots__ = (
        "__weakref__",
        "backward_pass",
        "covered_by",
        "covers",
        "key",
        "over",
        "owner",
        "parent",
        "rank",
    )

    parent: Entry | None
    owner: Owner
    key: ScopeKey
    rank: int
    over: Entry
    covers: int
    backward_pass: int
    covered_by: Entry | None


top: ContextVar[Entry | None] = ContextVar("precision_scope", default=None)
"""The innermost entry of the context, or one that has ended inside of it."""


def innermost() -> Entry | None:
    """Return the innermost live entry of the calling context."""
    entry = top.get()
    while entry is not None and entry.rank == ENDED:
        entry = entry.parent
    return entry


def wanted() -> Float32MatmulPrecision | None:
    """Return the level that the calling context asks for; None outside scopes."""
    rank = wanted_rank()
    return None if rank == ASKS_NOTHING else LEVELS[rank]


def wanted_rank() -> int:
    """Return the rank of that level; ASKS_NOTHING outside scopes."""
    if tagging:
        tag = tag_of_running_node()
        if tag is not None:
            return _asked_inside(running_pass(), tag)
    rank = asked(top.get())
    if rank == ASKS_NOTHING:
        # The threads in which autograd runs the nodes of other devices than the
        # CPU have no scopes of their own.
        context = context_of_backward()
        if context is not None:
            rank = asked(context.get(top))
    return rank


# Autograd nodes that scopes with backward=True cover have the rank of their level
# in their metadata, by this name.
TAG: Final = "precision_scope"

tagging: list[Any] = []
"""Holds the module ``_covering`` once there may be such nodes."""


def tag_of_running_node() -> int | None:
    """Return the tag of the autograd node that this thread runs the backward of, if any."""
    node = running_node()
    return None if node is None else node.metadata.get(TAG)


def _asked_inside(backward_pass: int, tag: int) -> int:
    """Return the rank that the scopes entered inside a backward pass ask for, else a node's own."""
    entry = top.get()
    while entry is not None:
        if getattr(entry, "backward_pass", -1) != backward_pass:
            break
        rank = entry.rank  # once: another thread may end the entry
        if rank < ASKS_NOTHING:
            return rank
        entry = entry.parent
    return tag


def covering(entry: Entry | None) -> Entry | None:
    """Return the innermost live entry, from this one outwards, that covers backward passes."""
    if entry is not None and not entry.key.covers_backward:
        entry = getattr(entry, "covered_by", None)
    while entry is not None and entry.rank >= ASKS_NOTHING:
        entry = getattr(entry, "covered_by", None)
    return entry


def asked(entry: Entry | None) -> int:
    """Return the rank that the innermost live entry asks for, from this one outwards."""
    while entry is not None:
        rank = entry.rank  # once: another thread may end the entry
        if rank < ASKS_NOTHING:
            return rank
        entry = entry.parent
    return ASKS_NOTHING
