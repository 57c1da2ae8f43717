"""Ranges are written as they are read."""

import pytest

from cluster.inventory.ranges import expand, fold


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["gpu01", "gpu02", "gpu03"], "gpu[01-03]"),
        (["gpu8", "gpu9", "gpu10"], "gpu[8-10]"),
        (["gpu08", "gpu09", "gpu10", "gpu12"], "gpu[08-10,12]"),
        (["gpu3", "gpu1"], "gpu[3,1]"),
        (["10.0.0.9", "10.0.0.10"], "10.0.0.[9-10]"),
        (["fd00::1", "fd00::2"], "fd00::[1-2]"),
        (["r1n01.lab", "r1n02.lab"], "r1n[01-02].lab"),
        (["a99", "a100", "a0101"], "a[99-100,0101]"),
        (["head"], "head"),
        (["gpu7"], "gpu7"),
    ],
)
def test_names_fold_into_one_range_that_says_exactly_them(names, pattern):
    assert fold(names) == pattern
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("gpu[01-03,07],login2", ["gpu01", "gpu02", "gpu03", "gpu07", "login2"]),
        ("n[0-10:2]", ["n0", "n2", "n4", "n6", "n8", "n10"]),
        ("n[01-10:4]", ["n01", "n05", "n09"]),
        ("n[098-102:2]-ib,a", ["n098-ib", "n100-ib", "n102-ib", "a"]),
        ("r[1-2]n[01-02],r3n[1,4-6:2]", ["r1n01", "r1n02", "r2n01", "r2n02", "r3n1", "r3n4", "r3n6"]),
        ("n[3-3:5]", ["n3"]),
    ],
)
def test_lists_of_nodes_are_read_as_slurm_writes_them(nodelist, names):
    assert expand(nodelist) == names


def test_a_list_that_stands_for_far_too_many_nodes_is_refused():
    with pytest.raises(ValueError, match="18000 hosts; expected at most 10000"):
        expand("a[1-9000],b[1-9000]")


@pytest.mark.parametrize("names", [["a1", "b1"], ["r1n1", "r2n2"], ["a1", "a1b2"], ["head", "head"], ["a", "a1"]])
def test_names_that_differ_otherwise_do_not_fold(names):
    assert fold(names) is None


def test_every_two_numbers_fold_and_expand_to_themselves():
    numbers = [str(number) for number in range(120)] + [str(number).zfill(3) for number in range(120)]
    for first in numbers:
        for second in numbers:
            names = [f"n{first}", f"n{second}"]
            if first != second:
                assert expand(fold(names)) == names
