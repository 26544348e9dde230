"""160 tools: eight things that can be done to twenty kinds of objects. Names and schemas are alike on purpose.

A tool is told from its neighbours by verb and object alone: `cancel_hotel_booking` stands beside `cancel_train_booking` and
`update_hotel_booking`, with the same parameter names and codes of the same form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from assay_evaluate.tasks.tools.parameters import (
    ACCESS,
    FORMAT,
    HISTORY,
    LIMIT,
    NOTIFY,
    PARAMETERS,
    REASON,
    STATUS,
    Parameter,
    Schema,
    code_of,
    object_of,
)

CATALOGUE_VERSION = 1
"""Part of what items are made from: grows when any tool or wording changes."""


class ObjectKind(NamedTuple):
    """A kind of object. Codes begin with `prefix`; the first two parameters are required to make one."""

    noun: str
    prefix: str
    parameters: tuple[str, str, str, str]


KINDS: tuple[ObjectKind, ...] = (
    ObjectKind("hotel booking", "HB", ("period", "quantity", "contact", "size")),
    ObjectKind("train booking", "TB", ("date", "quantity", "time", "priority")),
    ObjectKind("flight booking", "FB", ("period", "contact", "quantity", "currency")),
    ObjectKind("table reservation", "TR", ("date", "time", "quantity", "contact")),
    ObjectKind("calendar event", "CE", ("title", "period", "attendees", "address")),
    ObjectKind("team meeting", "TM", ("title", "attendees", "date", "duration_minutes")),
    ObjectKind("training course", "TC", ("title", "period", "quantity", "tags")),
    ObjectKind("support ticket", "ST", ("title", "priority", "owner", "tags")),
    ObjectKind("repair order", "RO", ("title", "address", "priority", "amount")),
    ObjectKind("purchase order", "PO", ("amount", "currency", "quantity", "owner")),
    ObjectKind("customer invoice", "CI", ("amount", "currency", "contact", "date")),
    ObjectKind("expense claim", "EC", ("amount", "currency", "date", "tags")),
    ObjectKind("insurance policy", "IP", ("contact", "period", "amount", "size")),
    ObjectKind("parcel shipment", "PS", ("address", "size", "contact", "date")),
    ObjectKind("storage unit", "SU", ("size", "address", "temperature_celsius", "period")),
    ObjectKind("heating schedule", "HS", ("temperature_celsius", "time", "period", "title")),
    ObjectKind("project milestone", "PM", ("title", "date", "owner", "priority")),
    ObjectKind("press release", "PR", ("title", "date", "channel", "tags")),
    ObjectKind("survey campaign", "SC", ("title", "channel", "quantity", "period")),
    ObjectKind("equipment loan", "EL", ("title", "period", "owner", "quantity")),
)


class ToolAction(NamedTuple):
    """Something done to an object. requests: ways to ask for it; `{noun}`, `{code}` are filled in.

    parameters: of a kind, as (required, optional).
    """

    verb: str
    description: str
    requests: tuple[str, ...]
    parameters: Callable[[ObjectKind], tuple[tuple[Parameter, ...], tuple[Parameter, ...]]]


def _own(kind: ObjectKind) -> tuple[Parameter, ...]:
    return tuple(PARAMETERS[name] for name in kind.parameters)


def _changes(kind: ObjectKind) -> Parameter:
    """A nested object: one or two of the kind's parameters, with new values."""
    own = _own(kind)
    schema: Schema = {
        **object_of({parameter.name: parameter.schema for parameter in own}, (), "What changes, and only that."),
        "minProperties": 1,
    }

    def draw(chance: Any) -> dict[str, Any]:
        chosen = sorted(chance.sample(range(len(own)), chance.randint(1, 2)))
        return {own[i].name: own[i].draw(chance) for i in chosen}

    return Parameter("changes", schema, draw)


ACTIONS: tuple[ToolAction, ...] = (
    ToolAction(
        "create", "Make a new {noun}.",
        ("Please create a new {noun}.", "I need a new {noun}, create it for me."),
        lambda kind: (_own(kind)[:2], (*_own(kind)[2:], NOTIFY)),
    ),
    ToolAction(
        "update", "Change an existing {noun}.",
        ("Please update the {noun} {code}.", "The {noun} {code} is out of date, update it."),
        lambda kind: ((code_of(kind.prefix), _changes(kind)), (NOTIFY,)),
    ),
    ToolAction(
        "cancel", "Cancel a {noun} for good.",
        ("Please cancel the {noun} {code}.", "Cancel the {noun} {code} for me."),
        lambda kind: ((code_of(kind.prefix), REASON), (NOTIFY,)),
    ),
    ToolAction(
        "search", "Search the list of every {noun}.",
        ("Search for every {noun} that fits.", "Which {noun} fits? Please search for it."),
        lambda kind: ((STATUS,), (LIMIT, PARAMETERS["owner"], PARAMETERS["tags"])),
    ),
    ToolAction(
        "share", "Give people access to a {noun}.",
        ("Please share the {noun} {code}.", "Share the {noun} {code} with the people named."),
        lambda kind: ((code_of(kind.prefix), PARAMETERS["attendees"], ACCESS), (NOTIFY,)),
    ),
    ToolAction(
        "approve", "Approve a {noun} that waits for a decision.",
        ("Please approve the {noun} {code}.", "The {noun} {code} is fine, approve it."),
        lambda kind: ((code_of(kind.prefix), PARAMETERS["owner"]), (PARAMETERS["date"], NOTIFY)),
    ),
    ToolAction(
        "label", "Put labels on a {noun}.",
        ("Please label the {noun} {code}.", "Label the {noun} {code} for me."),
        lambda kind: ((code_of(kind.prefix), PARAMETERS["tags"]), (PARAMETERS["priority"],)),
    ),
    ToolAction(
        "export", "Save a {noun} as a file.",
        ("Please export the {noun} {code}.", "Export the {noun} {code} to a file."),
        lambda kind: ((code_of(kind.prefix), FORMAT), (HISTORY, PARAMETERS["period"])),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """One tool; `required` and `optional` together are its parameters."""

    action: ToolAction
    kind: ObjectKind
    required: tuple[Parameter, ...]
    optional: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        return f"{self.action.verb}_{self.kind.noun.replace(' ', '_')}"

    @property
    def schema(self) -> Schema:
        """JSON schema of its arguments."""
        properties = {parameter.name: parameter.schema for parameter in (*self.required, *self.optional)}
        return object_of(properties, tuple(parameter.name for parameter in self.required))

    @property
    def definition(self) -> dict[str, Any]:
        """As the API wants it in `tools`.

        Without `strict`: where a server obeys that, a grammar makes every call valid, and nothing is learnt of the model.
        """
        description = self.action.description.format(noun=self.kind.noun)
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": self.schema},
        }


@functools.cache
def all_tools() -> tuple[Tool, ...]:
    """Every tool, by kind and then action."""
    return tuple(Tool(action, kind, *action.parameters(kind)) for kind in KINDS for action in ACTIONS)
