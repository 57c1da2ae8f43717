"""Free space for an image, checked before anything is sent."""

import os

import pytest

from cluster.images.archive import save
from cluster.images.delivery import ask_space
from cluster.images.engine import Image, ImageFailed, find_image
from cluster.transport.reach import LocalRunner

TOO_LARGE = 2**60


class Edited(LocalRunner):
    """This machine, with a part of the command replaced."""

    def __init__(self, old, new):
        self.old, self.new = old, new

    def run(self, command, **options):
        return super().run([part.replace(self.old, self.new) for part in command], **options)


def test_the_folder_is_made_and_its_free_space_is_the_file_systems(docker, tmp_path):
    folder = tmp_path / "it's new" / "below"
    space = ask_space(LocalRunner(), str(folder), "docker", 30)
    assert folder.is_dir()
    assert space.folder == str(folder)
    system = os.statvfs(folder)
    assert space.archives.free_bytes == pytest.approx(system.f_bavail * system.f_frsize, rel=0.05)
    assert space.images is not None
    assert space.images.file_system == space.archives.file_system


def test_archive_and_image_have_to_fit_together_on_one_disk(docker, tmp_path):
    space = ask_space(LocalRunner(), str(tmp_path), "docker", 30)
    two_thirds = space.archives.free_bytes * 2 // 3
    space.check(two_thirds, 0)
    space.check(0, two_thirds)
    with pytest.raises(ImageFailed, match="GiB free, the image needs"):
        space.check(two_thirds, two_thirds)


def test_on_two_disks_each_has_to_fit_on_its_own(docker):
    folder = f"/dev/shm/burst-images-{os.getpid()}"
    space = ask_space(LocalRunner(), folder, "docker", 30)
    os.rmdir(folder)
    if space.images is None or space.images.file_system == space.archives.file_system:
        pytest.skip("/dev/shm is on the same file system as temporary files here")
    space.check(space.archives.free_bytes // 2, space.images.free_bytes // 2)
    with pytest.raises(ImageFailed, match="docker's folder has"):
        space.check(0, TOO_LARGE)
    with pytest.raises(ImageFailed, match=r"burst-images-\d+ has"):
        space.check(TOO_LARGE, 0)


def test_without_a_folder_archives_go_to_one_that_only_this_user_can_open(docker, tmp_path):
    space = ask_space(Edited("/var/tmp", str(tmp_path)), None, "docker", 30)
    assert space.folder == f"{tmp_path}/burst-images-{os.getuid()}"
    assert os.stat(space.folder).st_mode & 0o777 == 0o700


def test_another_users_folder_is_not_used(docker, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"burst-images-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(ImageFailed, match="belongs to another user"):
        ask_space(Edited("/var/tmp", str(tmp_path)), None, "docker", 30)


def test_a_folder_that_cannot_be_made_is_one_sentence(docker, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ImageFailed, match=r"no place for the archive \(mkdir: .*give --folder"):
        ask_space(LocalRunner(), str(tmp_path / "file" / "below"), "docker", 30)


def test_a_docker_whose_folder_cannot_be_seen_leaves_its_disk_unjudged(docker, tmp_path):
    space = ask_space(Edited('"$2" info', "false info"), str(tmp_path), "docker", 30)
    assert space.images is None
    space.check(1, TOO_LARGE)


def test_a_disk_here_that_is_too_small_stops_before_anything_is_written(docker, tmp_path):
    image = Image(engine="docker", name="huge:1", image_id="sha256:1", content="1", size_bytes=TOO_LARGE)
    with pytest.raises(ImageFailed, match=r"free, and huge:1 may take .*make room there"):
        save(image, tmp_path / "archives", lambda size: None)
    assert list((tmp_path / "archives").iterdir()) == []
    assert docker.calls("image save") == 0


def test_a_save_that_fails_leaves_nothing(docker, tmp_path):
    docker.add("lab:1", 1, b"layers")
    image = find_image(LocalRunner(), "docker", "lab:1", 30)
    (docker.folder / "images" / "lab:1").unlink()
    with pytest.raises(ImageFailed, match="lab:1 was not saved"):
        save(image, tmp_path / "archives", lambda size: None)
    assert list((tmp_path / "archives").iterdir()) == []


@pytest.mark.parametrize("program", ["zstd", "gzip"])
def test_an_archive_is_taken_again_only_for_the_same_image_and_name(docker, tmp_path, monkeypatch, program):
    if program == "gzip":  # a machine without zstd
        monkeypatch.setattr("cluster.images.archive._COMPRESSORS", (("gzip", ["-1", "-c"], ".tar.gz"),))
    docker.add("lab:1", 1, b"layers")
    docker.add("lab:2", 1, b"layers")
    docker.add("other:1", 2, b"layers")
    images = [find_image(LocalRunner(), "docker", name, 30) for name in ("lab:1", "lab:1", "lab:2", "other:1")]
    archives = [save(image, tmp_path, lambda size: None) for image in images]
    assert archives[0] == archives[1]
    assert len({archive.path for archive in archives}) == 3
    assert docker.calls("image save") == 3
    assert archives[0].path.stat().st_size == archives[0].size_bytes
