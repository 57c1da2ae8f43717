"""Chats in the words of a tokenizer's own template, with the spans that the model is to learn: the answers.

A template that marks answers itself (`{% generation %}`) is believed. Otherwise an answer is what its message adds to
the text before it, the header that asks for an answer included in what comes before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from engine.reader import read_json

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, object]  # role, content, and what else a template asks for
Span = tuple[int, int]  # characters [start, stop)

ANSWERS = "assistant"  # role of the messages that are learnt
_BEGIN, _END = "\ufdd0", "\ufdd1"  # around what a template marks; Unicode has no such characters in texts
_FILE = "chat_template.jinja"  # beside tokenizer.json, or in its configuration


class ChatTemplate:
    """The template beside a `tokenizer.json`."""

    def __init__(self, tokenizer: Path) -> None:
        """Raises ValueError where there is no template, or one that Jinja cannot read."""
        self._tokenizer = tokenizer
        self._config = _configuration(tokenizer.with_name("tokenizer_config.json"))
        self._source = self._found()
        self._marks = "{% generation" in self._source or "{%- generation" in self._source
        _ = self._template  # read now: an error in it comes before the texts are read

    def rendered(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a chat, and its answers in it. Raises ValueError for one that the template refuses, or has no
        answer."""
        whole = self._render(messages)
        for number in range(len(messages)):
            self._check(messages, number, whole)
        spans: list[Span] = []
        if self._marks:
            whole, spans = _unmarked(whole)
        else:
            for number, message in enumerate(messages):
                if message["role"] == ANSWERS:
                    before = self._render(messages[:number], asks=True)
                    after = self._render(messages[: number + 1])
                    if not (whole.startswith(after) and after.startswith(before)):
                        raise ValueError(
                            f"the chat template writes message {number + 1} in another way once others follow, so that "
                            "its answers cannot be told apart; mark them in the template with {% generation %}"
                        )
                    spans.append((len(before), len(after)))
        if not any(start < stop for start, stop in spans):
            raise ValueError(f"the chat has no answer to learn, a message whose role is {ANSWERS}; leave it out")
        return whole, spans

    def _check(self, messages: Sequence[Message], number: int, whole: str) -> None:
        """Raises ValueError for content that the template wrote as Python does in `whole`, or takes for its marks."""
        content = messages[number]["content"]
        if isinstance(content, str):
            if self._marks and (_BEGIN in content or _END in content):
                raise ValueError("a message holds the character U+FDD0 or U+FDD1, which is none of texts; remove it")
            return
        # Templates may know parts, or messages without content. One that does not writes what `str` gives.
        as_text = {**messages[number], "content": str(content)}
        try:
            same = self._render([*messages[:number], as_text, *messages[number + 1 :]]) == whole
        except ValueError:  # a template that refuses this text would not write it
            return
        if same:
            found = f"a {type(content).__name__}" if content is not None else "null"
            raise ValueError(
                f"content of message {number + 1} is {found}, which the chat template would write as it is; give a text"
            )

    def _render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """`asks`: with the header that asks for an answer at the end."""
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=asks, **self._tokens)
        except (TemplateError, TypeError, ArithmeticError, LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"the chat template refuses it ({error}); repair the messages") from error

    @property
    def _tokens(self) -> dict[str, str]:
        """Special tokens by the names that templates use."""
        found = {}
        for name, value in self._config.items():
            if isinstance(value, dict):  # written with the token's properties
                value = value.get("content")
            if name.endswith("_token") and isinstance(value, str):
                found[name] = value
        return found

    def _found(self) -> str:
        path = self._tokenizer.with_name(_FILE)
        if path.is_file():
            return path.read_text(encoding="utf-8")
        found = self._config.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
        raise ValueError(
            f"tokenizer {str(self._tokenizer)!r} has no chat template; put the model's {_FILE} or its "
            "tokenizer_config.json beside it"
        )

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` around an answer."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            def _marked(self, caller: Any) -> str:
                return _BEGIN + str(caller()) + _END

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._source)
        except TemplateError as error:
            raise ValueError(
                f"the chat template of tokenizer {str(self._tokenizer)!r} is none that Jinja reads ({error}); repair it"
            ) from error


def _configuration(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); repair it, or move it away") from error
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """The text without its marks, and the spans that they enclose."""
    spans, parts, length = [], [], 0
    for number, part in enumerate(text.split(_BEGIN)):
        answer, _, rest = part.partition(_END) if number else ("", "", part)
        if number:
            spans.append((length, length + len(answer)))
        parts += [answer, rest]
        length += len(answer) + len(rest)
    return "".join(parts), spans


def _as_json(value: object, indent: int | None = None) -> str:
    """Jinja's own would write < and > for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
