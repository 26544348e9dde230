"""Parameters of generated tools: a JSON schema, a way to draw a value, and the words that say the value in a question.

Values stand in the question word for word (dates in ISO form, names in quotes), so that there is one right argument and
no judgement in comparing. Every leaf of a value can be found in the sentence that was made from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool. `draw` makes a value that its schema accepts."""

    name: str
    schema: Schema
    draw: Callable[[random.Random], Any]


TITLES = ("Quarterly review", "Harbour survey", "Summer concert", "Roof repair", "Budget draft", "Night shift", "Book fair",
          "Garden plan", "Sensor upgrade", "River cleanup", "Chess evening", "Spring menu")  # fmt: skip
PEOPLE = ("Amara Diallo", "Bo Lindqvist", "Carla Mendes", "Dmitri Orlov", "Elif Kaya", "Farid Rahimi", "Grace Okafor",
          "Hana Sato", "Ivan Petrov", "Julia Weiss", "Kofi Mensah", "Lena Novak")  # fmt: skip
STREETS = ("Elm Street", "Harbour Road", "Mill Lane", "Station Square", "Orchard Way", "Bridge Street", "Castle Hill")
CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Toronto", "Gdansk", "Lima", "Perth")
TAGS = ("billing", "internal", "legal", "marketing", "outdoor", "partner", "research", "training")


def _date(draw: random.Random) -> str:
    return f"2027-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"


def _time(draw: random.Random) -> str:
    return f"{draw.randint(0, 23):02d}:{draw.choice((0, 15, 30, 45)):02d}"


def _email(draw: random.Random) -> str:
    return draw.choice(PEOPLE).lower().replace(" ", ".") + "@example.org"


def _period(draw: random.Random) -> dict[str, Any]:
    month, first = draw.randint(1, 12), draw.randint(1, 14)
    return {"start": f"2027-{month:02d}-{first:02d}", "end": f"2027-{month:02d}-{first + draw.randint(1, 14):02d}"}


def _address(draw: random.Random) -> dict[str, Any]:
    return {"street": draw.choice(STREETS), "house_number": draw.randint(1, 199), "city": draw.choice(CITIES)}


def _contact(draw: random.Random) -> dict[str, Any]:
    name = draw.choice(PEOPLE)
    return {"name": name, "email": name.lower().replace(" ", ".") + "@example.org"}


DATE: Schema = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$", "description": "Date as YYYY-MM-DD."}
TIME: Schema = {"type": "string", "pattern": r"^\d{2}:\d{2}$", "description": "Time as HH:MM, 24 hours."}
EMAIL: Schema = {"type": "string", "pattern": r"^[^@\s]+@[^@\s]+$", "description": "An e-mail address."}


def object_of(properties: dict[str, Schema], required: tuple[str, ...], description: str = "") -> Schema:
    """Schema of an object in which nothing else is allowed."""
    schema: Schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {**schema, "description": description} if description else schema


def one_of(name: str, *values: str, description: str) -> Parameter:
    """A string out of a few."""
    schema: Schema = {"type": "string", "enum": list(values), "description": description}
    return Parameter(name, schema, lambda draw: draw.choice(values))


def _integer(name: str, low: int, high: int, description: str) -> Parameter:
    schema = {"type": "integer", "minimum": low, "maximum": high, "description": description}
    return Parameter(name, schema, lambda draw: draw.randint(low, high))


def _array(name: str, items: Schema, draw_item: Callable[[random.Random], str], description: str) -> Parameter:
    def draw_items(draw: random.Random) -> list[str]:
        count = draw.randint(1, 3)
        values: dict[str, None] = {}
        while len(values) < count:
            values[draw_item(draw)] = None
        return list(values)

    return Parameter(
        name, {"type": "array", "items": items, "minItems": 1, "uniqueItems": True, "description": description}, draw_items
    )


def _flag(name: str, description: str, default: bool) -> Parameter:
    schema = {"type": "boolean", "default": default, "description": f"{description} Default: {json.dumps(default)}."}
    return Parameter(name, schema, lambda draw: not default)


PARAMETERS: dict[str, Parameter] = {
    parameter.name: parameter
    for parameter in (
        Parameter("title", {"type": "string", "minLength": 1, "description": "Title, word for word."},
                  lambda draw: draw.choice(TITLES)),
        Parameter("date", DATE, _date),
        Parameter("time", TIME, _time),
        Parameter("owner", EMAIL | {"description": "E-mail address of who is responsible."}, _email),
        _integer("quantity", 1, 99, "How many."),
        _integer("duration_minutes", 5, 480, "How long it lasts, in minutes."),
        Parameter("amount", {"type": "number", "minimum": 0, "description": "Amount of money, without the currency."},
                  lambda draw: draw.randint(20, 1999) / 2),
        Parameter("temperature_celsius", {"type": "number", "minimum": -40, "maximum": 60, "description": "Degrees Celsius."},
                  lambda draw: draw.randint(10, 60) / 2),
        one_of("currency", "EUR", "USD", "JPY", "NOK", "KES", description="Currency code."),
        one_of("priority", "low", "normal", "high", "urgent", description="How urgent it is."),
        one_of("size", "small", "medium", "large", description="Size class."),
        one_of("channel", "email", "phone", "letter", description="How people are told."),
        Parameter("period", object_of({"start": DATE, "end": DATE}, ("start", "end"), "First and last day."), _period),
        Parameter("address", object_of({"street": {"type": "string"}, "house_number": {"type": "integer", "minimum": 1},
                                        "city": {"type": "string"}}, ("street", "house_number", "city"), "Where it is."),
                  _address),
        Parameter("contact", object_of({"name": {"type": "string"}, "email": EMAIL}, ("name", "email"), "Whom to ask."),
                  _contact),
        _array("tags", {"type": "string", "enum": list(TAGS)}, lambda draw: draw.choice(TAGS), "Labels, in the order given."),
        _array("attendees", EMAIL, _email, "E-mail addresses, in the order given."),
    )
}  # fmt: skip
"""What objects consist of, by name."""

REASON = one_of("reason", "duplicate", "no_longer_needed", "too_expensive", "entered_by_mistake", description="Why.")
NOTIFY = _flag("notify", "Tell everyone concerned.", default=True)
STATUS = one_of("status", "open", "confirmed", "cancelled", "archived", description="Only those in this state.")
LIMIT = Parameter(
    "limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 10, "description": "At most so many. Default: 10."},
    lambda draw: draw.choice((3, 5, 20, 50)),
)  # fmt: skip
ACCESS = one_of("access", "view", "comment", "edit", description="What they may do.")
FORMAT = one_of("format", "pdf", "csv", "xlsx", "json", description="File format.")
HISTORY = _flag("include_history", "Also earlier versions.", default=False)


def code_of(prefix: str) -> Parameter:
    """The reference code of an object, such as HB-4821."""
    schema: Schema = {"type": "string", "pattern": rf"^{prefix}-\d{{4}}$", "description": f"Reference code, {prefix}-NNNN."}
    return Parameter("code", schema, lambda draw: f"{prefix}-{draw.randint(1000, 9999)}")


def describe_value(name: str, value: Any) -> str:
    """`notify`, False -> "notify: no"; a nested object with its own names in brackets."""
    return f"{name.replace('_', ' ')}: {_value_text(value)}"


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return f"({', '.join(describe_value(name, inner) for name, inner in value.items())})"
    if isinstance(value, list):
        return ", ".join(map(_value_text, value))
    return f'"{value}"' if isinstance(value, str) and " " in value else str(value)
