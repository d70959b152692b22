"""The form: one component for each field of a request, made from the field's type and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeAlias

import gradio as gr

from sdamd import batch, scheduler
from sdamd.checkpoint import Family
from sdamd.request import Request, limits_of, type_of
from ui.i18n import help_key, label_key, say

Component: TypeAlias = Any
"""Any component of Gradio, which ships no types."""

Choices: TypeAlias = list[tuple[Any, str]]


def make_field(asked: Field[Any], i18n: gr.I18n) -> Component:
    """The component for a field. A field that may be left to the model starts empty.

    Numbers are asked for as text: a number box of Gradio cannot start empty, rounds what is
    beyond 2**53, and refuses what is out of range before the request can name all problems.
    The page's script makes the arrow keys count, by the step in the class.
    """
    limits = limits_of(asked)
    shared: dict[str, Any] = {
        "label": i18n(label_key(asked)),
        "info": i18n(help_key(asked)),
        "elem_id": f"field-{asked.name}",
        "interactive": True,
        "min_width": 100,
    }
    if asked.name in ("checkpoint", "scheduler"):
        first = i18n("embedded" if asked.name == "checkpoint" else "own")
        known = scheduler.names() if asked.name == "scheduler" else []
        return gr.Dropdown(
            choices=with_empty(first, known),
            value="",
            allow_custom_value=True,
            **shared,
        )
    if limits.choices:
        return gr.Dropdown(choices=list(limits.choices), value=asked.default, **shared)
    if limits.multiline:
        shared |= {"lines": 5 if asked.name == "prompt" else 2, "max_lines": 8}
        shared["placeholder"] = i18n("example") if asked.name == "prompt" else None
    elif type_of(asked) is not str:
        shared |= {"max_lines": 1, "elem_classes": [f"step-{step_of(asked):g}"]}
        shared["placeholder"] = i18n("drawn") if asked.name == "seed" else None
    return gr.Textbox(value="" if asked.default is None else str(asked.default), **shared)


def step_of(asked: Field[Any]) -> float:
    """By how much the arrow keys change a number; for a seed that reads as the next picture's."""
    return limits_of(asked).multiple_of or (1 if type_of(asked) is int else 0.5)


def make_fields(i18n: gr.I18n, names: Sequence[str]) -> dict[str, Component]:
    """The components of the named fields, in the order of the request."""
    return {asked.name: make_field(asked, i18n) for asked in fields(Request) if asked.name in names}


def with_empty(first: object, names: Sequence[str]) -> Choices:
    """Choices of a dropdown, with the empty one first."""
    return [(first, ""), *((name, name) for name in names)]


def own_values(family: Family, language: str) -> dict[str, Any]:
    """What the components show where they are empty: the values that the model's family brings."""
    own = next(batch.expand(Request(), family))
    updates: dict[str, Any] = {}
    for asked in fields(Request):
        if asked.default is not None or asked.name == "seed":
            continue
        value = getattr(own, asked.name)
        if value is None:  # of a mode that is off
            continue
        if asked.name == "scheduler":
            first = say(language, "own is", value=value)
            updates[asked.name] = gr.update(choices=with_empty(first, scheduler.names()))
        else:
            updates[asked.name] = gr.update(placeholder=f"{value:g}")
    return updates


def to_request(values: Mapping[str, object]) -> Request:
    """The request that the components' values stand for; an empty one is left to the model.

    Raises:
        BadRequest: with every problem at once.
    """
    return Request.from_dict({
        name: None if isinstance(value, str) and not value.strip() else value
        for name, value in values.items()
    })  # fmt: skip
