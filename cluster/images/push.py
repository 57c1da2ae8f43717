"""An image to all nodes: choose each node's image, look for it there, save it once, deliver it where it is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from cluster.files.errors import UsageError
from cluster.images.archive import Archive, save
from cluster.images.delivery import Delivered, Target, Watch, collect, deliver, deposit, look, withdraw
from cluster.images.engine import Engine, Image, ImageFailed, Key
from cluster.inventory.nodes import Node
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Unreachable

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a push on one node."""

    node: str
    image: str
    state: Literal["present", "loaded", "failed"]
    finding: str  # a sentence
    sent_bytes: int = 0
    seconds: float = 0.0  # from its turn to its end, where an image was delivered


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The reason why a node has no result."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How images are delivered."""

    connect: Connect
    shared: bool  # one copy in a folder all nodes see, instead of one for each
    archives: Path  # here, until all nodes have them
    keep: bool  # archives stay, here and in the shared folder
    at_once: int
    seconds: float  # per node
    watch: Watch
    on_saved: Callable[[str, int], None]  # image and bytes written so far


def push(targets: Sequence[Target], images: Mapping[Key, Image], way: Way) -> list[Outcome]:
    """Deliver to each target its image, which `images` holds as it is here; outcomes in the targets' order.

    A failure of one node is its own outcome; an image that cannot be saved here fails on all nodes it is for.
    """
    outcomes: dict[str, Outcome] = {}
    for target, found in _asked(targets, way, partial(_look, way=way)):
        if isinstance(found, _Refusal):
            outcomes[target.name] = _outcome(target, "failed", found.reason)
        elif found is not None and found.same_as(images[target.key]):
            outcomes[target.name] = _outcome(target, "present", _has(found, images[target.key]))
    missing = [target for target in targets if target.name not in outcomes]
    for key in dict.fromkeys(target.key for target in missing):
        lacking = [target for target in missing if target.key == key]
        try:
            archive = save(images[key], way.archives, partial(way.on_saved, images[key].name))
        except ImageFailed as error:
            outcomes |= {target.name: _outcome(target, "failed", str(error)) for target in lacking}
            continue
        brought = _by_shared_folder(lacking, archive, way) if way.shared else _bring(lacking, archive, way, deliver)
        outcomes |= {outcome.node: outcome for outcome in brought}
        if not way.keep and all(outcomes[target.name].state == "loaded" for target in lacking):
            archive.path.unlink(missing_ok=True)
    return [outcomes[target.name] for target in targets]


def _look(target: Target, way: Way) -> Image | None:
    return look(target, way.connect, way.seconds, way.watch)


def _by_shared_folder(targets: Sequence[Target], archive: Archive, way: Way) -> list[Outcome]:
    """One copy for each folder, written through the first node that can; then all nodes load it."""
    outcomes: list[Outcome] = []
    for folder in dict.fromkeys(target.folder for target in targets):
        those = [target for target in targets if target.folder == folder]
        refusals: dict[str, Outcome] = {}
        for writer in those:
            try:
                sent = deposit(writer, archive, way.connect, way.seconds, way.watch)
            except (ImageFailed, Unreachable) as error:
                refusals[writer.name] = _outcome(writer, "failed", str(error))
                continue
            loaded = _bring(those, archive, way, collect)
            outcomes += [replace(one, sent_bytes=sent) if one.node == writer.name else one for one in loaded]
            if not way.keep and all(outcome.state == "loaded" for outcome in loaded):
                # Every node has its image: that a copy stays when this fails costs disk space and nothing else.
                with suppress(Unreachable):
                    withdraw(writer, archive, way.connect, way.seconds)
            break
        else:
            outcomes += refusals.values()
    return outcomes


