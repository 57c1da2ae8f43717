"""Which node is to have which image, and where on it the archive goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.files.errors import UsageError
from cluster.images.delivery import Target
from cluster.images.engine import Image
from cluster.inventory.nodes import Node

SHARED_FOLDER = "burst-images"  # below the first writable folder of the site's storage.shared


def targets_of(nodes: Sequence[Node], *, image: str | None, folder: str | None, shared: bool) -> list[Target]:
    """One target per node: `image`, or what its site's container names; `folder`, or what its site shares.

    Raises UsageError for a node about which neither says anything.
    """
    return [
        Target(
            name=node.name,
            host=node.host,
            image=tagged(image or _site_image(node)),
            folder=folder or (_shared_folder(node) if shared else None),
        )
        for node in nodes
    ]


def check_ids(nodes: Sequence[Node], images: Mapping[str, Image]) -> None:
    """Raises UsageError when a site asks for another image of the same name than the one that is here."""
    for node in nodes:
        container = node.site.container
        here = images.get(tagged(container.image)) if container.image else None
        if here is not None and container.image_id is not None and container.image_id != here.image_id:
            raise UsageError(
                f"{node.name} is to have {here.name} with the id {container.image_id[:19]}, but here it is "
                f"{here.image_id[:19]}; build that one, or correct container.image_id"
            )


def tagged(image: str) -> str:
    """The name with its tag: docker reads one without as `latest`, but saves all tags of it.

    Raises UsageError for an image given by its digest or id, which has no name to arrive under.
    """
    if "@" in image or image.startswith("sha256:"):
        raise UsageError(f"the image {image} has no name to arrive under; give it one with docker tag, and name that")
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


def _site_image(node: Node) -> str:
    if node.site.container.image is None:
        raise UsageError(f"nothing says which image {node.name} needs; give --image, or container.image in its site")
    return node.site.container.image


def _shared_folder(node: Node) -> str:
    for path in node.site.storage.shared:
        if path.write:
            return f"{path.path.rstrip('/')}/{SHARED_FOLDER}"
    raise UsageError(
        f"nothing says which writable folder {node.name} shares; give --folder, or storage.shared in its site"
    )
