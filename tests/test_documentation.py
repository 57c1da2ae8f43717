"""What the pages say exists: links lead somewhere, commands and options are known, and files are there."""

import contextlib
import io
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from harness.cli import main
from tests.patience import AMPLE

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "results").glob("p*/*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, heading = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        if not linked.exists() or (heading and heading not in headings(linked)):
            dead.append(target)
    assert not dead


def test_every_documentation_page_can_be_found_from_the_index():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text("utf-8"))}
    assert {page for page in PAGES if page.parent == index.parent} - {index} <= linked
    assert index in {(ROOT / target).resolve() for target in LINK.findall(README.read_text("utf-8"))}


def test_every_file_of_the_tree_exists():
    paths = tree(ARCHITECTURE.read_text(encoding="utf-8"))
    assert {"engine/attention", "experiments/models", "README.md"} <= set(paths)
    local = {"results/runs"}  # made by the first run, and not in git
    assert [path for path in paths if path not in local and not (ROOT / path).exists()] == []


def test_the_tree_leaves_out_no_folder_and_no_room():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so folders of the project cannot be told from others")
    files = [Path(path) for path in listed.stdout.splitlines() if not path.startswith(".")]
    top = {str(path.parents[-2]) for path in files if len(path.parts) > 1}
    packages = {str(path.parent) for path in files if path.name == "__init__.py" and path.parts[0] != "tests"}
    packages = {name for name in packages if not name.startswith("baselines/stand_ins/")}  # one line for all of them
    assert top | packages - {"experiments"} <= set(tree(ARCHITECTURE.read_text(encoding="utf-8")))


def test_the_readme_is_a_first_screen():
    page = README.read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 150
    assert len(re.findall(r"^!\[", page, re.MULTILINE)) == 1, "one figure"
    tables = re.findall(r"^\|(?: ?-+ ?\|)+$", page, re.MULTILINE)
    assert len(tables) == 3, "the methods beside others, the steps measured, and the pages to read on"


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_lines_of_code_on_the_first_screen_give_dense_attention_alone_and_under_torchrun(launcher, tmp_path):
    [code] = [block for language, block in FENCE.findall(README.read_text("utf-8")) if language == "python"]
    assert len([line for line in code.splitlines() if line]) <= 6
    program = tmp_path / "program.py"
    program.write_text(BEFORE_THE_READMES_CODE + code + AFTER_THE_READMES_CODE)
    ended = subprocess.run(
        [sys.executable, *launcher, program], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=AMPLE, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == [f"right-of-{2 if launcher else 1}"] * (2 if launcher else 1)


BEFORE_THE_READMES_CODE = """
import torch
torch.manual_seed(0)
whole = [torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3)]
q, k, v = whole
"""

AFTER_THE_READMES_CODE = """
out.sum().backward()
q, k, v = (tensor.detach().transpose(1, 2).requires_grad_() for tensor in whole)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
(dq,) = torch.autograd.grad(dense.sum(), q)
for found, truth in ((out, dense), (cp.shard(whole[0].grad, dim=1), dq)):
    assert torch.allclose(found, cp.shard(truth.transpose(1, 2), dim=1), atol=1e-5)
print(f"right-of-{cp.size}")
"""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_option_a_page_shows_is_known(page):
    unknown = []
    for words in commands_of(page.read_text(encoding="utf-8")):
        named = [word for word in words[:2] if not word.startswith(("-", "["))]  # the second may be a subcommand
        known = burst_help(" ".join(named)) or burst_help(" ".join(named[:1]))
        options = [re.split(r"[=\]]", word)[0].lstrip("[") for word in words if word.lstrip("[").startswith("-")]
        if known is None or any(option not in known for option in options):
            unknown.append(" ".join(words))
    assert not unknown


def test_every_make_target_a_page_shows_is_known():
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = {target for page in PAGES for target in re.findall(r"[`\n]make ([a-z]+)\b", page.read_text("utf-8"))}
    assert {"demo", "test"} <= shown <= set(rules)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tree(page: str) -> list[str]:
    """Paths of the tree: two spaces of indentation per folder, the path up to the first run of two spaces."""
    block = next(text for _, text in FENCE.findall(page) if text.startswith("README.md "))
    paths: list[str] = []
    folders: list[str] = []
    for line in block.splitlines():
        entry = re.split(r" {2,}", line.strip())[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], entry.rstrip("/")]
        paths.append("/".join(folders))
    return paths


def commands_of(text: str) -> list[list[str]]:
    """Arguments of every `burst ...` on a page: lines of code blocks that are no YAML or Python, and code in prose."""
    blocks = "".join(block for language, block in FENCE.findall(text) if language in ("", "sh", "bash"))
    lines = re.findall(r"^(?:\$ |[\w./]+/)?burst +([\w-][^#\n]*)", blocks, re.MULTILINE)
    lines += re.findall(r"`burst +([^`#(][^`#]*)`", FENCE.sub("", text))  # `burst (ring, query side)` is a trial's name
    return [line.split() for line in lines]


@cache
def burst_help(command: str) -> str | None:
    """What `burst [COMMAND] --help` prints, or None when there is no such command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([*command.split(), "--help"])
        except SystemExit as end:
            code = int(end.code or 0)
    return out.getvalue() if code == 0 else None
