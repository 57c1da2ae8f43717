"""Reading a Dockerfile well enough to test it: stages, continued lines, comments between them, and here-documents."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEREDOC = re.compile(r"<<-?(['\"]?)(\w+)\1")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in upper case, its text with continued lines joined, its here-documents by name."""

    keyword: str
    text: str
    documents: dict[str, str]
    stage: str  # the name of its stage; "" before the first FROM


def parse(content: str) -> list[Instruction]:
    """The instructions in order. Raises ValueError for a here-document that does not end."""
    found: list[Instruction] = []
    stage = ""
    lines = iter(content.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        text = line.rstrip()
        while text.endswith("\\"):
            following = next(lines)
            if not following.lstrip().startswith("#"):
                text = text[:-1] + following.rstrip()
        documents = {name: _document(lines, name) for _, name in _HEREDOC.findall(text)}
        keyword, _, rest = text.strip().partition(" ")
        if keyword == "FROM":
            stage = rest.split(" AS ")[1]
        found.append(Instruction(keyword, rest.strip(), documents, stage))
    return found


def _document(lines, name: str) -> str:
    body = []
    for line in lines:
        if line == name:
            return "".join(f"{part}\n" for part in body)
        body.append(line)
    raise ValueError(f"the here-document {name} does not end")
