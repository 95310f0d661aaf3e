"""Chat templates as Transformers renders them, with its variables, filters and tags.

text, spans = render(template, dict(messages=[...], add_generation_prompt=False))

A template comes with a downloaded model, so it runs in a sandbox. The sandbox stops no
loop and no text that fills the memory: call this in a process with limits
(`models.huggingface.limits`).
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Characters of a rendered conversation
MOST_TEXT = 2**24
Spans = list[tuple[int, int]]


class Answers(jinja2.ext.Extension):
    """The tags `{% generation %}` and `{% endgeneration %}` around answers.

    Attributes:
      written: Number of characters that a rendering has written.
      found: Where answers begin in its text, and their text.
    """

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}
        self.written = 0
        self.found: list[tuple[int, str]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return a call of `_noted` on the body of the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_noted")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _noted(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.found.append((self.written, text))
        return text


def render(
    template: str, variables: Mapping[str, Any], date: str | None = None
) -> tuple[str, Spans]:
    """Return a conversation as text, and where its tags of answers begin and end.

    Args:
      template: Source of the template.
      variables: Its variables.
      date: Day of `strftime_now`, such as "2026-11-28"; None is now.

    Raises:
      ValueError: the text is longer than `MOST_TEXT`, or tags of answers are not at the
        top level of the template.
      Exception: whatever the template raises.
    """
    compiled = _compiled(template, date)
    answers = compiled.environment.extensions[Answers.identifier]
    assert isinstance(answers, Answers)
    answers.written = 0
    answers.found = []
    parts: list[str] = []
    for part in compiled.generate(**variables):
        parts.append(part)
        answers.written += len(part)
        if answers.written > MOST_TEXT:
            raise ValueError(f"its text is longer than {MOST_TEXT:,} characters")
    text = "".join(parts)
    for begin, answer in answers.found:
        # A macro or {% set %} writes later, and perhaps somewhere else
        if not text.startswith(answer, begin):
            raise ValueError("its tags {% generation %} are not at the top level")
    return text, [(begin, begin + len(answer)) for begin, answer in answers.found]


@functools.lru_cache(maxsize=8)
def _compiled(template: str, date: str | None) -> jinja2.Template:
    """Return a template in the environment of Transformers."""

    def strftime_now(form: str) -> str:
        if date is None:
            return datetime.datetime.now().strftime(form)
        return datetime.datetime.fromisoformat(date).strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Answers, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's escapes of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
