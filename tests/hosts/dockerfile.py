"""Reading a Dockerfile well enough to test it: stages, continued lines, and comments between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in upper case, and its text with continued lines joined."""

    keyword: str
    text: str
    stage: str  # the name of its stage; "" before the first FROM


def parse(content: str) -> list[Instruction]:
    """The instructions in order. Raises ValueError for a here-document, which buildah before 1.33 does not know."""
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
        if "<<" in text:
            raise ValueError(f"{text} begins a here-document; copy a file instead")
        keyword, _, rest = text.strip().partition(" ")
        if keyword == "FROM":
            stage = rest.split(" AS ")[1]
        found.append(Instruction(keyword, rest.strip(), stage))
    return found
