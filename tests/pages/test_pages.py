"""The pages: which there are and how long, their links, their words, and that commands, options and files exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_help import burst_help
from tests.patience import AMPLE
from tests.slow import slow

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
NOTES = sorted((DOCS / "notes").glob("*"))
PAGES = [README, CONTRIBUTING, *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "results").glob("p*/*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)(?: +\"[^\"]*\")?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TITLES = {
    "install.md", "attention.md", "trainers.md", "train.md", "documents.md", "memory.md", "plan.md", "experiments.md",
    "results.md", "baselines.md", "conform.md", "paper.md", "cluster.md", "reference.md", "8b-at-128k.md",
    "own-method.md", "hybrids.md", "README.md",
}  # fmt: skip
# A page is finished in ten minutes. The reference, results and the tables at the end of the cluster page are looked up.
MAX_WORDS, MAX_WORDS_OF, MAX_WORDS_OF_A_NOTE = (
    2400,
    {"CONTRIBUTING.md": 2500, "reference.md": 3600, "results.md": 2600, "cluster.md": 3000},
    1200,
)
# One name for each thing: native baseline, upstream system, `schedule: ring`, Ulysses, not compared, in the provenance.
WORDS_NOT_USED = re.compile(
    r"\b(?:native forms?|real systems?|by name|stated|not bound|weak forms?|trad(?:e|es|ed|ing) (?:its )?heads"
    r"|levers?|(?:an?|its|the|their|whose) turns?)\b",
    re.IGNORECASE,
)
# Names of folders and of the distribution: in pip lines, and on the page for contributors.
NAMES_OF_FOLDERS = re.compile(r"\bharness\b|(?<!copy )(?<!container )\bengines?\b", re.IGNORECASE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_folder_of_pages_holds_these_and_no_others():
    found = {path.name for path in DOCS.iterdir() if not path.name.startswith(".")}
    assert found == TITLES | {"notes", "figures", "quoted.yaml"}
    undated = [path.name for path in NOTES if not re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", path.name)]
    assert undated == []


@pytest.mark.parametrize("page", [CONTRIBUTING, *sorted(DOCS.glob("*.md")), *NOTES], ids=name)
def test_a_page_is_finished_in_ten_minutes(page):
    limit = MAX_WORDS_OF_A_NOTE if page in NOTES else MAX_WORDS_OF.get(page.name, MAX_WORDS)
    assert len(words_of(page.read_text(encoding="utf-8"))) <= limit


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_has_one_name_for_each_thing(page):
    prose = prose_of(page.read_text(encoding="utf-8"))
    found = [one.group() for one in WORDS_NOT_USED.finditer(prose)]
    if page == README or page.parent == DOCS:
        found += [one.group() for one in NAMES_OF_FOLDERS.finditer(prose)]
    assert found == []


def test_words_are_counted_and_names_are_found_in_prose_alone():
    page = "A [real](engine.md) `engine` | 2.5 |\n| --- |\n<!--x-->95%<!--/--> of its turn\n```\nby name\n```\n"
    assert words_of(page) == ["A", "[real](engine.md)", "`engine`", "2.5", "95%", "of", "its", "turn", "by", "name"]
    assert [one.group() for one in WORDS_NOT_USED.finditer(prose_of(page))] == ["its turn"]
    assert NAMES_OF_FOLDERS.findall(prose_of(page + "the copy engine, our engine")) == ["engine"]


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
    index = DOCS / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text("utf-8"))}
    assert {page for page in PAGES if page.parent == index.parent} - {index} <= linked
    assert index in {(ROOT / target).resolve() for target in LINK.findall(README.read_text("utf-8"))}


def test_every_file_of_the_tree_exists():
    paths = tree(CONTRIBUTING.read_text(encoding="utf-8"))
    assert {"engine/attention", "experiments/models", "README.md"} <= set(paths)
    local = {"results/runs"}  # made by the first run, and not in git
    assert [path for path in paths if path not in local and not (ROOT / path).exists()] == []


def test_the_tree_leaves_out_no_folder_and_no_package():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so folders of the project cannot be told from others")
    files = [Path(path) for path in listed.stdout.splitlines() if not path.startswith(".")]
    top = {str(path.parents[-2]) for path in files if len(path.parts) > 1}
    packages = {path.parent for path in files if path.name == "__init__.py" and path.parts[0] != "tests"}
    systems = {path for path in packages if "METHOD = " in (ROOT / path / "__init__.py").read_text(encoding="utf-8")}
    shown = {str(path) for path in packages - systems if len(path.parts) == 2}
    assert top | shown <= set(tree(CONTRIBUTING.read_text(encoding="utf-8")))
    undescribed = [str(path) for path in packages if not (ROOT / path / "__init__.py").read_text("utf-8").strip()]
    assert [path for path in undescribed if not path.startswith("baselines/stand_ins/")] == []


def test_the_readme_is_a_first_screen():
    page = README.read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 150
    assert len(re.findall(r"^!\[", page, re.MULTILINE)) == 1, "one figure"
    tables = re.findall(r"^\|(?: ?-+ ?\|)+$", page, re.MULTILINE)
    assert len(tables) == 4, "speed in how much memory, the pages to read on, ratios, and words"


@pytest.mark.parametrize(
    "launcher", [*slow(([],)), ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
)
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
    # Ranks share one pipe, so two words may stand on one line.
    assert re.findall(r"right-of-\d+", ended.stdout) == [f"right-of-{2 if launcher else 1}"] * (2 if launcher else 1)


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
        named = [word for word in words[:3] if not word.startswith(("-", "["))]  # the second and third may be verbs
        known = next(filter(None, (burst_help(" ".join(named[:count])) for count in (3, 2, 1))), None)
        options = [re.split(r"[=\]]", word)[0].lstrip("[") for word in words if word.lstrip("[").startswith("-")]
        if known is None or any(option not in known for option in options):
            unknown.append(" ".join(words))
    assert not unknown


def test_every_make_target_a_page_shows_is_known():
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = {target for page in PAGES for target in re.findall(r"[`\n]make ([a-z]+)\b", page.read_text("utf-8"))}
    assert {"demo", "test"} <= shown <= set(rules)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub forms them: a title that repeats gets a number."""
    if page.suffix != ".md":
        return set()
    anchors: dict[str, int] = {}
    for title in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors[anchor] = anchors.get(anchor, -1) + 1
    return {f"{anchor}-{n}" if n else anchor for anchor, last in anchors.items() for n in range(last + 1)}


def words_of(page: str) -> list[str]:
    """Words as a reader meets them: in code and tables too, without rules, bars and markers of quoted numbers."""
    return [word for word in re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL).split() if re.search(r"\w", word)]


def prose_of(page: str) -> str:
    """The page without code, addresses of links, comments and the list of published runs, whose titles are those of
    their records, on one line."""
    listed = r"(?s)<!--published_runs-->.*?<!--/-->"
    for apart in (r"(?ms)^```.*?^```", listed, r"(?s)<!--.*?-->", r"`[^`\n]*`", r"(?<=\])\([^)\s]+\)", r"https?://\S+"):
        page = re.sub(apart, " ", page)
    return " ".join(page.split())


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