def _bring(
    targets: Sequence[Target],
    archive: Archive,
    way: Way,
    bring: Callable[[Target, Archive, Connect, float, Watch], Delivered],
) -> list[Outcome]:
    """All of them side by side."""

    def timed(target: Target) -> tuple[Delivered, float]:
        began = time.monotonic()
        done = bring(target, archive, way.connect, way.seconds, way.watch)
        return done, time.monotonic() - began

    outcomes = []
    for target, answer in _asked(targets, way, timed):
        if isinstance(answer, _Refusal):
            outcomes.append(_outcome(target, "failed", answer.reason))
            continue
        done, seconds = answer
        finding = _has(done.node_image, archive.image)
        if done.attempts > 1:
            finding += f"; took {done.attempts} attempts"
        outcomes.append(_outcome(target, "loaded", finding, sent_bytes=done.sent_bytes, seconds=seconds))
    return outcomes


def _asked(
    targets: Sequence[Target], way: Way, work: Callable[[Target], Answer]
) -> Iterator[tuple[Target, Answer | _Refusal]]:
    """As `on_each`, where a node that fails is an answer too."""

    def guarded(target: Target) -> Answer | _Refusal:
        try:
            return work(target)
        except ImageFailed as error:
            return _Refusal(str(error))

    for target, answer in on_each(targets, guarded, way.seconds, way.at_once):
        yield target, _Refusal(str(answer)) if isinstance(answer, Unreachable) else answer


def _has(found: Image, here: Image) -> str:
    """The node's image, with a note when its engine counts ids differently."""
    if found.image_id == here.image_id:
        return found.image_id[:19]
    return f"the same content as {here.image_id[:19]}, which this node's engine calls {found.image_id[:19]}"


def _outcome(
    target: Target,
    state: Literal["present", "loaded", "failed"],
    finding: str,
    *,
    sent_bytes: int = 0,
    seconds: float = 0.0,
) -> Outcome:
    return Outcome(
        node=target.name, image=target.image, state=state, finding=finding, sent_bytes=sent_bytes, seconds=seconds
    )


SHARED_FOLDER = "burst-images"  # below the first writable folder of the site's storage.shared


def targets_of(
    nodes: Sequence[Node], *, image: str | None, engine: Engine | None, folder: str | None, shared: bool
) -> list[Target]:
    """One target per node: `image` and `engine`, or its site's; `folder`, or the one that its site shares.

    Raises UsageError for a node that has neither.
    """
    return [
        Target(
            name=node.name,
            host=node.host,
            image=tagged(image or _site_image(node)),
            engine=engine or _site_engine(node),
            folder=folder or (_shared_folder(node) if shared else None),
        )
        for node in nodes
    ]


def check_ids(nodes: Sequence[Node], targets: Sequence[Target], images: Mapping[Key, Image]) -> None:
    """Raises UsageError when a site names another id for an image than the one here has."""
    for node, target in zip(nodes, targets, strict=True):
        container = node.site.container
        named = container.image is not None and tagged(container.image) == target.image
        here = images[target.key] if named else None
        if here is not None and container.image_id is not None and container.image_id != here.image_id:
            raise UsageError(
                f"{node.name} is to have {here.name} with the id {container.image_id[:19]}, but here it is "
                f"{here.image_id[:19]}; build that one, or correct container.image_id"
            )


def tagged(image: str) -> str:
    """The name with its tag: docker reads one without as `latest`, but saves all tags of it.

    Raises UsageError for an image given by its digest or id, which has no name that nodes could find it by.
    """
    if "@" in image or image.startswith("sha256:"):
        raise UsageError(f"the image {image} has no name to load it under; give it one with docker tag, and name that")
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


def _site_image(node: Node) -> str:
    if node.site.container.image is None:
        raise UsageError(f"no image is named for {node.name}; give --image, or container.image in its site")
    return node.site.container.image


def _site_engine(node: Node) -> Engine:
    return "docker" if node.site.container.engine == "none" else node.site.container.engine


def _shared_folder(node: Node) -> str:
    for path in node.site.storage.shared:
        if path.write:
            return f"{path.path.rstrip('/')}/{SHARED_FOLDER}"
    raise UsageError(
        f"no writable shared folder is named for {node.name}; give --folder, or storage.shared in its site"
    )
